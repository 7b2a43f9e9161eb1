"""How much each rank of a group sends to each of the others, worked out for one rank at a time.

A group may have a thousand ranks; the whole table would have a million entries for every exchange.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol


class Counts(Protocol):
    """The elements that go from rank to rank in one exchange; equal on all ranks of a group."""

    def sent(self, rank: int) -> list[int]:
        """What a rank sends to each."""
        ...

    def received(self, rank: int) -> list[int]:
        """What a rank receives from each."""
        ...


@dataclass(frozen=True)
class Blocks:
    """Another dimension is cut: each rank sends the i-th block of its own to rank i.

    before, after:
        the size of each rank's block along the dimension cut before and after
    each:
        elements for one index of both
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    each: int

    def sent(self, rank: int) -> list[int]:
        mine = self.before[rank] * self.each
        return [mine * size for size in self.after]

    def received(self, rank: int) -> list[int]:
        mine = self.after[rank] * self.each
        return [mine * size for size in self.before]


@dataclass(frozen=True)
class Overlaps:
    """The same dimension is cut in other sizes: each rank sends what the others' new blocks need.

    before, after:
        the size of each rank's block
    each:
        elements for one index
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    each: int

    def sent(self, rank: int) -> list[int]:
        return [n * self.each for n in self.given(rank)]

    def given(self, rank: int) -> list[int]:
        """How much of its block a rank gives to each, along the dimension."""
        return _overlaps(self.before, rank, self.after)

    def received(self, rank: int) -> list[int]:
        return [n * self.each for n in self.taken(rank)]

    def taken(self, rank: int) -> list[int]:
        """How much of its new block a rank takes from each, along the dimension."""
        return _overlaps(self.after, rank, self.before)


def _overlaps(own: tuple[int, ...], rank: int, others: tuple[int, ...]) -> list[int]:
    """How long the part is that one block of a row has in common with each block of another."""
    lo = sum(own[:rank])
    hi = lo + own[rank]
    ends = [*itertools.accumulate(others, initial=0)]
    return [max(0, min(hi, end) - max(lo, start)) for start, end in itertools.pairwise(ends)]
