"""Plans under a memory limit by branch and bound on the relaxation of the limit.

Where the best mixture of columns (`relaxation`) is cheaper than the best plan, its columns
disagree about some node's memory: the node's choices are split, and both halves relaxed again, from
the prices that were good for the whole. The half with the lowest bound comes first.
"""

from __future__ import annotations

import heapq
import itertools
import time

import numpy as np

from autopar.passes.memory.relaxation import Column, Relaxation
from autopar.passes.solver import InfeasibleError


class Branches:
    """The halves that are still open, and the best column within the limit.

    best:
        the cheapest column within the limit, None before the first
    found:
        all columns met
    """

    def __init__(self, whole: Relaxation, gap: float) -> None:
        self.gap = gap
        self.best: Column | None = None
        self.found: list[Column] = []
        self._open: list[tuple[float, int, Relaxation]] = []
        self._number = itertools.count()
        self._closed = np.inf
        self._whole = whole

    @property
    def bound(self) -> float:
        """No choice within the limit is cheaper."""
        lowest = self._open[0][0] if self._open else np.inf
        return min(lowest, self._closed, self.cost)

    @property
    def cost(self) -> float:
        """Of the best column."""
        return np.inf if self.best is None else self.best.cost

    @property
    def near(self) -> bool:
        """Whether the bound is as near to the cost as was asked for."""
        return self._near(self.bound)

    def _near(self, bound: float) -> bool:
        return self.cost < np.inf and self.cost - bound <= self.gap * abs(self.cost)

    def offer(self, column: Column) -> None:
        """Take a column if it is within the limit and cheaper."""
        if column.held.max(initial=0.0) <= self._whole.limit and column.cost < self.cost:
            self.best = column

    def relax(self, seconds: float) -> None:
        """Relax the whole."""
        self._relax(self._whole, seconds)

    def search(self, seconds: float) -> None:
        """Split what has the lowest bound, until that is near enough or the time is up."""
        until = time.perf_counter() + seconds
        while self._open and not self.near and time.perf_counter() < until:
            bound, _, relaxation = heapq.heappop(self._open)
            halves = relaxation.halves()
            if not halves:
                self._closed = min(self._closed, bound)
                continue
            for half in halves:
                if self._near(bound) or time.perf_counter() >= until:
                    self._push(half, bound)
                else:
                    self._relax(half, until - time.perf_counter(), bound)

    def _relax(self, relaxation: Relaxation, seconds: float, known: float = -np.inf) -> None:
        try:
            for column in relaxation.columns(seconds):
                self.found.append(column)
                self.offer(column)
                if self._near(relaxation.bound):
                    break
        except InfeasibleError as error:
            if error.proven:
                return
            # Nothing was found, which says nothing: what was known of it still holds.
        self._push(relaxation, max(known, relaxation.bound))

    def _push(self, relaxation: Relaxation, bound: float) -> None:
        heapq.heappush(self._open, (bound, next(self._number), relaxation))
