"""What one operator costs one rank under each of its strategies: roofline, forward and backward.

time = max(operations / rate, bytes / memory bandwidth) + launch, on local sizes: an axis that
splits a factor divides the operations by its size, and the bytes of every tensor that has the
factor; along other axes (roles I, R, P) every rank computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch

from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Dims, Rule, Strategy
from autopar.passes.collective_cost import collective_time
from autopar.passes.device import Device

#: Views by effect whose schema does not say so.
_UNMARKED_VIEWS = frozenset({"aten._unsafe_view.default", "aten.alias.default"})
#: Operators whose schema allows a view but which are called to make a copy.
_COPIES = frozenset({"aten.contiguous.default"})

#: Operators that read only the rows of operand 0 they are asked for.
_LOOKUPS = frozenset(
    {
        "aten.embedding.default",
        "aten.gather.default",
        "aten.index.Tensor",
        "aten.index_select.default",
    }
)
#: Operators whose backward hands the gradient on as it is to operands of the result's shape.
_PASSED_ON = frozenset({"aten.add.Tensor"})

#: Bytes Adam moves for one float32 element: it reads the parameter, the gradient and two moments
#: and writes the parameter and the moments.
ADAM_BYTES_PER_ELEMENT = 7 * 4


def strategy_times(
    node: Node, rule: Rule, strategies: Sequence[Strategy], mesh: Mesh, device: Device
) -> np.ndarray:
    """Seconds on one rank, forward and backward together, of each strategy [strategy].

    An assisted factor that is split adds the all-reduces its `Assist` declares.
    """
    if is_view(node):
        return np.zeros(len(strategies))
    splits = _splits(rule, strategies, mesh)
    operands = _local_bytes(node.operands, rule.operands, splits)
    results = _local_bytes(node.results, rule.results, splits).sum(axis=0)
    flops = rule.flops / splits.all_pieces
    rate = device.flop_rate(_compute_dtype(node))

    def roofline(operations: np.ndarray, nbytes: np.ndarray, launches: int) -> np.ndarray:
        busy = np.maximum(operations / rate, nbytes / device.memory_bandwidth)
        return busy + launches * device.launch

    read = operands
    if node.op in _LOOKUPS:
        read = np.concatenate([np.minimum(operands[:1], results), operands[1:]])
    moved = read.sum(axis=0) + results
    times = roofline(flops, moved, 1)
    wanted = [i for i in range(len(node.operands)) if node.operand_grad(i)]
    multiplied = len([i for i in wanted if i not in rule.joins])
    runs_backward = wanted and not _passes_gradient_on(node, wanted)
    if runs_backward and is_contraction(rule):
        # One product of the forward's size for each operand with a gradient.
        times += roofline(multiplied * flops, multiplied * moved, multiplied)
    elif runs_backward:
        # Read the results' gradients and what was saved, write the operands' gradients.
        saved = 0.0 if _is_linear(node, rule) else read.sum(axis=0)
        nbytes = results + saved + operands[wanted].sum(axis=0)
        times += roofline(multiplied * flops, nbytes, 1)
    return times + _assist_times(node, rule, splits, strategies, mesh, device)


def parameter_times(
    value: Value,
    layouts: Sequence[Layout],
    mesh: Mesh,
    device: Device,
    bytes_per_element: float = ADAM_BYTES_PER_ELEMENT,
) -> np.ndarray:
    """Seconds the optimizer takes to update the local shard of a parameter [layout].

    `bytes_per_element` is what the optimizer moves through memory for one element. A parameter
    without gradient is not updated and costs nothing.
    """
    if not value.grad:
        return np.zeros(len(layouts))
    pieces = np.array([mesh.axis_size(*layout.split_axes) for layout in layouts], dtype=float)
    nbytes = value.numel * bytes_per_element / pieces
    return nbytes / device.memory_bandwidth + device.launch


def is_view(node: Node) -> bool:
    """Whether a call makes no data of its own: its result is another view of its operand."""
    same_dtype = all(r.dtype == node.operands[0].dtype for r in node.results if node.operands)
    return bool(node.operands) and same_dtype and _is_view_op(node.op)


@cache
def _is_view_op(op: str) -> bool:
    if op in _UNMARKED_VIEWS or op in _COPIES:
        return op in _UNMARKED_VIEWS
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload or "default", None)
    return isinstance(found, torch._ops.OpOverload) and found.is_view


class _Splits:
    """The roles of many strategies as arrays.

    roles:
        the position of each axis' factor in `names`, [strategy, axis]; -1 where it splits none
    sizes:
        into how many pieces the axis splits its factor, [strategy, axis]
    """

    def __init__(self, names: dict[str, int], roles: np.ndarray, mesh: Mesh) -> None:
        self.names = names
        self.roles = roles
        self.sizes = np.where(roles >= 0, np.array(mesh.sizes, dtype=float), 1.0)
        self.all_pieces = np.prod(self.sizes, axis=1)
        self._pieces: dict[frozenset[str], np.ndarray] = {}

    def pieces(self, factors: Iterable[str]) -> np.ndarray:
        """Into how many pieces the factors together are split, [strategy]."""
        key = frozenset(factors)
        if key not in self._pieces:
            # The last entry is what a role of -1 picks.
            chosen = np.zeros(len(self.names) + 1, dtype=bool)
            chosen[[self.names[name] for name in key]] = True
            self._pieces[key] = np.prod(np.where(chosen[self.roles], self.sizes, 1.0), axis=1)
        return self._pieces[key]


def _splits(rule: Rule, strategies: Sequence[Strategy], mesh: Mesh) -> _Splits:
    names = {factor.name: i for i, factor in enumerate(rule.factors)}
    column = {axis: i for i, axis in enumerate(mesh.names)}
    roles = np.full((len(strategies), len(mesh.names)), -1, dtype=np.intp)
    for row, strategy in enumerate(strategies):
        for axis, role in strategy.roles:
            roles[row, column[axis]] = names.get(role, -1)
    return _Splits(names, roles, mesh)


def _local_bytes(values: Sequence[Value], dims: Sequence[Dims], splits: _Splits) -> np.ndarray:
    """Bytes of one rank's part of each tensor [tensor, strategy]."""
    local = np.empty((len(values), len(splits.roles)))
    for row, value, factors in zip(local, values, dims, strict=True):
        row[:] = value.nbytes / splits.pieces(f for dim in factors for f in dim)
    return local


