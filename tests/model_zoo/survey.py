"""What became of one model: its operators, and those that no plan can split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.compiler import Traced
from autopar.ir.graph import Node
from autopar.ir.rule import Rule


@dataclass(frozen=True)
class Whole:
    """Calls of one operator that are never split.

    share:
        of the model's forward floating point operations
    reason:
        why nothing of them may be split
    """

    op: str
    calls: int
    share: float
    reason: str


@dataclass(frozen=True)
class Survey:
    """One traced model.

    operators:
        how many calls its graph has
    split:
        the share of forward floating point operations in calls that may be split
    whole:
        the other calls, the dearest first
    """

    operators: int
    split: float
    whole: tuple[Whole, ...]
    notes: tuple[str, ...]


def survey(traced: Traced) -> Survey:
    """The share of work that may be split, and what may not."""
    calls = list(traced.graph.calls)
    work = {node.name: operations(node, traced.rules[node.name]) for node in calls}
    total = max(1, sum(work.values()))
    kept: dict[tuple[str, str], list[int]] = {}
    for node in calls:
        rule = traced.rules[node.name]
        if not may_be_split(rule) and any(v.numel > 1 for v in node.results):
            kept.setdefault((node.op, _reason(rule)), []).append(work[node.name])
    whole = [
        Whole(op, len(costs), sum(costs) / total, reason) for (op, reason), costs in kept.items()
    ]
    left = sum(w.share for w in whole)
    return Survey(
        len(calls),
        1 - left,
        tuple(sorted(whole, key=lambda w: (-w.share, w.op))),
        traced.program.notes,
    )


def operations(node: Node, rule: Rule) -> int:
    """Forward floating point operations; one for each element where an operator is unknown."""
    if rule.flops or not rule.opaque:
        return rule.flops
    return _elements(node.operands) + _elements(node.results)


def _elements(values: Iterable[object]) -> int:
    return sum(v.numel for v in values)  # type: ignore[attr-defined]


def may_be_split(rule: Rule) -> bool:
    return any(factor.splittable and factor.size > 1 for factor in rule.factors)


def _reason(rule: Rule) -> str:
    if rule.opaque:
        return rule.note or "no rule"
    return "all its dimensions are whole"
