"""The rule of the layout constraint that `shard(tensor, …)` leaves in a graph: an identity."""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.registry import register


@register("autopar.constrain")
def constrain(node: Node) -> Rule:
    return declare(node, "d* -> d*", linear=((0,),))
