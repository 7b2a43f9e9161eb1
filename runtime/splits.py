"""What an assisted operator is told of the split, and the sums it makes over the ranks.

`split` holds ``(factor, axes, whole size)`` for every factor of the operator's rule that some
axes split. Factors are named in families, ``b0, b1, …``; a family is asked for by its letter.
Pieces may be uneven or empty (`autopar.ir.cut`): where one begins, and what share of the whole it
is, comes from `part_of` and `share_of`, never from the size of the piece at hand.

Communication stays within the axes of one factor at a time. These are the groups that a plan
names, so they are the ones that are prepared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from autopar.ir.cut import span
from autopar.runtime.collectives import all_reduce
from autopar.runtime.groups import Group, Landing, current
from autopar.runtime.random import Block, Side, block_of

#: `(factor, axes, whole size)` of every split factor.
Split = tuple[tuple[str, tuple[str, ...], int], ...]


def axes_of(split: Split, family: str) -> tuple[tuple[str, ...], ...]:
    """The axes of every split factor of a family, one tuple for each factor."""
    return tuple(axes for name, axes, _ in split if _family(name) == family)


def _family(factor: str) -> str:
    return factor.rstrip("0123456789")


def is_split(split: Split, family: str) -> bool:
    return bool(axes_of(split, family))


def part_of(split: Split, factor: str, size: int) -> tuple[int, int]:
    """Where this rank's piece of a factor starts, and its size; one not split has `size`."""
    for name, axes, whole in split:
        if name == factor:
            context = current()
            at = [context.coordinates[axis] for axis in axes]
            start, stop = span(whole, context.mesh.sizes_of(axes), at)
            return start, stop - start
    return 0, size


def share_of(split: Split, *families: str) -> float:
    """Which part of the elements that some families count together this rank has."""
    share = 1.0
    for name, _, whole in split:
        if _family(name) in families:
            share *= part_of(split, name, whole)[1] / whole
    return share


def whole_size(split: Split, factor: str, size: int) -> int:
    """The size of a whole factor; `size` is that of an unsplit one."""
    return next((whole for name, _, whole in split if name == factor), size)


def group_of(split: Split, factor: str) -> Group:
    """The ranks that share out a factor; a group of one where it is not split."""
    return current().group({name: axes for name, axes, _ in split}.get(factor, ()))


def groups_of(split: Split, *families: str) -> Iterator[Group]:
    """The groups over which the factors of some families are split, one after the other."""
    for family in families:
        for axes in axes_of(split, family):
            yield current().group(axes)


def sum_over(x: Tensor, split: Split, *families: str, to: str) -> Tensor:
    """The sum of the ranks' terms, in state `to` ("I" or "R") along the axes of the families."""
    for family in families:
        for axes in axes_of(split, family):
            x = all_reduce(x, axes, to)
    return x


def reduce_plain(x: Tensor, split: Split, *families: str, op: str) -> Tensor:
    """The "sum", "max" or "min" over the ranks of something that carries no gradient."""
    x = x.detach()
    for group in groups_of(split, *families):
        x = group.all_reduce(x, op)
    return x


def start_plain_sum(x: Tensor, split: Split, *families: str) -> Landing:
    """Start the sum over the ranks of a new tensor that carries no gradient; wait for it later."""
    x = x.detach()
    groups = [group for group in groups_of(split, *families) if group.size > 1]
    if not groups:
        return lambda: x
    first, *rest = groups
    landing = first.start_all_reduce(x)

    def land() -> Tensor:
        total = landing()
        for group in rest:
            total = group.all_reduce(total)
        return total

    return land


def star_names(rank: int, family: str = "b") -> list[str]:
    """The factors of a term ``b*``: numbered from the right."""
    return [f"{family}{k}" for k in reversed(range(rank))]


def local_block(shape: tuple[int, ...], factors: list[str], split: Split) -> Block:
    """Which block of a tensor this rank holds; `factors` name its dimensions ("" for none).

    A dimension made of several factors lists them apart by blanks, major first.
    """
    sides = [_side(size, dim.split(), split) for size, dim in zip(shape, factors, strict=True)]
    return block_of(current(), sides)


def _side(size: int, names: list[str], split: Split) -> Side:
    """A dimension of some local size that is made of the named factors."""
    found = {name: (axes, whole) for name, axes, whole in split if name in names}
    if not found:
        return Side(size)
    axes = tuple(axis for name in names if name in found for axis in found[name][0])
    local = math.prod(part_of(split, name, 0)[1] for name in found)
    # The factors that are not split stand behind those that are, and stay together.
    unit = size // local if local else 1
    return Side(math.prod(whole for _, whole in found.values()) * unit, axes, unit)
