"""Which nodes hold memory together: the maximal live sets of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Problem

# How far rounding may carry a sum of usages over the limit, as a fraction of the limit. Below
# one byte for every limit under a terabyte, so that whole numbers of bytes are exact.
ROUNDING = 1e-12


def fits(peak: float, limit: float | None) -> bool:
    """Whether a peak is within the limit, up to the rounding of the sum."""
    return limit is None or peak <= limit * (1 + ROUNDING)


@dataclass(frozen=True, eq=False)
class LiveSets:
    """The memory side of a problem with a limit.

    A live set is the nodes alive at one time. Only the times are kept at which the set is
    maximal (every other set is contained in one of them) and at which the limit can be
    exceeded; set ``t`` is the nodes with ``first <= t < last``.

    Attributes:
        room: per set, the limit less what its nodes hold whatever is chosen, float64 [T].
        first, last: per node, the half-open range of the sets it is in, int [n].
        usages: per node, what each choice of the problem holds above the least, float64 [k];
            None where no choice holds more than another or the node is in no set.
        floor: the most that is held at any one time whatever is chosen.
        limit: the memory limit.
    """

    room: np.ndarray
    first: np.ndarray
    last: np.ndarray
    usages: list[np.ndarray | None]
    floor: float
    limit: float

    @staticmethod
    def of(problem: Problem, options: list[np.ndarray]) -> LiveSets | None:
        """The sets of a problem whose nodes keep ``options``; None if the limit always holds."""
        if problem.usage_limit is None:
            return None
        nodes = problem.nodes
        least, most = np.zeros(len(nodes)), np.zeros(len(nodes))
        for index, node in enumerate(nodes):
            if node.usages is not None and node.interval[0] < node.interval[1]:
                usages = node.usages[options[index]]
                least[index], most[index] = usages.min(), usages.max()
        holding = np.flatnonzero(most > 0)
        first, last = np.zeros(len(nodes), dtype=np.intp), np.zeros(len(nodes), dtype=np.intp)
        times = _maximal_times([nodes[index].interval for index in holding.tolist()])
        for ends, side in ((first, 0), (last, 1)):
            when = [nodes[index].interval[side] for index in holding.tolist()]
            ends[holding] = np.searchsorted(times, when)
        lowest = _profile(least, first, last, len(times))
        limit = problem.usage_limit * (1 + ROUNDING)
        excess = [
            None if node.usages is None else node.usages.astype(np.float64) - low
            for node, low in zip(nodes, least.tolist(), strict=True)
        ]
        floor = float(lowest.max(initial=0.0))
        return LiveSets._tight(limit - lowest, first, last, excess, most - least, floor, limit)

    def within(
        self, nodes: np.ndarray, held: np.ndarray, usages: list[np.ndarray | None]
    ) -> LiveSets | None:
        """The sets that some nodes alone can still exceed; None if there are none.

        Args:
            nodes: the nodes; they are numbered from 0 in the result.
            held: memory above the least of every other node [n], 0 for these.
            usages: per node, memory of each option above the least.
        """
        most = np.array([0.0 if usage is None else usage.max() for usage in usages])
        return LiveSets._tight(
            self.room - self.profile(held),
            self.first[nodes],
            self.last[nodes],
            usages,
            most,
            self.floor,
            self.limit,
        )

    @staticmethod
    def _tight(
        room: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        usages: list[np.ndarray | None],
        most: np.ndarray,
        floor: float,
        limit: float,
    ) -> LiveSets | None:
        tight = _profile(most, first, last, len(room)) > room
        if not tight.any():
            return None
        renumbered = np.concatenate([[0], np.cumsum(tight)])
        first, last = renumbered[first], renumbered[last]
        counted = (most > 0) & (first < last)
        kept = [usage if counts else None for usage, counts in zip(usages, counted, strict=True)]
        return LiveSets(room[tight], first, last, kept, floor, limit)

    def varying(self) -> set[int]:
        """Nodes whose memory depends on the choice."""
        return {node for node, usage in enumerate(self.usages) if usage is not None}

    def profile(self, held: np.ndarray) -> np.ndarray:
        """Memory above the least in every set, float64 [T], from that of every node [n]."""
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

    def price(self, multipliers: np.ndarray) -> np.ndarray:
        """Per node, the sum of the multipliers [T] of the sets it is in."""
        total = np.concatenate([[0.0], np.cumsum(multipliers)])
        return total[self.last] - total[self.first]


def _maximal_times(intervals: list[tuple[int, int]]) -> np.ndarray:
    """The times at which a live range ends after another began since the last such time."""
    starts = np.unique([lo for lo, _ in intervals])
    ends = np.unique([hi for _, hi in intervals])
    # The last start before each end: nothing has ended in between, so the set is maximal there.
    last_start = np.searchsorted(starts, ends) - 1
    return starts[np.unique(last_start[last_start >= 0])]


def _profile(held: np.ndarray, first: np.ndarray, last: np.ndarray, sets: int) -> np.ndarray:
    change = np.bincount(first, held, sets + 1) - np.bincount(last, held, sets + 1)
    return np.cumsum(change)[:sets]
