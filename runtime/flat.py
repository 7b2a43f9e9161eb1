"""One collective for many tensors: they travel side by side in one flat buffer.

Latency is paid once, and what follows can go on while the buffer is under way: each function
starts its collective and returns what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.groups import Group, Sizes

#: Many tensors on their way: waits for them and gives them.
Landings = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut among the ranks of a group.

    dim:
        the dimension that is cut
    sizes:
        how large the piece of each rank is; None where all are equal
    """

    dim: int
    sizes: Sizes = None


def start_all_reduce(group: Group, xs: Sequence[Tensor]) -> Landings:
    """The sum of each tensor over the ranks; the results are parts of one buffer."""
    flat = torch.cat([x.reshape(-1) for x in xs])
    shapes = [x.shape for x in xs]
    landing = group.start_all_reduce(flat)
    return lambda: _parts(landing(), shapes)


def start_all_gather(group: Group, xs: Sequence[Tensor], cuts: Sequence[Cut]) -> Landings:
    """Each tensor whole, from the ranks' pieces."""
    pieces = [_padded(x, cut) for x, cut in zip(xs, cuts, strict=True)]
    shapes = [x.shape for x in pieces]
    flat = pieces[0].reshape(-1) if len(pieces) == 1 else torch.cat([x.reshape(-1) for x in pieces])
    landing = group.start_all_gather(flat)

    def land() -> list[Tensor]:
        stacked = landing()
        columns = stacked.split([shape.numel() for shape in shapes], 1)
        return [
            _joined(column.view(group.size, *shape), cut)
            for column, shape, cut in zip(columns, shapes, cuts, strict=True)
        ]

    return land


def start_reduce_scatter(group: Group, xs: Sequence[Tensor], cuts: Sequence[Cut]) -> Landings:
    """This rank's piece of the sum of each tensor; the results are parts of one buffer."""
    blocks = [_blocks(x, cut, group.size) for x, cut in zip(xs, cuts, strict=True)]
    shapes = [block.shape[1:] for block in blocks]
    counts = [shape.numel() for shape in shapes]
    stacked = xs[0].new_empty((group.size, sum(counts)))
    for column, block in zip(stacked.split(counts, 1), blocks, strict=True):
        column.view(block.shape).copy_(block)
    landing = group.start_reduce_scatter(stacked)

    def land() -> list[Tensor]:
        found = _parts(landing(), shapes)
        return [_trimmed(x, cut, group.index) for x, cut in zip(found, cuts, strict=True)]

    return land


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _padded(x: Tensor, cut: Cut) -> Tensor:
    """A piece with zeros behind it, as large as the largest piece."""
    if cut.sizes is None or x.shape[cut.dim] == max(cut.sizes):
        return x
    shape = list(x.shape)
    shape[cut.dim] = max(cut.sizes) - x.shape[cut.dim]
    return torch.cat([x, x.new_zeros(shape)], cut.dim)


def _joined(stacked: Tensor, cut: Cut) -> Tensor:
    """The whole tensor from stacked (padded) pieces."""
    if cut.sizes is None:
        return stacked.movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1).contiguous()
    pieces = zip(stacked.unbind(), cut.sizes, strict=True)
    return torch.cat([piece.narrow(cut.dim, 0, size) for piece, size in pieces], cut.dim)


def _blocks(x: Tensor, cut: Cut, count: int) -> Tensor:
    """The (padded) blocks of a whole tensor, stacked in front."""
    if cut.sizes is None:
        return x.unflatten(cut.dim, (count, -1)).movedim(cut.dim, 0)
    return torch.stack([_padded(block, cut) for block in x.split(cut.sizes, cut.dim)])


def _trimmed(x: Tensor, cut: Cut, index: int) -> Tensor:
    return x if cut.sizes is None else x.narrow(cut.dim, 0, cut.sizes[index]).contiguous()
