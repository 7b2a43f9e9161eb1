"""Branches on memory: what a linear price of memory mixes is decided, a node at a time.

Prices make the best of the limit on average: half of one assignment that holds too much and half
of another that holds too little. So the nodes whose preferences swing at the highest price are
made to hold little in one branch and much in the other. Few such decisions raise the bound by
more than any number of sweeps, and where they are made, an integer program over the pairs that
can still matter is quick.

The branch with the lowest bound goes first and is followed down, so that assignments of all
kinds are found early.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from . import ilp, lagrange
from .clock import Clock, rounded_up
from .dual import Dual
from .errors import InfeasibleError
from .lagrange import Best, Preferences
from .part import Part

# Sweeps that a new branch gets, and raises of prices to find an assignment in it.
_SWEEPS, _RAISES = 80, 12
# An integer program takes a branch with no more pairs than this, or with no memory in doubt.
_LEAF_PAIRS, _MOST_PAIRS = 30_000, 60_000
# A doubt priced at less than this part of the gap is left to the integer program.
_DOUBT = 0.02
# Part of the time left that one program may take.
_PROGRAM_SHARE = 0.15


@dataclass(frozen=True, eq=False)
class _Branch:
    """A part still to be searched, with the state of its dual."""

    part: Part
    dual: Dual
    preferences: Preferences
    bound: float


@dataclass
class Branches:
    """A search tree over a whole layout; ``best`` gets better as it goes.

    Attributes:
        bound: a lower bound on all assignments better than ``best``.
    """

    root: Part
    best: Best
    clock: Clock
    whole: bool
    bound: float = -np.inf
    _open: list[tuple[float, int, _Branch]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)
    _given_up: float = np.inf

    def search(self, dual: Dual, bound: float) -> Iterator[bool]:
        """Searches, beginning from the dual of the whole; yields where it has come to an end.

        What is yielded says whether there is a better assignment than before.
        """
        self.bound = bound
        preferences = Preferences(dual)
        lagrange.search(
            dual,
            self._better(self.root),
            self.clock,
            whole=self.whole,
            seconds=self.clock.left(),
            persistent=False,
            sweeps=_SWEEPS,
            preferences=preferences,
            stage=None,
        )
        self._push(_Branch(self.root, dual, preferences, bound))
        while self._open and not self.clock.over():
            _, _, branch = heapq.heappop(self._open)
            following: _Branch | None = branch
            before = self.best.cost
            while following is not None and not self.clock.over():
                following = self._follow(following)
                if following is None:
                    yield self.best.cost < before
            if following is not None:
                self._push(following)
            self._tell()

    def _tell(self) -> None:
        lowest = min(self._open[0][0] if self._open else np.inf, self._given_up)
        self.bound = max(self.bound, min(lowest, self.best.cost))
        self.clock.report("branch", self.best.cost, self.bound)

    def _push(self, branch: _Branch) -> None:
        heapq.heappush(self._open, (branch.bound, next(self._number), branch))

    def _follow(self, branch: _Branch) -> _Branch | None:
        """Searches a branch or splits it; returns the better half, None where it ends."""
        if branch.bound >= self.best.cost or self.clock.enough(self.best.cost, branch.bound):
            self._given_up = min(self._given_up, branch.bound)
            return None
        gap = self.best.cost - branch.bound
        options, pairs = branch.dual.reduced_costs()
        within = np.isfinite(pairs) & (pairs <= gap)
        count = int(within.sum())
        doubt, position, paid, mean = branch.preferences.widest()
        certain = doubt <= _DOUBT * min(gap, abs(branch.bound))
        if count <= _LEAF_PAIRS or certain:
            self._program(branch, within, pairs, count)
            return None
        kept = self._kept(branch, options <= gap)
        node = branch.part.layout.nodes[position]
        low = paid <= np.clip(mean, paid.min(), np.nextafter(paid.max(), -np.inf))
        halves = []
        for half in (low, ~low):
            at = np.intersect1d(kept.get(node, np.arange(len(paid))), np.flatnonzero(half))
            made = self._made(branch, {**kept, node: at}) if len(at) else None
            if made is not None:
                halves.append(made)
        halves.sort(key=lambda half: half.bound)
        for other in halves[1:]:
            self._push(other)
        return halves[0] if halves else None

    def _kept(self, branch: _Branch, possible: np.ndarray) -> dict[int, np.ndarray]:
        layout = branch.part.layout
        return {
            node: np.flatnonzero(possible[layout.offset[position] : layout.offset[position + 1]])
            for position, node in enumerate(layout.nodes)
            if not possible[layout.offset[position] : layout.offset[position + 1]].all()
        }

    def _made(self, branch: _Branch, kept: Mapping[int, np.ndarray]) -> _Branch | None:
        """The branch with these options; None if nothing in it is better than the best."""
        try:
            part = branch.part.narrowed(kept)
        except InfeasibleError:
            return None
        dual, best = Dual(part.layout), self._better(part)
        if not part.layout.nodes:
            self._offer(part, np.zeros(0, dtype=np.intp))
            return None
        multipliers = np.zeros(len(self.root.sets))
        multipliers[branch.part.sets] = branch.dual.multipliers
        dual.inherit(branch.dual, multipliers[part.sets])
        preferences = Preferences(dual)
        bound = lagrange.search(
            dual,
            best,
            self.clock,
            whole=self.whole,
            seconds=self.clock.left(),
            persistent=True,
            sweeps=_SWEEPS,
            preferences=preferences,
            stage=None,
        )
        if bound < best.cost:
            lagrange.repair(dual, best, self.clock, self.clock.left(), _RAISES)
        if best.choice is not None:
            self._offer(part, best.choice)
        bound = max(bound, branch.bound)
        return None if bound >= self.best.cost else _Branch(part, dual, preferences, bound)

    def _program(self, branch: _Branch, within: np.ndarray, pairs: np.ndarray, count: int) -> None:
        """An integer program over the pairs that can matter, or the cheapest of them."""
        if count > _MOST_PAIRS:
            within = within & (pairs <= np.partition(pairs, _MOST_PAIRS)[_MOST_PAIRS])
        seconds = _PROGRAM_SHARE * self.clock.left()
        answer = ilp.solve(branch.part.layout, within, set(), self.clock, seconds)
        if answer.choice is not None:
            self._offer(branch.part, answer.choice)
        bound = branch.bound if count > _MOST_PAIRS else max(branch.bound, answer.bound)
        self._given_up = min(self._given_up, rounded_up(bound, self.whole))

    def _better(self, part: Part) -> Best:
        """What takes an assignment of a part that is better than the best."""
        return Best(None, self.best.cost, self.best.over)

    def _offer(self, part: Part, choice: np.ndarray) -> None:
        layout = self.root.layout
        whole = layout.options_of(part.choices(choice))
        assert whole is not None
        if self.best.offer(layout, whole):
            self.clock.report("branch", self.best.cost, self.bound)
