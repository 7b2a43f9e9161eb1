"""A dense layer whose weight is stored ``[in, out]``, on inputs of any rank."""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.registry import register


@register("autopar.addmm_nd")
def _addmm_nd(node: Node) -> Rule:
    """`(bias, x, w)`; hints list x, w, bias as for a linear layer."""
    return declare(
        node,
        "o, b* i, i o -> b* o",
        joins=(0,),
        linear=((0, 1), (0, 2)),
        flops_per_point=2,
        hint_order=(1, 2, 0),
        flatten_hint=True,
    )
