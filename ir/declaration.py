"""A rule apart from any call: what a user writes, and what a discovery finds.

`declare` makes it the rule of one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.declare import declare
from autopar.ir.errors import RuleError
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument


@dataclass(frozen=True)
class Declaration:
    """The notation of `autopar.ir.declare`, and what goes with it.

    spec:
        ``"b* i, o i -> b* o"``
    whole, linear, joins, sizes:
        as `declare` takes them. A size argument with a factor also tells that factor's size.
    """

    spec: str
    whole: tuple[str, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    joins: tuple[int, ...] = ()
    sizes: tuple[SizeArgument, ...] = ()

    def rule(self, node: Node, note: str = "") -> Rule:
        """The rule of one call. Raises GraphError where the notation does not fit it."""
        known = {s.factor: _argument(node, s.argument) for s in self.sizes if s.factor is not None}
        rule = declare(
            node,
            self.spec,
            whole=self.whole,
            linear=self.linear,
            joins=self.joins,
            sizes=self.sizes,
            factor_sizes=known,
        )
        return replace(rule, note=note)

    def __str__(self) -> str:
        """The arguments of `autopar.register_rule` that say the same."""
        parts = [f'"{self.spec}"']
        for name in ("whole", "linear", "joins"):
            if value := getattr(self, name):
                parts.append(f"{name}={value!r}")
        if self.sizes:
            sizes = {s.argument: s.result if s.factor is None else s.factor for s in self.sizes}
            parts.append(f"sizes={sizes!r}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The declaration as plain data; what it does not say is left out."""
        sizes = [[s.argument, s.result if s.factor is None else s.factor] for s in self.sizes]
        data = {
            "spec": self.spec,
            "whole": list(self.whole),
            "linear": [list(group) for group in self.linear],
            "joins": list(self.joins),
            "sizes": sizes,
        }
        return {key: value for key, value in data.items() if value}

    @staticmethod
    def from_json(data: Any) -> Declaration:
        """The inverse of `to_json`. Raises RuleError where a field is missing or malformed."""
        try:
            known = {"spec", "whole", "linear", "joins", "sizes"}
            if not isinstance(data["spec"], str) or set(data) - known:
                raise TypeError
            return Declaration(
                data["spec"],
                tuple(str(name) for name in data.get("whole", ())),
                tuple(tuple(int(k) for k in group) for group in data.get("linear", ())),
                tuple(int(k) for k in data.get("joins", ())),
                tuple(size_argument(where, what) for where, what in data.get("sizes", ())),
            )
        except (KeyError, TypeError, ValueError):
            raise RuleError(f"not the declaration of a rule: {data!r}"[:200]) from None


def size_argument(where: int | str, what: int | str) -> SizeArgument:
    """An argument (by position or name) that spells a result's shape or a factor's size."""
    if isinstance(what, str):
        return SizeArgument(where, factor=what)
    return SizeArgument(where, result=what)


def _argument(node: Node, where: int | str) -> int:
    """The number that a call gives for a size. Raises RuleError where it gives none."""
    if isinstance(where, str):
        given = node.kwargs.get(where)
    else:
        given = node.args[where] if where < len(node.args) else None
    if isinstance(given, bool) or not isinstance(given, int):
        raise RuleError(
            f"{node.op}: the argument {where!r} should be a size, the call has {given!r}"
        )
    return given
