"""The time budget of a solve, the log of its stages and the best that is known so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .problem import Stage

# Without a budget, a solve ends when nothing has got better for so many seconds, or for this
# part of the time until then, whichever is more.
_PATIENCE, _PATIENCE_PART = 20.0, 0.5
# The part of a budget that is kept for the steps under way at its end, which run a little longer.
_RESERVE = 0.04
# By what part the best cost or the bound must get better to count.
_NEWS = 1e-5
# Two costs closer than this, as a fraction, are the same: the rounding of long float sums.
SAME_COST = 1e-9
# A bound on whole-number costs is rounded up; this much may be rounding of long float sums.
_WHOLE = 0.01


@dataclass(frozen=True)
class Progress:
    """A report while solving: seconds since the start, the stage, best cost and bound so far."""

    seconds: float
    stage: str
    best: float
    bound: float


@dataclass
class Clock:
    """What every stage shares.

    Attributes:
        seconds: the budget; None to end by itself, when nothing gets better any more.
        gap: how far the bound may stay below the cost, as a fraction of the cost.
        listener: called on news.
        elsewhere: (cost, bound) of the parts of the problem that are done; None while a
            part is being solved whose cost alone says nothing of the whole.
        best: the cost of the best assignment so far.
        bound: the best proven lower bound so far.
    """

    seconds: float | None = None
    gap: float = 0.0
    listener: Callable[[Progress], None] | None = None
    best: float = np.inf
    bound: float = -np.inf
    elsewhere: tuple[float, float] | None = (0.0, 0.0)
    start: float = field(default_factory=time.monotonic)
    stages: list[Stage] = field(default_factory=list)
    _news: float = 0.0
    _last: dict[str, float] = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        """Seconds left for what may begin; without a budget, until patience ends."""
        if self.seconds is not None:
            return (1 - _RESERVE) * self.seconds - self.elapsed()
        return self._news + max(_PATIENCE, _PATIENCE_PART * self._news) - self.elapsed()

    def part(self, share: float) -> float:
        """A share of the seconds left; ``inf`` without a budget, for what ends by itself."""
        return np.inf if self.seconds is None else share * self.left()

    def patience_anew(self) -> None:
        """A part of the problem begins."""
        self._news = self.elapsed()
        self._last.clear()

    def _heard(self, what: str, better: float) -> None:
        """Takes note of how good the cost or the bound (negative) is, the less the better."""
        last = self._last.get(what, np.inf)
        if better < last - _NEWS * abs(last) if np.isfinite(last) else better < last:
            self._last[what], self._news = better, self.elapsed()

    def over(self) -> bool:
        return self.left() <= 0

    def enough(self, cost: float, bound: float) -> bool:
        """Whether the bound of a part is as near to its cost as is asked for."""
        return same_cost(cost, bound) or (cost < np.inf and cost - bound <= self.slack(bound))

    def slack(self, bound: float) -> float:
        """How far a part's bound may stay below its cost, by what the bound is."""
        if self.elsewhere is None:
            return self.gap * max(bound, 0.0)
        return self.gap * max(bound + self.elsewhere[1], 0.0)

    def report(self, stage: str, best: float | None = None, bound: float | None = None) -> None:
        """Takes note of a part's cost or bound and tells the listener if it is news."""
        if best is not None:
            self._heard("best", best)
        if bound is not None:
            self._heard("bound", -bound)
        if self.elsewhere is None:
            return
        best = np.inf if best is None else best + self.elsewhere[0]
        bound = -np.inf if bound is None else bound + self.elsewhere[1]
        better, tighter = best < self.best, bound > self.bound
        self.best, self.bound = min(self.best, best), max(self.bound, bound)
        if self.listener is not None and (better or tighter):
            self.listener(Progress(self.elapsed(), stage, self.best, self.bound))

    def done(self, name: str, began: float, detail: str) -> None:
        """Logs a finished stage."""
        self.stages.append(Stage(name, self.elapsed() - began, detail))


def same_cost(cost: float, bound: float) -> bool:
    """Whether a bound meets a cost, up to rounding."""
    return cost < np.inf and cost - bound <= SAME_COST * max(1.0, abs(cost))


def rounded_up(bound: float, whole: bool) -> float:
    """The bound, or the next whole number if costs are whole."""
    return float(np.ceil(bound - _WHOLE)) if whole and np.isfinite(bound) else bound
