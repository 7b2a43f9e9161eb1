"""One collective for many tensors: they travel side by side in one flat buffer.

Latency is paid once, and what follows can go on while the buffer is under way: each function
starts its collective and returns what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.groups import Group, Sizes, release

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


def start_all_reduce(group: Group, xs: Sequence[Tensor], ours: bool = False) -> Landings:
    """The sum of each tensor over the ranks; the results are parts of one buffer.

    ours:
        whether they may be written to: then that buffer is where a single tensor lies
    """
    in_place = ours and len(xs) == 1 and xs[0].is_contiguous()
    flat = xs[0].view(-1) if in_place else torch.cat([x.reshape(-1) for x in xs])
    shapes = [x.shape for x in xs]
    landing = group.start_all_reduce(flat)
    return lambda: _parts(landing(), shapes)


def start_all_gather(group: Group, xs: Sequence[Tensor], cuts: Sequence[Cut]) -> Landings:
    """Each tensor whole, from the ranks' pieces."""
    pieces = [_padded(x, cut) for x, cut in zip(xs, cuts, strict=True)]
    shapes = [x.shape for x in pieces]
    alone = len(pieces) == 1
    flat = pieces[0].reshape(-1) if alone else torch.cat([x.reshape(-1) for x in pieces])
    landing = group.start_all_gather(flat)
    sent = [] if alone else [flat]

    def land() -> list[Tensor]:
        stacked = landing()
        while sent:
            release(sent.pop())
        columns = stacked.split([shape.numel() for shape in shapes], 1)
        return [
            _joined(group, column.view(group.size, *shape), cut)
            for column, shape, cut in zip(columns, shapes, cuts, strict=True)
        ]

    return land


def start_reduce_scatter(
    group: Group, xs: Sequence[Tensor], cuts: Sequence[Cut], ours: bool = False
) -> Landings:
    """This rank's piece of the sum of each tensor; the results are parts of one buffer.

    ours:
        whether they may be given up: then a single tensor is sent from where it lies
    """
    shapes = [_block_shape(x, cut, group.size) for x, cut in zip(xs, cuts, strict=True)]
    in_place = ours and len(xs) == 1 and _lies_stacked(group, xs[0], cuts[0])
    stacked = xs[0].view(group.size, -1) if in_place else _stacked(group, xs, cuts, shapes)
    landing = group.start_reduce_scatter(stacked)
    sent = [stacked]

    def land() -> list[Tensor]:
        landed = landing()
        while sent:
            release(sent.pop())
        found = _parts(landed, shapes)
        return [_trimmed(x, cut, group.index) for x, cut in zip(found, cuts, strict=True)]

    return land


def _lies_stacked(group: Group, x: Tensor, cut: Cut) -> bool:
    """Whether the blocks of a tensor lie one after the other, as a transport takes them."""
    even = cut.sizes is None and cut.dim == 0
    return even and group.in_order and x.is_contiguous()


def _stacked(
    group: Group, xs: Sequence[Tensor], cuts: Sequence[Cut], shapes: Sequence[torch.Size]
) -> Tensor:
    """A buffer `(size, elements)` of the (padded) blocks, of given shapes, of some tensors."""
    counts = [shape.numel() for shape in shapes]
    stacked = xs[0].new_empty((group.size, sum(counts)))
    for column, x, cut, shape in zip(stacked.split(counts, 1), xs, cuts, shapes, strict=True):
        places = column.view(group.size, *shape)
        if group.in_order and cut.sizes is None:
            places.copy_(x.unflatten(cut.dim, (group.size, -1)).movedim(cut.dim, 0))
            continue
        blocks = x.split(shape[cut.dim] if cut.sizes is None else cut.sizes, cut.dim)
        for place, block in zip(group.unstack(places), blocks, strict=True):
            place.copy_(_padded(block, cut))
    return stacked


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


def _joined(group: Group, stacked: Tensor, cut: Cut) -> Tensor:
    """The whole tensor from stacked (padded) pieces."""
    if cut.sizes is None:
        return group.join(stacked, cut.dim).contiguous()
    pieces = zip(group.unstack(stacked), cut.sizes, strict=True)
    return torch.cat([piece.narrow(cut.dim, 0, size) for piece, size in pieces], cut.dim)


def _block_shape(x: Tensor, cut: Cut, count: int) -> torch.Size:
    """The shape of each of the (padded) blocks of a whole tensor."""
    shape = list(x.shape)
    shape[cut.dim] = shape[cut.dim] // count if cut.sizes is None else max(cut.sizes)
    return torch.Size(shape)


def _trimmed(x: Tensor, cut: Cut, index: int) -> Tensor:
    return x if cut.sizes is None else x.narrow(cut.dim, 0, cut.sizes[index]).contiguous()
