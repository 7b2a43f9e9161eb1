"""Extremes over dimensions that may be split: each rank finds its own, the ranks compare them.

The result is complete on every rank (Invariant), as is the gradient that comes back: each rank
keeps the part that belongs to its block. Logical any/all and logsumexp work the same way.
"""

from __future__ import annotations

from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind
from autopar.ir.rules.reduced import reduction_rule
from autopar.ir.rules.registry import register


@register("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def _extreme(node: Node) -> Rule:
    """The gradient is shared out evenly among ties, which must be counted over all ranks."""
    return _completed(node, backward=1)


@register("aten.aminmax.default")
def _both_extremes(node: Node) -> Rule:
    return _completed(node, forward=2, backward=2)


@register("aten.max.dim", "aten.min.dim")
def _extreme_with_index(node: Node) -> Rule:
    return _completed(node, forward=2)


@register("aten.argmax.default", "aten.argmin.default")
def _index_of_extreme(node: Node) -> Rule:
    """Without `dim` the index counts over the flattened tensor: only a 1-d one may be split."""
    call = bind(node)
    flat = call["dim"] is None and len(node.operands[0].shape) > 1
    return _completed(node, forward=2, whole=("r",) if flat else ())


@register("aten.logsumexp.default")
def _logsumexp(node: Node) -> Rule:
    return _completed(node, forward=2)


@register(
    "aten.any.default", "aten.any.dim", "aten.any.dims",
    "aten.all.default", "aten.all.dim", "aten.all.dims",
)  # fmt: skip
def _logical(node: Node) -> Rule:
    return _completed(node)


def _completed(
    node: Node, forward: int = 1, backward: int = 0, whole: tuple[str, ...] = ()
) -> Rule:
    """A reduction whose runtime operator makes the result whole on every rank."""
    call = bind(node)
    _, name, overload = node.op.split(".")
    return reduction_rule(
        node,
        call.get("dim"),
        call.get("keepdim", False),
        forward=forward,
        backward=backward,
        absent="I",
        assist=f"autopar.{name}_{overload}",
        whole=whole,
    )
