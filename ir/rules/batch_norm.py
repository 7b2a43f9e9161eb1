"""Batch normalisation.

In training the statistics are those of the whole batch: where batch or space is split, the ranks
share sums (what is elsewhere called synchronised batch norm). With fixed statistics it is a plain
map per channel.
"""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node, Value
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import bind, operand_terms
from autopar.ir.rules.registry import register

#: Operations per element: two passes for the statistics, then shift, scale and affine map.
FLOPS = 7

#: Mean and variance are one all-reduce each, of one number per channel; so are their gradients.
_SHARED = Assist(forward=2, backward=2, over=("c",), absent="I")


@register("autopar.batch_norm_train")
def _train(node: Node) -> Rule:
    """`(x, weight, bias, running_mean, running_var, momentum, eps) -> (y, new mean, new var)`"""
    per_channel = ", c" * (sum(isinstance(a, Value) for a in node.args) - 1)
    return declare(
        node,
        f"b c s*{per_channel} -> b c s*, c, c",
        assisted={"b": _SHARED, "s": _SHARED},
        assist="autopar.batch_norm_train",
        flops_per_point=FLOPS,
    )


_TERMS = {
    "input": "b c s*", "weight": "c", "bias": "c", "running_mean": "c", "running_var": "c",
}  # fmt: skip


@register("aten.batch_norm.default")
def _either(node: Node) -> Rule | None:
    call = bind(node)
    left = operand_terms(node, _TERMS)
    if not call["training"]:
        return declare(node, f"{left} -> b c s*", flops_per_point=2)
    if call["running_mean"] is not None:
        # It updates its running statistics in place, which no rule can express.
        return None
    return declare(
        node,
        f"{left} -> b c s*",
        assisted={"b": _SHARED, "s": _SHARED},
        assist="autopar.batch_norm",
        flops_per_point=FLOPS,
    )


@register("aten._native_batch_norm_legit_no_training.default")
def _fixed(node: Node) -> Rule:
    """Its second and third results are empty."""
    return declare(node, f"{operand_terms(node, _TERMS)} -> b c s*, e*, e*", flops_per_point=2)
