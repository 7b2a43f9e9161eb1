"""How a dimension is cut among ranks: as `torch.chunk` cuts it, one mesh axis after the other.

An axis of ``n`` ranks cuts a stretch of ``m`` units into pieces of ``ceil(m / n)`` units; the last
ones are smaller, or empty. Further axes cut each piece again, the major axis first, which is how a
DTensor reads several `Shard` placements of one dimension::

    7 over 2      4 | 3              7 over 4           2 | 2 | 2 | 1
    5 over 4      2 | 2 | 1 | 0      7 over 2, then 2   2 2 | 2 1

A *unit* is a run of elements that stay together: one element, or all of a head where a dimension
is heads times width. The piece at position 0 along every axis is never smaller than another.

`counts` are the sizes of the axes, major first, and `unit` divides `size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: From where to where a piece reaches, the end excluded.
Span = tuple[int, int]


def chunk(size: int, count: int, index: int) -> Span:
    """The piece number `index` of `count` pieces of a stretch of `size`."""
    step = -(-size // count)
    return min(index * step, size), min((index + 1) * step, size)


def span(size: int, counts: Sequence[int], at: Sequence[int], unit: int = 1) -> Span:
    """The piece at a position, given by one index for each axis."""
    start, stop = 0, size // unit
    for count, index in zip(counts, at, strict=True):
        first, last = chunk(stop - start, count, index)
        start, stop = start + first, start + last
    return start * unit, stop * unit


@lru_cache(maxsize=4096)
def piece_sizes(size: int, counts: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """The sizes of all pieces in the order of the ranks, which is also that of the elements."""
    sizes = [size // unit]
    for count in counts:
        cuts = [chunk(piece, count, k) for piece in sizes for k in range(count)]
        sizes = [stop - start for start, stop in cuts]
    return tuple(piece * unit for piece in sizes)


def largest(size: int, counts: Sequence[int], unit: int = 1) -> int:
    """The size of the first piece, which none exceeds."""
    units = size // unit
    for count in counts:
        units = -(-units // count)
    return units * unit


def is_even(size: int, counts: Sequence[int], unit: int = 1) -> bool:
    """Whether all pieces are of one size."""
    pieces = 1
    for count in counts:
        pieces *= count
    return (size // unit) % pieces == 0


def fills(size: int, counts: tuple[int, ...], unit: int = 1) -> bool:
    """Whether every rank gets something (of a dimension that is not empty itself)."""
    return not size or is_even(size, counts, unit) or 0 not in piece_sizes(size, counts, unit)


@lru_cache(maxsize=4096)
def is_offered(size: int, counts: tuple[int, ...], unit: int = 1) -> bool:
    """Whether a search should consider this cut: it is even, or the best there is.

    An uneven cut wastes the time of the ranks with less. It is worth its place among the choices
    where every rank gets something and no axis that cuts unevenly could have cut the whole
    dimension evenly.
    """
    units = size // unit
    if is_even(size, counts, unit):
        return True
    pieces = {units}
    for count in counts:
        if units % count == 0 and any(piece % count for piece in pieces):
            return False
        cuts = [chunk(piece, count, k) for piece in pieces for k in range(count)]
        pieces = {stop - start for start, stop in cuts}
    return 0 not in pieces


@lru_cache(maxsize=4096)
def simplest_unit(size: int, counts: tuple[int, ...], unit: int) -> int:
    """The smallest unit that gives the same pieces: equal cuts are then written alike."""
    if is_even(size, counts, unit):
        return 1
    pieces = piece_sizes(size, counts, unit)
    candidates = (u for u in range(1, unit + 1) if size % u == 0)
    return next(u for u in candidates if piece_sizes(size, counts, u) == pieces)
