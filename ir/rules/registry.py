"""The table of operator rules: operator name -> a function from the call to its rule."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.graph import Node
from autopar.ir.rule import Rule, opaque_rule

RuleFunction = Callable[[Node], Rule | None]

_TABLE: dict[str, RuleFunction] = {}
_FALLBACKS: list[RuleFunction] = []
_USERS: dict[str, RuleFunction] = {}
_LAST_RESORTS: list[RuleFunction] = []


def register(*ops: str) -> Callable[[RuleFunction], RuleFunction]:
    """Declare the rule of the named operators (``"aten.linear.default"``).

    The function may return None where it cannot speak for this call; the call is then opaque.
    """

    def add(fn: RuleFunction) -> RuleFunction:
        for op in ops:
            if op in _TABLE:
                raise ValueError(f"operator {op!r} has a rule already")
            _TABLE[op] = fn
        return fn

    return add


def register_fallback(fn: RuleFunction) -> RuleFunction:
    """Declare a rule that recognises its operators itself: it is asked about those in no table."""
    _FALLBACKS.append(fn)
    return fn


def register_last_resort(fn: RuleFunction) -> RuleFunction:
    """Declare what is asked about operators that neither a table nor a fallback knows."""
    _LAST_RESORTS.append(fn)
    return fn


def register_users(op: str, fn: RuleFunction | None) -> None:
    """Declare a user's rule of an operator, or take it back; it goes before the fallbacks."""
    _USERS.pop(op, None)
    if fn is not None:
        _USERS[op] = fn


def registered() -> dict[str, RuleFunction]:
    """Every declared operator with its rule function, in alphabetical order."""
    return dict(sorted(_TABLE.items()))


def rule_for(node: Node) -> Rule:
    """The rule of a call; an operator without one is opaque (everything Invariant)."""
    named = _USERS.get(node.op) or _TABLE.get(node.op)
    fns = [named] if named is not None else [*_FALLBACKS, *_LAST_RESORTS]
    rule = next((rule for rule in (fn(node) for fn in fns) if rule is not None), None)
    if rule is None:
        return opaque_rule(
            [len(v.shape) for v in node.operands], [len(v.shape) for v in node.results]
        )
    return rule
