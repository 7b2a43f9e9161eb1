"""Windows that slide along one dimension: when may that dimension be split?

A window of `taps` entries, `dilation` apart, is put down every `stride` entries, after `left`
entries of padding. Where the result has exactly one entry for every `stride` entries of the
operand, equal blocks of the two belong together, and a rank lacks only a few entries at the
borders of its block, which its neighbours have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """size, made: the entries of the whole operand and of the whole result."""

    size: int
    made: int
    taps: int
    stride: int
    dilation: int
    left: int

    @property
    def span(self) -> int:
        """From the first entry of a window to the last."""
        return self.dilation * (self.taps - 1)

    @property
    def borders(self) -> tuple[int, int]:
        """How many entries before and after its block a rank reads."""
        return self.left, max(self.span + 1 - self.left - self.stride, 0)

    @property
    def aligned(self) -> bool:
        """Whether blocks of the operand and of the result belong together."""
        return self.made > 1 and self.size == self.stride * self.made and self.left <= self.span

    @property
    def tiles(self) -> bool:
        """Whether the windows lie side by side, so that a rank reads its own block only."""
        return self.aligned and self.borders == (0, 0) and self.span < self.stride


@dataclass(frozen=True)
class Spread:
    """The other way round: every entry of the operand adds to `taps` entries of the result.

    `left` entries of what arises are cut off at the beginning.
    """

    size: int
    made: int
    taps: int
    stride: int
    dilation: int
    left: int

    @property
    def span(self) -> int:
        return self.dilation * (self.taps - 1)

    @property
    def borders(self) -> tuple[int, int]:
        """How many entries of the operand before and after its block a rank reads."""
        before = max(-((self.left - self.span) // self.stride), 0)
        return before, (self.left - 1) // self.stride + 1 if self.left else 0

    @property
    def aligned(self) -> bool:
        return self.size > 1 and self.made == self.stride * self.size and self.left <= self.span

    @property
    def tiles(self) -> bool:
        return self.aligned and self.borders == (0, 0)


def each(values: int | Sequence[int], k: int) -> int:
    """The value of one spatial dimension; a single one stands for all."""
    if isinstance(values, int):
        return values
    return values[k] if len(values) > 1 else values[0]
