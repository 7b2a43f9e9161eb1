"""Rules found by trying: an operator that no one has declared is run whole and in pieces.

One dimension of one tensor at a time is cut, or tied dimensions of several tensors together, and
the operator runs on the pieces. Where their results concatenate along a dimension the cut is a
parallel factor, where they add up a reduced one. The idea is that of EasyDist's "ShardCombine"
discovery (Alibaba); here a find is also tried backward, on many kinds of inputs, on small,
moderate and the traced sizes, in even and uneven pieces, and together with every other find. What
is not certain is not split, and the reason is kept.
"""

from __future__ import annotations

import itertools

import torch

from autopar.ir.declaration import Declaration
from autopar.ir.discover_sizes import Resized, as_traced, larger, resized, trial
from autopar.ir.discover_splits import QUICK, Split, declaration, find_splits, holds, rule_of
from autopar.ir.graph import Node
from autopar.ir.layout import PARTIAL, REPLICATE
from autopar.ir.probe import Cut, difference
from autopar.ir.probe_rule import (
    CannotRun,
    Subject,
    Unsure,
    refute,
    refute_pairs,
    refute_role,
    subject_of,
)
from autopar.ir.trace_grad import has_overload, overload

#: How many operands an operator may have for all their groups to be tried for linearity.
_GROUPED = 5

#: The role of giving each rank a term of the first linear group.
_TERMS = f"{PARTIAL}0"


def discover(node: Node) -> Declaration:
    """The rule of a call, as a declaration. Raises Unsure with the reason where none is certain.

    Nothing is drawn from the global random state, and equal calls get equal rules.
    """
    _check_kind(node)
    calls = _Calls(node, trial(node))
    subject = calls.small.subject
    every = [subject, *(call.subject for size in calls.small.sizes for call in calls.larger(size))]
    for each in every if subject.node.differentiable else ():
        if found := refute_role(each, rule_of(each.node), REPLICATE):
            raise Unsure(f"its backward is not linear in the gradients of its results ({found})")
    splits = [split for split in find_splits(subject) if _is_confirmed(split, calls)]
    linear = [
        group
        for group in _linear_groups(subject)
        if not any(refute_role(each, rule_of(each.node, linear=(group,)), _TERMS) for each in every)
    ]
    if not splits and not linear:
        raise Unsure("no dimension was found that could be split")
    for each in (subject, *calls.traced()):
        if found := refute_pairs(each, rule_of(each.node, *splits, linear=linear)):
            raise Unsure(f"what was found does not hold together: {found}")
    own = calls.own_dtypes()
    if own is not None and (found := refute(own, rule_of(own.node, *splits, linear=linear))):
        raise Unsure(f"what was found does not hold for the dtypes it is called with: {found}")
    return declaration(node, splits, linear)


class _Calls:
    """The call on its different sizes, each made once."""

    def __init__(self, node: Node, small: Resized) -> None:
        self.node, self.small = node, small
        self._larger: dict[tuple[int, ...], list[Resized]] = {}

    def larger(self, *along: int) -> list[Resized]:
        """`larger` of some traced sizes."""
        if along not in self._larger:
            self._larger[along] = list(larger(self.node, self.small, along))
        return self._larger[along]

    def traced(self) -> list[Subject]:
        """The call on all its traced sizes; nothing if they cannot be tried."""
        found = as_traced(self.node, self.small)
        return [] if found is None else [found.subject]

    def own_dtypes(self) -> Subject | None:
        """The call on small sizes in the dtypes that were traced, if it runs here."""
        small = self.small
        try:
            return subject_of(
                resized(self.node, small.sizes, small.lists, small.numbers), cast=False, brief=True
            )
        except CannotRun:
            return None


def _check_kind(node: Node) -> None:
    """Raise Unsure for operators that are not to be tried at all."""
    if not has_overload(node.op):
        raise Unsure("PyTorch knows no operator of this name")
    op = overload(node.op)
    if op._schema.is_mutable:
        raise Unsure("it writes to its operands")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise Unsure("it draws random numbers")
    if not node.operands or not node.results:
        raise Unsure("it has no tensor to split")
    if any(0 in v.shape for v in node.operands + node.results):
        raise Unsure("it is called on an empty tensor")


def _is_confirmed(split: Split, calls: _Calls) -> bool:
    """Whether a split holds on larger sizes, too, up to those of the traced call."""
    if not split.fits(calls.node):
        return False
    along = sorted({calls.node.operands[k].shape[d] for k, d in split.operands})
    try:
        return all(
            split.fits(call.subject.node) and holds(call.subject, split, each=1)
            for call in calls.larger(*along)
        )
    except Unsure:
        return False


# --- linearity ------------------------------------------------------------------------------------


def _linear_groups(subject: Subject) -> list[tuple[int, ...]]:
    """The smallest groups of operands in which the call is jointly linear."""
    node = subject.node
    inexact = [
        k for k, v in enumerate(node.operands) if v.dtype.is_floating_point or v.dtype.is_complex
    ]
    if not all(v.dtype.is_floating_point or v.dtype.is_complex for v in node.results):
        return []
    counts = range(1, len(inexact) + 1) if len(inexact) <= _GROUPED else (1, len(inexact))
    found: list[tuple[int, ...]] = []
    for count in counts:
        for group in itertools.combinations(inexact, count):
            if any(set(smaller) <= set(group) for smaller in found):
                continue
            rule = rule_of(node, linear=(group,))
            cut = (Cut(_TERMS, (1, 1)),)
            quick = (
                difference(node, rule, cut, whole, subject.generator, subject.tolerance)
                for _, whole in subject.wholes()[:QUICK]
            )
            if not any(quick) and not refute_role(subject, rule, _TERMS):
                found.append(group)
    return found
