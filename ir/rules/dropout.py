"""Operators that draw random numbers.

Always replaced by the runtime's own, because the ranks must agree: different numbers on the
blocks of one tensor, the same numbers on copies. See `autopar.runtime.random`.
"""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument
from autopar.ir.rules.arguments import bind
from autopar.ir.rules.registry import register

#: Position of the argument that spells the sizes.
_SIZED = {
    "aten.rand.default": 0,
    "aten.randn.default": 0,
    "aten.randint.default": 1,
    "aten.randint.low": 2,
    "aten.normal.float_float": 2,
}


@register(
    "aten.dropout.default", "aten.native_dropout.default",
    "aten.feature_dropout.default", "aten.alpha_dropout.default",
)  # fmt: skip
def _dropout(node: Node) -> Rule:
    """Linear in x for a fixed mask, except where a mask is also returned or x is shifted."""
    call = bind(node)
    name = node.op.split(".")[1]
    active = call["p"] != 0 and call["train"] is not False
    linear = name in ("dropout", "feature_dropout") or not active
    return declare(
        node,
        "b* -> " + ", ".join(["b*"] * len(node.results)),
        assist=f"autopar.{name}" if active else None,
        always_assist=active,
        linear=((0,),) if linear and len(node.results) == 1 else (),
        flops_per_point=2 if active else 0,
    )


@register(*_SIZED)
def _sized(node: Node) -> Rule:
    _, name, overload = node.op.split(".")
    return declare(
        node,
        "-> b*",
        assist=f"autopar.{name}_{overload}",
        always_assist=True,
        sizes=(SizeArgument(_SIZED[node.op]),),
    )


@register(
    "aten.rand_like.default", "aten.randn_like.default",
    "aten.randint_like.default", "aten.randint_like.low_dtype",
    "aten.uniform.default", "aten.normal_functional.default", "aten.exponential.default",
    "aten.bernoulli.default", "aten.bernoulli.p",
)  # fmt: skip
def _shaped_like(node: Node) -> Rule:
    _, name, overload = node.op.split(".")
    return declare(node, "b* -> b*", assist=f"autopar.{name}_{overload}", always_assist=True)


@register("aten.randperm.default")
def _randperm(node: Node) -> Rule:
    return declare(
        node, "-> n", whole=("n",), assist="autopar.randperm_default", always_assist=True
    )


@register("aten.multinomial.default")
def _multinomial(node: Node) -> Rule:
    """Draws per row depend on the rows before it, so rows stay whole."""
    return declare(
        node,
        "b* c -> b* s",
        whole=("b", "c", "s"),
        assist="autopar.multinomial_default",
        always_assist=True,
    )
