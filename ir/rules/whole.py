"""Calls that stay whole, and the check of frozen decisions (see `ir/whole.py`)."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, opaque_rule
from autopar.ir.rules.arguments import dim_names, floating, notation
from autopar.ir.rules.registry import register, register_fallback
from autopar.ir.whole import whole_of


@register_fallback
def whole(node: Node) -> Rule | None:
    """What looks at the values of its operands, or draws random numbers, is never split."""
    found = whole_of(node.op)
    if found is None or not (found.needs_data or found.random):
        return None
    reason = "depends on the values of tensors" if found.needs_data else "draws random numbers"
    rule = opaque_rule(
        [len(v.shape) for v in node.operands], [len(v.shape) for v in node.results], reason
    )
    return replace(rule, flops=found.flops)


@register("autopar.checked")
def checked(node: Node) -> Rule:
    """The tensor itself; the conditions are whole on every rank, so that all ranks agree."""
    dims = dim_names(len(node.operands[0].shape), "d")
    conditions = [["1"] * len(v.shape) for v in node.operands[1:]]
    return declare(node, notation([dims, *conditions], [dims]), linear=floating(node, (0,)))
