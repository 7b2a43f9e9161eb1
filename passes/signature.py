"""What makes two calls the same: all that their rule, strategies and prices depend on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from autopar.ir.graph import Node, Value
from autopar.ir.keep import RECOMPUTE

#: What one tensor contributes: shape, dtype, whether a gradient flows back to it.
Type = tuple[tuple[int, ...], Any, bool]


def type_of(value: Value) -> Type:
    """The type of a value, as far as plans are concerned."""
    return tuple(value.shape), value.dtype, value.grad


def signature(node: Node) -> Hashable:
    """Equal for calls that differ in nothing but the names of their values, their origin and what
    they are computed again with.

    Which operands are one and the same value is part of it: ``mul(x, x)`` is not ``mul(x, y)``.
    """
    numbers: dict[str, int] = {}
    return (
        node.op,
        _frozen(node.args, numbers),
        _frozen(node.kwargs, numbers),
        tuple(map(type_of, node.results)),
        _frozen({k: v for k, v in node.attrs.items() if k != RECOMPUTE}, numbers),
    )


def _frozen(item: Any, numbers: dict[str, int]) -> Hashable:
    """An argument as something hashable; a value becomes its type and its number in the call."""
    match item:
        case Value():
            return Value, numbers.setdefault(item.name, len(numbers)), type_of(item)
        case tuple() | list():
            return type(item), *(_frozen(part, numbers) for part in item)
        case dict():
            return dict, *((key, _frozen(part, numbers)) for key, part in item.items())
        case bool() | int() | str() | None:
            return type(item), item  # 1, 1.0 and True are equal, but not the same argument
    return type(item), repr(item)
