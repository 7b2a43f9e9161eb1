"""Cut a whole tensor into what one rank holds, and put the pieces together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir.errors import LayoutError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh


def piece(tensor: Tensor, layout: Layout, mesh: Mesh, coordinates: Mapping[str, int]) -> Tensor:
    """The block of a whole tensor that the rank at `coordinates` holds, as a view.

    The layout's states are Shard and Invariant (or Replicate, whose value is the same).
    """
    layout.check(tensor.shape)
    for d, axes in enumerate(layout.dims):
        if axes:
            start, stop = layout.span(d, tensor.shape[d], mesh, coordinates)
            tensor = tensor.narrow(d, start, stop - start)
    return tensor


def assemble(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh, shape: Sequence[int]) -> Tensor:
    """The whole tensor, of the given shape, from every rank's piece (by rank number).

    Partial axes are summed up, split dimensions joined; copies are taken from their first rank.
    """
    if len(pieces) != mesh.size:
        raise LayoutError(f"expected {mesh.size} pieces, one per rank, got {len(pieces)}")
    whole = torch.zeros(tuple(shape), dtype=pieces[0].dtype)
    used = set(layout.split_axes) | set(layout.partial)
    for rank, part in enumerate(pieces):
        coordinates = mesh.coordinates(rank)
        if any(coordinates[a] for a in mesh.names if a not in used):
            continue
        block = piece(whole, layout, mesh, coordinates)
        if block.shape != part.shape:
            raise LayoutError(
                f"rank {rank} holds {tuple(part.shape)}, in the layout {layout} of a tensor "
                f"{tuple(shape)} it is {tuple(block.shape)}"
            )
        if layout.partial:
            block += part.detach().to("cpu")
        else:
            block.copy_(part.detach())
    return whole
