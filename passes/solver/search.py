"""Solves one connected part of a reduced problem: messages first, then the integer program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import ilp, improve, lagrange
from .branch import Branches
from .clock import Clock, rounded_up
from .dual import Dual
from .errors import InfeasibleError
from .lagrange import Best
from .layout import Layout
from .part import Part

# Part of the time left that message passing may take before integer programs have their turn:
# where they can take the whole part, and where they can only take neighbourhoods.
_SHORT_SHARE, _LONG_SHARE = 0.15, 0.4
# Part of the time left that looking for an assignment by higher prices may take.
_REPAIR_SHARE = 0.5
# Pairs of the first restricted program, and how it grows from round to round.
_FIRST_PAIRS, _MORE_PAIRS = 20_000, 3
# Up to this many the integer program is quicker than insisting on a better bound.
_SMALL_PAIRS = 2_000
# Beyond this many pairs an integer program is left to the neighbourhoods of local improvement.
_MOST_PAIRS = 500_000
# Part of the time left that one restricted program may take.
_PROGRAM_SHARE = 0.3
_SWEEPS_AT_NEW_PRICES = 60
# Branching is worth it where there is time for so many sweeps.
_MANY_SWEEPS = 1_500
# Part of the time left for which a better assignment is improved before branching goes on.
_POLISH_SHARE = 0.05


@dataclass(frozen=True, eq=False)
class Found:
    """The best assignment of a part, its cost and a lower bound."""

    choice: np.ndarray
    cost: float
    bound: float


def solve_exactly(layout: Layout, clock: Clock, start: np.ndarray | None) -> Found:
    """The whole part as one integer program; ``start`` is an assignment within the limit.

    Raises:
        InfeasibleError: no assignment fits, or none was found in time.
    """
    allowed = np.isfinite(layout.pair_costs)
    best = Best()
    if start is not None:
        best.offer(layout, start)
    answer = ilp.solve(layout, allowed, set(), clock, np.inf)
    if answer.choice is not None:
        best.offer(layout, answer.choice)
    if best.choice is None:
        raise _nothing(layout, best, proven=answer.solved)
    clock.report("ilp", best.cost, min(answer.bound, best.cost))
    return Found(best.choice, best.cost, min(answer.bound, best.cost))


def solve_part(
    layout: Layout, clock: Clock, whole: bool, seed: int, start: np.ndarray | None
) -> Found:
    """The best assignment that the time allows.

    Args:
        layout: the part.
        clock: the budget.
        whole: all costs are whole numbers, so bounds may be rounded up.
        seed: of local improvement.
        start: an assignment within the limit, to begin from.

    Raises:
        InfeasibleError: no assignment fits, or none was found in time.
    """
    best = Best()
    if start is not None:
        best.offer(layout, start)
    dual = Dual(layout)
    began = clock.elapsed()
    pairs = int(np.isfinite(layout.pair_costs).sum())
    share = _LONG_SHARE if pairs > _MOST_PAIRS else _SHORT_SHARE
    bound = lagrange.search(
        dual,
        best,
        clock,
        whole=whole,
        seconds=clock.part(share),
        persistent=pairs > _SMALL_PAIRS,
        met=clock.enough,
    )
    if not clock.enough(best.cost, bound):
        lagrange.repair(dual, best, clock, clock.part(_REPAIR_SHARE))
        clock.report("repair", best.cost, bound)
    clock.done("lagrange", began, f"cost {best.cost:.12g}, bound {bound:.12g}")
    if not clock.enough(best.cost, bound):
        began = clock.elapsed()
        bound = max(bound, _close_gap(dual, best, bound, clock, whole, seed))
        clock.done("ilp", began, f"cost {best.cost:.12g}, bound {bound:.12g}")
    if best.choice is None:
        raise _nothing(layout, best, proven=False)
    return Found(best.choice, best.cost, min(bound, best.cost))


def _close_gap(dual: Dual, best: Best, bound: float, clock: Clock, whole: bool, seed: int) -> float:
    """Integer programs over the pairs that can still matter; returns the bound.

    An assignment with a pair whose reduced cost exceeds the gap can not be better than the best.
    While too many pairs are left, programs over the cheapest of them look for better
    assignments and better memory prices.
    """
    layout = dual.layout
    sets: set[int] = set()
    pairs = _FIRST_PAIRS
    neighbourhoods = improve.Neighbourhoods(layout, seed, dual.multipliers)
    if _worth_branching(dual, best, bound, clock):
        if best.choice is not None:
            neighbourhoods.search(best, bound, clock, _POLISH_SHARE * clock.left())
        branches = Branches(Part.whole(layout), best, clock, whole)
        for better in branches.search(dual, bound):
            if better and not clock.enough(best.cost, branches.bound):
                share = _POLISH_SHARE * clock.left()
                neighbourhoods.search(best, branches.bound, clock, share)
        bound = max(bound, branches.bound)
    while not clock.over() and not clock.enough(best.cost, bound):
        reduced = dual.reduced_costs()[1]
        gap = best.cost - bound
        within = np.isfinite(reduced) & (reduced <= gap * (1 + 1e-9) + _slack(best.cost))
        count = int(within.sum())
        everything = count <= pairs
        if not everything:
            if pairs > _MOST_PAIRS or np.isfinite(layout.pair_costs).sum() > _MOST_PAIRS:
                break
            threshold = np.partition(reduced, pairs)[pairs]
            within = np.isfinite(reduced) & (reduced <= threshold)
            if best.choice is not None:
                within[layout.pairs_of(best.choice)] = True
        seconds = np.inf if everything else _PROGRAM_SHARE * clock.left()
        answer = ilp.solve(layout, within, sets, clock, seconds, slack=clock.slack(bound))
        if answer.choice is not None:
            best.offer(layout, answer.choice)
        if everything:
            # What was left out can not be better than the best assignment.
            if best.choice is None and answer.solved:
                raise _nothing(layout, best, proven=True)
            bound = max(bound, min(answer.bound, best.cost))
            clock.report("ilp", best.cost, bound)
            break
        if layout.memory is not None and answer.multipliers is not None:
            bound = max(bound, _reprice(dual, answer.multipliers, bound, whole))
        clock.report("ilp", best.cost, bound)
        if best.choice is not None and not clock.enough(best.cost, bound):
            neighbourhoods.search(best, bound, clock, 0.3 * clock.left())
        pairs *= _MORE_PAIRS
    if best.choice is not None and not clock.enough(best.cost, bound):
        neighbourhoods.search(best, bound, clock, clock.left())
    return bound


def _worth_branching(dual: Dual, best: Best, bound: float, clock: Clock) -> bool:
    """Whether memory is limited, one program would be too large, and there is time for many."""
    if dual.layout.memory is None:
        return False
    matter = dual.reduced_costs()[1] <= best.cost - bound
    began = clock.elapsed()
    dual.sweep()
    seconds = clock.elapsed() - began
    return bool(matter.sum() > _FIRST_PAIRS and _MANY_SWEEPS * seconds < clock.left())


def _reprice(dual: Dual, multipliers: np.ndarray, bound: float, whole: bool) -> float:
    """Tries other memory prices and keeps them if the bound gets better."""
    before = dual.multipliers, dual.message.copy()
    dual.price(multipliers)
    for _ in range(_SWEEPS_AT_NEW_PRICES):
        dual.sweep()
    now = rounded_up(dual.bound(), whole)
    if now <= bound:
        dual.restore(*before)
    return now


def _slack(cost: float) -> float:
    return 1e-9 * max(1.0, abs(cost)) if np.isfinite(cost) else 0.0


def _nothing(layout: Layout, best: Best, *, proven: bool) -> InfeasibleError:
    if layout.memory is None:
        reason = "every assignment uses a forbidden choice or pair"
        if proven:
            return InfeasibleError(f"problem: {reason}")
        return InfeasibleError(
            "problem: no assignment of finite cost found in time; allow more seconds",
            proven=False,
        )
    live = layout.memory.live
    floor = f"whatever is chosen, {live.floor:.12g} is in use at some time"
    peak = live.limit + best.over if np.isfinite(best.over) else None
    found = (
        "no allowed assignment was found" if peak is None else f"the best peak found is {peak:.12g}"
    )
    head = "no assignment is within" if proven else "no assignment was found in time within"
    return InfeasibleError(
        f"memory: {head} the limit of {live.limit:.12g}: {found}, {floor}; "
        "raise the limit" + ("" if proven else " or allow more seconds"),
        peak=peak,
        peak_bound=live.floor,
        proven=proven,
    )
