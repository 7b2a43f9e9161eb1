"""Gated linear units: the dimension that is halved is whole."""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, dim_names, normal_dim, notation
from autopar.ir.rules.registry import register


@register("aten.glu.default")
def glu(node: Node) -> Rule:
    dims = dim_names(len(node.operands[0].shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    made = [*dims[:at], "half", *dims[at + 1 :]]
    return declare(node, notation([dims], [made]), whole=[dims[at], "half"], flops_per_point=2)
