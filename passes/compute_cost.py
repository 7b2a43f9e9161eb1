"""What one operator costs one rank under each of its strategies: roofline, forward and backward.

Computing takes ``operations / rate + special functions / special rate``, memory what the bytes take
at their pace (`Device.memory_seconds`). An operator takes the longer of the two, the share
`Device.unhidden` of the shorter, and a launch. All of it is on local sizes: an axis that splits a
factor divides the operations by its size, and the bytes of every tensor that has the factor; along
other axes (roles I, R, P) every rank computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from autopar.ir.cut import is_even, largest
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Dims, Factor, Rule, Strategy
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


class Times(NamedTuple):
    """Seconds on one rank of each strategy [strategy]; `assist` is that of the collectives which
    an assisted operator makes."""

    forward: np.ndarray
    backward: np.ndarray
    assist: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.forward + self.backward + self.assist


def strategy_times(
    node: Node, rule: Rule, strategies: Sequence[Strategy], mesh: Mesh, device: Device
) -> np.ndarray:
    """Seconds on one rank, forward and backward together, of each strategy [strategy]."""
    return call_times(node, rule, strategies, mesh, device).total


def call_times(
    node: Node, rule: Rule, strategies: Sequence[Strategy], mesh: Mesh, device: Device
) -> Times:
    """What one rank spends on a call, and when.

    An assisted factor that is split adds the all-reduces its `Assist` declares.
    """
    splits = _splits(rule, strategies, mesh)
    call = _Local(node, rule, splits, device)
    if is_view(node):
        return Times(np.zeros(len(strategies)), call.view_backward(), np.zeros(len(strategies)))
    assist = _assist_times(node, rule, splits, strategies, mesh, device)
    return Times(call.forward(), call.backward(), assist)


class _Local:
    """One call on one rank, under each of many strategies."""

    def __init__(self, node: Node, rule: Rule, splits: _Splits, device: Device) -> None:
        self.node, self.rule, self.splits, self.device = node, rule, splits, device
        self.operands = _local_bytes(node.operands, rule.operands, splits)
        self.results = _local_bytes(node.results, rule.results, splits).sum(axis=0)
        self.inner = self._inner()
        read = self.operands
        if node.op in _LOOKUPS:
            read = np.concatenate([np.minimum(read[:1], self.results), read[1:]])
        self.read = read.sum(axis=0)
        self.wanted = [i for i in range(len(node.operands)) if node.operand_grad(i)]
        self.none = np.zeros(len(splits.roles))

    def forward(self) -> np.ndarray:
        moved = self.read + self.results + self.inner
        return self._roofline(self.rule.flops, self.rule.special[0], moved)

    def backward(self) -> np.ndarray:
        node, rule, wanted = self.node, self.rule, self.wanted
        if not wanted or _passes_gradient_on(node, wanted):
            return self.none
        multiplied = [i for i in wanted if i not in rule.joins]
        if not is_contraction(rule):
            # Read the results' gradients and what was saved, write the operands' gradients; inner
            # tensors are read, and their gradients written and read.
            saved = 0.0 if _is_linear(node, rule) else self.read
            moved = self.results + saved + self.operands[wanted].sum(axis=0) + 3 * self.inner
            return self._roofline(len(multiplied) * rule.flops, rule.special[1], moved)
        # One product of the forward's size for each operand with a gradient; a bias is summed up.
        product = self._roofline(rule.flops, 0, self.read + self.results)
        special = rule.special[1] / self.splits.all_pieces / self.device.special_rate
        times = len(multiplied) * product + special
        for i in wanted:
            if i in rule.joins:
                times = times + self._roofline(0, 0, self.results + self.operands[i])
        return times

    def view_backward(self) -> np.ndarray:
        """A view of all elements hands its gradient on. That of a part is made whole, that of an
        expanded tensor summed up."""
        sizes = [v.numel for v in self.node.results]
        if not self.wanted or sizes == [self.node.operands[0].numel]:
            return self.none
        return self._roofline(0, 0, self.results + self.operands[0])

    def _roofline(self, flops: float, special: float, moved: np.ndarray) -> np.ndarray:
        """Seconds of one operator; operations and special functions are those of all ranks."""
        device, pieces = self.device, self.splits.all_pieces
        computing = flops / pieces / device.flop_rate(_compute_dtype(self.node))
        computing = computing + special / pieces / device.special_rate
        memory = device.memory_seconds(moved)
        hidden = np.minimum(computing, memory) * (1 - device.unhidden)
        return computing + memory - hidden + device.launch

    def _inner(self) -> np.ndarray:
        """Bytes of the tensors that the operator makes for itself [strategy]."""
        itemsize = _compute_dtype(self.node).itemsize
        total = np.zeros(len(self.splits.roles))
        for factors in self.rule.inner:
            size = math.prod(self.rule.by_name[name].size for name in factors)
            total += size * itemsize / self.splits.pieces(factors)
        return total


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
    pieces = np.array([layout.pieces(value.shape, mesh) for layout in layouts])
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
        into how many pieces the axis splits its factor, [strategy, axis]; less than that where
        they are uneven, so that dividing by it gives the largest
    """

    def __init__(self, names: dict[str, int], roles: np.ndarray, mesh: Mesh) -> None:
        self.names = names
        self.roles = roles
        self.sizes = np.where(roles >= 0, np.array(mesh.sizes, dtype=float), 1.0)
        self._pieces: dict[frozenset[str], np.ndarray] = {}

    @property
    def all_pieces(self) -> np.ndarray:
        """How often the largest part goes into the whole, all factors together, [strategy]."""
        return np.prod(self.sizes, axis=1)

    def pieces(self, factors: Iterable[str]) -> np.ndarray:
        """How often the largest part goes into the whole, some factors together, [strategy]."""
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
    splits = _Splits(names, roles, mesh)
    for factor in rule.factors:
        if factor.size % mesh.size:
            _count_uneven(splits, factor, strategies, mesh)
    return splits


def _count_uneven(
    splits: _Splits, factor: Factor, strategies: Sequence[Strategy], mesh: Mesh
) -> None:
    """Let the first axis that cuts a factor unevenly count for less than its size."""
    mine = splits.roles == splits.names[factor.name]
    for row in np.flatnonzero(mine.any(axis=1)).tolist():
        counts = mesh.sizes_of(strategies[row].axes_of(factor.name))
        if not is_even(factor.size, counts):
            times = factor.size / largest(factor.size, counts)
            splits.sizes[row, int(mine[row].argmax())] *= times / math.prod(counts)


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
