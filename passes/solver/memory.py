"""Which nodes hold memory together: the maximal live sets of a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import InfeasibleError
from .problem import Held, Problem

# How far rounding may carry a sum of usages over the limit, as a fraction of the limit. Below
# one byte for every limit under a terabyte, so that whole numbers of bytes are exact.
ROUNDING = 1e-12


def fits(peak: float, limit: float | None) -> bool:
    """Whether a peak is within the limit, up to the rounding of the sum."""
    return limit is None or peak <= limit * (1 + ROUNDING)


@dataclass(frozen=True, eq=False)
class Spans:
    """What nodes hold, the ranges of one node being disjoint.

    Attributes:
        node: int [S], the node of every span, ascending.
        intervals: int [S, 2], half-open, not empty; ascending within a node.
        usages: per span, the memory of each choice of the problem, float64 [k].
    """

    node: np.ndarray
    intervals: np.ndarray
    usages: list[np.ndarray]

    @staticmethod
    def of(problem: Problem) -> Spans:
        """All that the nodes of a problem hold; overlapping ranges of a node are added up."""
        node: list[int] = []
        intervals: list[tuple[int, int]] = []
        usages: list[np.ndarray] = []
        for index, decision in enumerate(problem.nodes):
            for held in _disjoint(decision.held):
                node.append(index)
                intervals.append(held.interval)
                usages.append(held.usages)
        ranges = np.array(intervals, dtype=np.int64).reshape(-1, 2)
        return Spans(np.array(node, dtype=np.intp), ranges, usages)


def _disjoint(held: Sequence[Held]) -> list[Held]:
    """The same memory over ranges that do not overlap, in the order of time."""
    held = [one for one in held if one.interval[0] < one.interval[1] and one.usages.max() > 0]
    held.sort(key=lambda one: one.interval)
    if all(a.interval[1] <= b.interval[0] for a, b in itertools.pairwise(held)):
        return held
    ends = np.array([one.interval for one in held])
    usages = np.array([one.usages for one in held], dtype=np.float64)
    times = np.unique(ends)
    count, change = np.zeros(len(times), dtype=int), np.zeros((len(times), usages.shape[1]))
    for side, sign in ((0, 1), (1, -1)):
        at = np.searchsorted(times, ends[:, side])
        np.add.at(count, at, sign)
        np.add.at(change, at, sign * usages)
    live, total = np.cumsum(count), np.maximum(np.cumsum(change, axis=0), 0.0)
    return [
        Held(total[index], (int(times[index]), int(times[index + 1])))
        for index in np.flatnonzero(live > 0).tolist()
    ]


@dataclass(frozen=True, eq=False)
class LiveSets:
    """The memory side of a problem with a limit.

    A live set is what is held at one time. Only the times are kept at which the set is
    maximal (every other set is contained in one of them) and at which the limit can be
    exceeded; set ``t`` is the spans with ``first <= t < last``. A span is what one node holds
    over one stretch of time; spans of a node are disjoint. Kept are the spans that are in some
    set and where some choice holds more than another.

    Attributes:
        room: per set, the limit less what is held whatever is chosen, float64 [T].
        node: per span, its node, ascending, int [S].
        first, last: per span, the half-open range of the sets it is in, int [S].
        usages: per span, what each choice holds above the least, float64 [k].
        floor: the most that is held at any one time whatever is chosen.
        limit: the memory limit.
    """

    room: np.ndarray
    node: np.ndarray
    first: np.ndarray
    last: np.ndarray
    usages: list[np.ndarray]
    floor: float
    limit: float

    @staticmethod
    def of(spans: Spans, limit: float, options: Sequence[np.ndarray]) -> LiveSets | None:
        """The sets of nodes that keep ``options``; None if the limit always holds."""
        left = [
            usages[options[node]]
            for node, usages in zip(spans.node.tolist(), spans.usages, strict=True)
        ]
        least = np.array([usages.min() for usages in left])
        most = np.array([usages.max() for usages in left])
        times = _maximal_times(spans.intervals)
        first, last = np.searchsorted(times, spans.intervals.T)
        lowest = _profile(least, first, last, len(times))
        above = [usages - low for usages, low in zip(spans.usages, least.tolist(), strict=True)]
        floor = float(lowest.max(initial=0.0))
        limit = limit * (1 + ROUNDING)
        return _tight(
            LiveSets(limit - lowest, spans.node, first, last, above, floor, limit), most - least
        )

    def within(
        self, spans: np.ndarray, nodes: np.ndarray, usages: list[np.ndarray], others: np.ndarray
    ) -> LiveSets:
        """The same sets where only some spans are still open.

        Args:
            spans: the spans that are still open.
            nodes: the node of each of them in the result, ascending.
            usages: per open span, memory of each option above the least.
            others: memory above the least in every set that is decided, float64 [T].
        """
        room, first, last = self.room - others, self.first[spans], self.last[spans]
        return LiveSets(room, nodes, first, last, usages, self.floor, self.limit)

    def narrowed(self, options: Sequence[np.ndarray]) -> tuple[LiveSets | None, np.ndarray]:
        """The sets of nodes that keep ``options`` only, and which of these sets they are.

        Raises:
            InfeasibleError: the least that the options hold exceeds the limit.
        """
        left = [
            usages[options[node]]
            for node, usages in zip(self.node.tolist(), self.usages, strict=True)
        ]
        least = np.array([usages.min() for usages in left])
        most = np.array([usages.max() for usages in left])
        room = self.room - self.profile(least)
        above = [usages - low for usages, low in zip(self.usages, least.tolist(), strict=True)]
        floor = max(self.floor, self.limit - float(room.min(initial=np.inf)))
        live = LiveSets(room, self.node, self.first, self.last, above, floor, self.limit)
        live.check()
        tight = np.flatnonzero(live.profile(most - least) > room)
        return _tight(live, most - least), tight

    def check(self) -> None:
        """Raises InfeasibleError where what is held whatever is chosen exceeds the limit."""
        if self.room.min() < 0:
            raise InfeasibleError(
                f"memory: no assignment is within the limit of {self.limit:.12g}: "
                f"whatever is chosen, {self.floor:.12g} is in use at some time; "
                "raise the limit or allow choices that hold less",
                peak_bound=self.floor,
            )

    def varying(self) -> set[int]:
        """Nodes whose memory depends on the choice."""
        return set(self.node.tolist())

    def spans_of(self, node: int) -> range:
        """The spans of a node."""
        return self._spans.get(node, range(0))

    @cached_property
    def _spans(self) -> dict[int, range]:
        nodes, first = np.unique(self.node, return_index=True)
        ends = [*first[1:].tolist(), len(self.node)]
        return {
            node: range(lo, hi)
            for node, lo, hi in zip(nodes.tolist(), first.tolist(), ends, strict=True)
        }

    def profile(self, held: np.ndarray) -> np.ndarray:
        """Memory above the least in every set, float64 [T], from that of every span [S]."""
        return _profile(held, self.first, self.last, len(self.room))

    def least_room(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The smallest room in each half-open range of sets; ``inf`` for an empty range."""
        result = np.full(len(first), np.inf)
        inside = np.flatnonzero(first < last)
        length = last[inside] - first[inside]
        table, width = self.room, 1  # table[t] is the least of room[t : t + width]
        while len(inside):
            now = length < 2 * width
            ranges = inside[now]
            result[ranges] = np.minimum(table[first[ranges]], table[last[ranges] - width])
            inside, length = inside[~now], length[~now]
            table = np.minimum(table[:-width], table[width:]) if len(inside) else table
            width *= 2
        return result


def _tight(live: LiveSets, most: np.ndarray) -> LiveSets | None:
    """Only the sets that can be exceeded, where every span holds at most ``most``."""
    tight = live.profile(most) > live.room
    if not tight.any():
        return None
    renumbered = np.concatenate([[0], np.cumsum(tight)])
    first, last = renumbered[live.first], renumbered[live.last]
    kept = np.flatnonzero((most > 0) & (first < last))
    return LiveSets(
        live.room[tight],
        live.node[kept],
        first[kept],
        last[kept],
        [live.usages[span] for span in kept.tolist()],
        live.floor,
        live.limit,
    )


def _maximal_times(intervals: np.ndarray) -> np.ndarray:
    """The times at which a live range ends after another began since the last such time."""
    starts, ends = np.unique(intervals[:, 0]), np.unique(intervals[:, 1])
    # The last start before each end: nothing has ended in between, so the set is maximal there.
    last_start = np.searchsorted(starts, ends) - 1
    return starts[np.unique(last_start[last_start >= 0])]


def _profile(held: np.ndarray, first: np.ndarray, last: np.ndarray, sets: int) -> np.ndarray:
    change = np.bincount(first, held, sets + 1) - np.bincount(last, held, sets + 1)
    return np.cumsum(change)[:sets]
