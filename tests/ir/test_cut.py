"""Pieces of a dimension: those of `torch.chunk`, axis by axis, in units."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.cut import (
    fills,
    is_even,
    is_offered,
    largest,
    piece_sizes,
    simplest_unit,
    span,
)

SIZES = (1, 2, 3, 5, 6, 7, 12, 25, 48)
COUNTS = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2))


def chunks(size: int, counts: tuple[int, ...]) -> list[int]:
    """What `torch.chunk` makes of a range; it leaves out empty pieces at the end."""
    pieces = [torch.arange(size)]
    for count in counts:
        cut = [list(piece.chunk(count)) if len(piece) else [] for piece in pieces]
        pieces = [p for row in cut for p in row + [torch.arange(0)] * (count - len(row))]
    return [len(piece) for piece in pieces]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unit", [1, 4])
def test_pieces(size: int, counts: tuple[int, ...], unit: int) -> None:
    whole = size * unit
    want = tuple(unit * n for n in chunks(size, counts))
    assert piece_sizes(whole, counts, unit) == want
    assert largest(whole, counts, unit) == max(want) == want[0]
    assert is_even(whole, counts, unit) == (len(set(want)) == 1)
    assert fills(whole, counts, unit) == (0 not in want)
    covered = []
    for at, length in zip(itertools.product(*map(range, counts)), want, strict=True):
        start, stop = span(whole, counts, at, unit)
        assert stop - start == length
        covered += range(start, stop)
    assert covered == list(range(whole))


@pytest.mark.parametrize(
    ("size", "counts", "offered"),
    [
        (8, (2,), True),
        (7, (4,), True),
        (25, (2,), True),
        (50257, (2, 4), True),
        (9, (3, 2), True),  # even, then an axis that never divides
        (5, (4,), False),  # 2, 2, 1 and nothing
        (12, (8,), False),
        (6, (2, 2), False),  # either axis alone divides
        (1, (2,), False),
    ],
)
def test_what_a_search_considers(size: int, counts: tuple[int, ...], offered: bool) -> None:
    assert is_offered(size, counts) == offered


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("unit", [2, 3, 4, 6, 12])
def test_the_simplest_unit_gives_the_same_pieces(counts: tuple[int, ...], unit: int) -> None:
    for units in range(1, 30):
        size = units * unit
        found = simplest_unit(size, counts, unit)
        assert piece_sizes(size, counts, found) == piece_sizes(size, counts, unit)
        smaller = [u for u in range(1, found) if size % u == 0]
        assert all(piece_sizes(size, counts, u) != piece_sizes(size, counts, unit) for u in smaller)
