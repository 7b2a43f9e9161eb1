"""Operators that make a tensor from sizes: constants, ranges and the `*_like` forms.

A split constant spells its local sizes. A split range starts at its own offset, which takes the
runtime operator.
"""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule, SizeArgument
from autopar.ir.rules.registry import register


@register(
    "aten.empty.memory_format", "aten.full.default", "aten.ones.default", "aten.zeros.default"
)
def _sized(node: Node) -> Rule:
    return declare(node, "-> b*", sizes=(SizeArgument(_size_argument(node, 0)),))


@register(
    "aten.new_empty.default", "aten.new_full.default",
    "aten.new_ones.default", "aten.new_zeros.default",
)  # fmt: skip
def _sized_beside(node: Node) -> Rule:
    """The operand gives only its dtype and device."""
    return declare(node, "u* -> b*", whole=("u",), sizes=(SizeArgument(_size_argument(node, 1)),))


def _size_argument(node: Node, position: int) -> int | str:
    return position if len(node.args) > position else "size"


@register(
    "aten.empty_like.default", "aten.full_like.default",
    "aten.ones_like.default", "aten.zeros_like.default",
)  # fmt: skip
def _shaped_like(node: Node) -> Rule:
    return declare(node, "b* -> b*")


@register("aten.scalar_tensor.default")
def _scalar(node: Node) -> Rule:
    return declare(node, "-> ")


#: Operators whose entries depend on their position.
RANGES = (
    "arange.default", "arange.start", "arange.start_step", "linspace.default", "eye.default",
    "eye.m",
)  # fmt: skip


@register(*(f"aten.{name}" for name in RANGES))
def _position_dependent(node: Node) -> Rule:
    _, name, overload = node.op.split(".")
    return declare(node, "-> b*", assisted={"b": Assist()}, assist=f"autopar.{name}_{overload}")


@register("aten.tril_indices.default", "aten.triu_indices.default")
def _triangle_indices(node: Node) -> Rule:
    """Rows and columns of the entries of a triangle, whole."""
    return declare(node, "-> two entries", whole=("two", "entries"))
