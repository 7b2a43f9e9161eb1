"""What an assisted operator is told of the split, and the sums it makes over the ranks.

`split` holds ``(factor, axes, whole size)`` for every factor of the operator's rule that some
axes split. Factors are named in families, ``b0, b1, …``; a family is asked for by its letter.

Communication stays within the axes of one factor at a time. These are the groups that a plan
names, so they are the ones that are prepared.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from autopar.runtime.collectives import all_reduce
from autopar.runtime.groups import Group, current
from autopar.runtime.random import Block, block_of

#: `(factor, axes, whole size)` of every split factor.
Split = tuple[tuple[str, tuple[str, ...], int], ...]


def axes_of(split: Split, family: str) -> tuple[tuple[str, ...], ...]:
    """The axes of every split factor of a family, one tuple for each factor."""
    return tuple(axes for name, axes, _ in split if name.rstrip("0123456789") == family)


def is_split(split: Split, family: str) -> bool:
    return bool(axes_of(split, family))


def pieces_of(split: Split, *families: str) -> int:
    """Into how many pieces the factors of some families are split, all together."""
    count = 1
    for family in families:
        for axes in axes_of(split, family):
            count *= current().mesh.axis_size(*axes)
    return count


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


def star_names(rank: int, family: str = "b") -> list[str]:
    """The factors of a term ``b*``: numbered from the right."""
    return [f"{family}{k}" for k in reversed(range(rank))]


def local_block(shape: tuple[int, ...], factors: list[str], split: Split) -> Block:
    """Which block of a tensor this rank holds; `factors` name its dimensions ("" for none).

    A dimension made of several factors lists them apart by blanks, major first.
    """
    axes = {name: axes for name, axes, _ in split}
    return block_of(
        current(),
        shape,
        [sum([axes.get(name, ()) for name in dim.split()], ()) for dim in factors],
    )
