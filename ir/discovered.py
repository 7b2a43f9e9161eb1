"""Rules that are not in the compiler's table: the user's own, and those found by trying.

A call whose operator has no rule is tried once (`autopar.ir.discover`); what comes out is kept for
equal calls, can be listed, and written to a file that takes the place of trying.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.declaration import Declaration
from autopar.ir.discover import discover
from autopar.ir.errors import AutoparError, RuleError
from autopar.ir.graph import Node
from autopar.ir.probe_rule import Unsure, quietly
from autopar.ir.rule import Rule, opaque_rule
from autopar.ir.rules.registry import register_last_resort
from autopar.ir.text import DTYPE_NAMES

#: The version of the file that `to_json` makes.
VERSION = 1


@dataclass(frozen=True)
class Discovered:
    """What was found for the calls of one operator that are alike.

    op:
        the operator's full name
    call:
        the arguments: types of tensors, everything else as it is
    declaration:
        the rule, None where none is certain
    reason:
        why there is none
    """

    op: str
    call: str
    declaration: Declaration | None
    reason: str = ""

    def __str__(self) -> str:
        name = self.op.removesuffix(".default")
        if self.declaration is None:
            return f"# {name}{self.call}: not split, {self.reason}"
        return f'autopar.register_rule("{name}", {self.declaration})  # {name}{self.call}'


#: (operator, call) -> what was found, in the order it was found.
_FOUND: dict[tuple[str, str], Discovered] = {}


@register_last_resort
def discovered_rule(node: Node) -> Rule:
    """The rule found by trying; an opaque one, with the reason, where none is certain."""
    key = (node.op, call_text(node))
    if key not in _FOUND:
        _FOUND[key] = _find(node, *key)
    found = _FOUND[key]
    if found.declaration is not None:
        return found.declaration.rule(node, f"discovered: {found.declaration}")
    return opaque_rule(
        [len(v.shape) for v in node.operands], [len(v.shape) for v in node.results], found.reason
    )


def _find(node: Node, op: str, call: str) -> Discovered:
    try:
        with quietly():
            declaration = discover(node)
            declaration.rule(node)
            return Discovered(op, call, declaration)
    except Unsure as outcome:
        return Discovered(op, call, None, str(outcome))
    except AutoparError:
        raise
    except Exception as error:  # a foreign operator may fail in any way; planning goes on
        return Discovered(
            op, call, None, f"trying it failed: {type(error).__name__}: {error}"[:200]
        )


def call_text(node: Node) -> str:
    """A call's arguments as text: equal for calls that have the same rule."""

    def show(item: Any) -> str:
        if hasattr(item, "dtype") and hasattr(item, "grad"):
            grad = " grad" if item.grad else ""
            return f"{DTYPE_NAMES[item.dtype]}{list(item.shape)}{grad}"
        if isinstance(item, (tuple, list)):
            return f"[{', '.join(map(show, item))}]"
        return repr(item)

    given = [show(item) for item in node.args]
    given += [f"{key}={show(item)}" for key, item in node.kwargs.items()]
    return f"({', '.join(given)})"


def discovered() -> tuple[Discovered, ...]:
    """Everything that was found since the program began, or was loaded, in that order."""
    return tuple(_FOUND.values())


def to_json() -> dict[str, Any]:
    """What was found, as plain data."""
    entries = []
    for found in _FOUND.values():
        entry: dict[str, Any] = {"op": found.op, "call": found.call}
        if found.declaration is not None:
            entry["rule"] = found.declaration.to_json()
        else:
            entry["reason"] = found.reason
        entries.append(entry)
    return {"autopar_rules": VERSION, "rules": entries}


def from_json(data: Any) -> int:
    """Take what `to_json` wrote in place of trying; the number of rules.

    Raises RuleError where the data is something else.
    """
    if not isinstance(data, Mapping) or data.get("autopar_rules") != VERSION:
        raise RuleError(f"not a file of discovered rules of version {VERSION}")
    entries = data.get("rules")
    if not isinstance(entries, list):
        raise RuleError("the field 'rules' is missing")
    read = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not all(
            isinstance(entry.get(name), str) for name in ("op", "call")
        ):
            raise RuleError(f"not a discovered rule: {json.dumps(entry)[:100]}")
        rule = Declaration.from_json(entry["rule"]) if "rule" in entry else None
        read.append(Discovered(entry["op"], entry["call"], rule, str(entry.get("reason", ""))))
    _FOUND.update({(found.op, found.call): found for found in read})
    return len(read)