def _compute_dtype(node: Node) -> torch.dtype:
    """The dtype that sets the rate: the first floating point tensor's."""
    tensors = (*node.operands, *node.results)
    return next((v.dtype for v in tensors if v.dtype.is_floating_point), torch.float32)


def is_contraction(rule: Rule) -> bool:
    """Whether some summed factor is in two operands, as in a matrix product."""
    return any(
        rule.is_reduced(factor.name)
        and sum(any(factor.name in dim for dim in dims) for dims in rule.operands) >= 2
        for factor in rule.factors
    )


def _is_linear(node: Node, rule: Rule) -> bool:
    """Whether the backward needs none of the operands: the call is linear in all of them."""
    return any(set(group) == set(range(len(node.operands))) for group in rule.linear)


def _passes_gradient_on(node: Node, wanted: Sequence[int]) -> bool:
    """Whether the operands' gradients are the result's, with nothing to compute."""
    return node.op in _PASSED_ON and all(
        node.operands[i].shape == node.results[0].shape for i in wanted
    )


def _assist_times(
    node: Node,
    rule: Rule,
    splits: _Splits,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    device: Device,
) -> np.ndarray:
    """Seconds of the all-reduces that assisted factors need, [strategy]."""
    times = np.zeros(len(strategies))
    itemsize = _compute_dtype(node).itemsize
    for factor in rule.factors:
        if factor.assist is None:
            continue
        count = factor.assist.forward + (factor.assist.backward if node.differentiable else 0)
        if not count:
            continue
        whole = math.prod(rule.by_name[name].size for name in factor.assist.over)
        nbytes = whole * itemsize / splits.pieces(factor.assist.over)
        splitting = (splits.roles == splits.names[factor.name]).any(axis=1)
        for row in np.flatnonzero(splitting).tolist():
            axes = strategies[row].axes_of(factor.name)
            times[row] += count * collective_time(device, mesh, "all_reduce", axes, nbytes[row])
    return times
