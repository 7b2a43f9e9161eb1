"""The step of many values at once.

``autopar.fused(values, steps)`` takes each of several values of one dtype through the same
reshard steps, with one collective per step for all of them::

    %v_1 : f32[8, 4] grad rep(dp), %w_1 : f32[4, 8] grad rep(dp) =
        autopar.fused((%v, %w), (("autopar.all_gather", ("dp",), ((0, "R"), (1, "R"))),))

A step is its operator, its axes, and for each value the arguments that follow the axes. Result k
is what value k becomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.errors import GraphError
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.steps import step_layout

FUSED = "autopar.fused"

#: The steps it can take.
FUSABLE = (
    "autopar.all_gather",
    "autopar.all_reduce",
    "autopar.mask",
    "autopar.pad",
    "autopar.slice",
    "autopar.to_invariant",
    "autopar.to_replicate",
)


@dataclass(frozen=True)
class FusedStep:
    """One step of all values; `arguments` are those of each value after the axes."""

    op: str
    axes: tuple[str, ...]
    arguments: tuple[tuple[Any, ...], ...]

    @property
    def literal(self) -> tuple[Any, ...]:
        """As it stands in a node's arguments."""
        return (self.op, self.axes, self.arguments)


def fused_node(values: tuple[Value, ...], steps: tuple[FusedStep, ...], **fields: Any) -> Node:
    """The node; `fields` are those of `Node` besides operator and arguments."""
    return Node(FUSED, (values, tuple(step.literal for step in steps)), **fields)


def steps_of(node: Node) -> tuple[FusedStep, ...]:
    """The steps of a fused node. Raises GraphError where its arguments are malformed."""
    if len(node.args) != 2 or node.kwargs:
        raise GraphError(f"{FUSED}: it takes a tuple of values and a tuple of steps by position")
    values, steps = node.args
    _require(isinstance(values, tuple) and len(values) == len(node.results) > 0, "values")
    _require(all(isinstance(v, Value) for v in values), "values")
    _require(isinstance(steps, tuple) and bool(steps), "steps")
    found = []
    for step in steps:
        _require(isinstance(step, tuple) and len(step) == 3, "steps")
        op, axes, arguments = step
        if op not in FUSABLE:
            raise GraphError(f"{FUSED}: it has the steps {', '.join(FUSABLE)}, got {op!r}")
        _require(isinstance(arguments, tuple) and len(arguments) == len(values), "steps")
        _require(all(isinstance(each, tuple) for each in arguments), "steps")
        found.append(FusedStep(op, axes, arguments))
    return tuple(found)


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise GraphError(
            f"{FUSED}: malformed {what}; it takes one value per result, and steps of an operator, "
            "axes, and arguments for each value"
        )


def sends_forward(node: Node) -> bool:
    """Whether the forward of a fused node communicates."""
    return any(op in ("autopar.all_gather", "autopar.all_reduce") for op, *_ in node.args[1])


def layouts_through(node: Node, mesh: Mesh, member: int) -> tuple[Layout, ...]:
    """The layouts of one of the values: as it comes, and after each step.

    Raises LayoutError where a step does not apply.
    """
    value = node.args[0][member]
    layouts = [value.layout]
    for op, axes, arguments in node.args[1]:
        after = step_layout(op, layouts[-1], axes, *arguments[member], shape=value.shape, mesh=mesh)
        layouts.append(after)
    return tuple(layouts)
