"""Which collectives a partitioned graph runs, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.fused import CAST_STEP, FUSED, layouts_through, steps_of
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.keep import RECOMPUTE, REGATHER
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import gradient_itemsize
from autopar.ir.rule import Rule, Strategy, local_factor_size
from autopar.ir.steps import STEPS
from autopar.passes.assignment import Assignment


@dataclass(frozen=True)
class Collective:
    """One collective of one step.

    kind:
        ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``
    axes:
        the mesh axes it runs over
    nbytes:
        size of the tensor the group works on: the reduced one, the gathered one, the one to be
        scattered; for an all-to-all one rank's piece
    backward:
        whether it runs in the backward pass
    at:
        name of the call node it is run for (the consumer of a reshard, an assisted operator)
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    backward: bool
    at: str

    def __str__(self) -> str:
        return f"{self.kind}[{'+'.join(self.axes)}] {format_bytes(self.nbytes)}"


def format_bytes(nbytes: float) -> str:
    """A size in the unit that leaves it below 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


#: Reshard step -> what it runs forward and backward, by the state it ends (or began) in.
_RUNS: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "autopar.all_reduce": {"I": ("all_reduce", None), "R": ("all_reduce", "all_reduce")},
    "autopar.all_gather": {"I": ("all_gather", None), "R": ("all_gather", "reduce_scatter")},
    "autopar.slice": {"I": (None, "all_gather"), "R": (None, None)},
    "autopar.mask": {"I": (None, None), "R": (None, None)},
    "autopar.recut": {"": ("all_to_all", "all_to_all")},
    "autopar.reduce_scatter": {"": ("reduce_scatter", "all_gather")},
    "autopar.all_to_all": {"": ("all_to_all", "all_to_all")},
    "autopar.pad": {"": (None, None)},
    "autopar.to_replicate": {"": (None, "all_reduce")},
    "autopar.to_invariant": {"": (None, None)},
}
assert set(_RUNS) == set(STEPS)


#: The steps that gather or scatter, in one direction at least.
_PADDED = ("autopar.all_gather", "autopar.reduce_scatter", "autopar.slice")


def step_collectives(node: Node, mesh: Mesh, at: str) -> list[Collective]:
    """The collectives of one reshard step; none backward where no gradient flows."""
    (before,), (after,) = node.operands, node.results
    assert before.layout is not None and after.layout is not None
    forward, backward = _kinds(node.op, node.args[2:])
    count = _elements(node.op, node.args[1], after, (before.layout, after.layout), mesh)
    found = []
    if forward:
        found.append(Collective(forward, node.args[1], count * after.dtype.itemsize, False, at))
    if backward and after.grad:
        nbytes = count * gradient_itemsize(node, after)
        found.append(Collective(backward, node.args[1], nbytes, True, at))
    return found


def fused_collectives(node: Node, mesh: Mesh, at: str) -> list[Collective]:
    """The collectives of a bucket: for each of its steps one forward, one backward, or both."""
    ways = [layouts_through(node, mesh, k) for k in range(len(node.results))]
    forwards: list[Collective] = []
    backwards: list[Collective] = []
    itemsize = node.args[0][0].dtype.itemsize
    # Gradients have one dtype all the way back.
    back_itemsize = gradient_itemsize(node, node.results[0])
    for i, step in enumerate(steps_of(node)):
        if step.op == CAST_STEP:
            itemsize = step.arguments[0][0].itemsize
            continue
        forward, backward = _kinds(step.op, step.arguments[0])
        counts = [
            _elements(step.op, step.axes, v, way[i : i + 2], mesh)
            for v, way in zip(node.results, ways, strict=True)
        ]
        if forward:
            forwards.append(Collective(forward, step.axes, sum(counts) * itemsize, False, at))
        flowing = [n for v, n in zip(node.results, counts, strict=True) if v.grad]
        if backward and flowing:
            nbytes = sum(flowing) * back_itemsize
            backwards.append(Collective(backward, step.axes, nbytes, True, at))
    return [*forwards, *backwards]


def _kinds(op: str, arguments: Sequence[Any]) -> tuple[str | None, str | None]:
    """What a step with these arguments runs, forward and backward."""
    state = next((each for each in arguments if isinstance(each, str)), "")
    return _RUNS[op][state]


def _elements(
    op: str, axes: tuple[str, ...], value: Value, layouts: Sequence[Layout], mesh: Mesh
) -> int:
    """Elements that a rank holds of a value before or after a step, whichever is more.

    Uneven pieces are moved at the size of the largest.
    """
    local = [math.prod(layout.local_shape(value.shape, mesh)) for layout in layouts]
    padded = mesh.axis_size(*axes) * min(local) if op in _PADDED else 0
    return max(*local, padded)


def assisted_collectives(
    node: Node, rule: Rule, strategy: Strategy, mesh: Mesh
) -> list[Collective]:
    """The collectives that an assisted operator makes by itself."""
    found = []
    for factor in rule.factors:
        axes = strategy.axes_of(factor.name)
        if not factor.assist or not axes:
            continue
        elements = math.prod(
            local_factor_size(rule, strategy, over, mesh) for over in factor.assist.over
        )
        first = (*node.operands, *node.results)[0]
        nbytes = elements * (factor.assist.itemsize or first.dtype.itemsize)
        found += [Collective("all_reduce", axes, nbytes, False, node.name)] * factor.assist.forward
        # Statistics are differentiated with the tensor they are taken of, the first one.
        if node.operand_grad(0):
            found += [
                Collective("all_reduce", axes, nbytes, True, node.name)
            ] * factor.assist.backward
    return found


def collectives_of(
    partitioned: Graph, rules: Mapping[str, Rule], assignment: Assignment
) -> tuple[Collective, ...]:
    """Every collective of one step of a partitioned graph, in forward order.

    A reshard is put down to the call it is made for (the next one in the graph), or to the
    result where it comes last.
    """
    found: list[Collective] = []
    waiting: list[Node] = []
    mesh = assignment.mesh
    for node in partitioned.nodes:
        if node.op in STEPS or node.op == FUSED:
            waiting.append(node)
        elif not node.is_source:
            for step in waiting:
                found += _collectives(step, mesh, node.name)
            waiting = []
            runs = assisted_collectives(
                node, rules[node.name], assignment.strategies[node.name], mesh
            )
            found += _with_again(node, runs, mesh)
    for step in waiting:
        found += _collectives(step, mesh, "return")
    return tuple(found)


def _collectives(step: Node, mesh: Mesh, at: str) -> list[Collective]:
    return _with_again(step, moving_collectives(step, mesh, at), mesh)


def moving_collectives(step: Node, mesh: Mesh, at: str) -> list[Collective]:
    """The collectives of a reshard step or of a bucket."""
    made = fused_collectives if step.op == FUSED else step_collectives
    return made(step, mesh, at)


def _with_again(node: Node, runs: list[Collective], mesh: Mesh) -> list[Collective]:
    return [*runs, *(replace(c, backward=True) for c in collectives_again(node, runs, mesh))]


def collectives_again(node: Node, runs: Sequence[Collective], mesh: Mesh) -> list[Collective]:
    """Of the collectives of a call those that the backward pass runs once more, as they run forward
    (`autopar.ir.keep`)."""
    if node.op == FUSED and REGATHER in node.attrs:
        at = runs[0].at if runs else ""
        runs = fused_collectives(_members_of(node, node.attrs[REGATHER]), mesh, at)
    elif node.op == FUSED or not {RECOMPUTE, REGATHER} & set(node.attrs):
        return []
    return [c for c in runs if not c.backward]


def _members_of(node: Node, members: Sequence[int]) -> Node:
    """A bucket of some of the values."""
    values, steps = node.args
    kept = tuple((op, axes, tuple(given[k] for k in members)) for op, axes, given in steps)
    args = (tuple(values[k] for k in members), kept)
    return replace(node, args=args, results=tuple(node.results[k] for k in members))
