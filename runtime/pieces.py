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
    local = layout.local_shape(tensor.shape, mesh)
    for d, axes in enumerate(layout.dims):
        if axes:
            position = mesh.index({a: coordinates[a] for a in axes}, axes)
            tensor = tensor.narrow(d, position * local[d], local[d])
    return tensor


def assemble(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor from every rank's piece (by rank number).

    Partial axes are summed up, split dimensions joined; copies are taken from their first rank.
    """
    if len(pieces) != mesh.size:
        raise LayoutError(f"expected {mesh.size} pieces, one per rank, got {len(pieces)}")
    local = pieces[0].shape
    counts = layout.counts(mesh)
    whole = torch.zeros([s * n for s, n in zip(local, counts, strict=True)], dtype=pieces[0].dtype)
    used = set(layout.split_axes) | set(layout.partial)
    for rank, part in enumerate(pieces):
        coordinates = mesh.coordinates(rank)
        if any(coordinates[a] for a in mesh.names if a not in used):
            continue
        block = whole
        for d, axes in enumerate(layout.dims):
            if axes:
                block = block.narrow(d, mesh.index(coordinates, axes) * local[d], local[d])
        if layout.partial:
            block += part.detach().to("cpu")
        else:
            block.copy_(part.detach())
    return whole
