"""The step of many values at once.

``autopar.fused(values, steps)`` takes each of several values of one dtype through the same
reshard steps, with one collective per step for all of them::

    %v_1 : f32[8, 4] grad rep(dp), %w_1 : f32[4, 8] grad rep(dp) =
        autopar.fused((%v, %w), (("autopar.all_gather", ("dp",), ((0, "R"), (1, "R"))),))

A step is its operator, its axes, and for each value the arguments that follow the axes. Result k
is what value k becomes.

One of the steps may cast (``("autopar.cast", (), ((bf16,), (bf16,)))``): parameters are then cast
before they are sent, and their gradients are summed in the dtype of the node's attribute
``reduced_in`` (`autopar.ir.reduced`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.errors import GraphError
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.steps import step_layout

FUSED = "autopar.fused"

#: What a dry run of it calls on a tensor where it waits for the collective that makes or reads it.
WAITS = torch.ops.aten.alias.default

#: The step that casts.
CAST_STEP = "autopar.cast"

#: The steps it can take.
FUSABLE = (
    "autopar.all_gather",
    "autopar.all_reduce",
    CAST_STEP,
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
        _require(op != CAST_STEP or _is_cast(axes, arguments), "steps")
        found.append(FusedStep(op, axes, arguments))
    return tuple(found)


def _is_cast(axes: Any, arguments: tuple[tuple[Any, ...], ...]) -> bool:
    """Whether all values are cast to one dtype."""
    return (
        axes == ()
        and len(set(arguments)) == 1
        and len(arguments[0]) == 1
        and isinstance(arguments[0][0], torch.dtype)
    )


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise GraphError(
            f"{FUSED}: malformed {what}; it takes one value per result, and steps of an operator, "
            "axes, and arguments for each value"
        )


def sends_forward(node: Node) -> bool:
    """Whether the forward of a fused node communicates."""
    return any(op in ("autopar.all_gather", "autopar.all_reduce") for op, *_ in node.args[1])


def dtype_after(node: Node) -> torch.dtype:
    """The dtype that the values of a fused node have when they leave it."""
    casts = [arguments[0][0] for op, _, arguments in node.args[1] if op == CAST_STEP]
    dtype: torch.dtype = casts[-1] if casts else node.args[0][0].dtype
    return dtype


def layouts_through(node: Node, mesh: Mesh, member: int) -> tuple[Layout, ...]:
    """The layouts of one of the values: as it comes, and after each step.

    Raises LayoutError where a step does not apply.
    """
    value = node.args[0][member]
    layouts = [value.layout]
    for op, axes, arguments in node.args[1]:
        if op == CAST_STEP:
            layouts.append(layouts[-1])
            continue
        after = step_layout(op, layouts[-1], axes, *arguments[member], shape=value.shape, mesh=mesh)
        layouts.append(after)
    return tuple(layouts)
