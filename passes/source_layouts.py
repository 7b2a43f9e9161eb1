"""The layouts in which parameters, inputs and outputs may be stored: split or Invariant."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from autopar.ir.cut import is_offered
from autopar.ir.graph import Node
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh


def stored_layouts(shape: tuple[int, ...], mesh: Mesh) -> tuple[Layout, ...]:
    """Every layout of Shard and Invariant states that a search should consider, Invariant first.

    Uneven pieces are those of a DTensor (`autopar.ir.cut`). Axes that share a dimension stand in
    mesh order, which is how a DTensor reads its placements.
    """
    found = []
    options: list[int | None] = [None, *range(len(shape))]
    for choice in itertools.product(options, repeat=len(mesh.axes)):
        dims: list[list[str]] = [[] for _ in shape]
        for axis, dim in zip(mesh.names, choice, strict=True):
            if dim is not None:
                dims[dim].append(axis)
        cuts = [(size, mesh.sizes_of(tuple(axes))) for size, axes in zip(shape, dims, strict=True)]
        if all(not counts or (size and is_offered(size, counts)) for size, counts in cuts):
            found.append(Layout.make(dims))
    return tuple(found)


def source_layouts(
    node: Node, mesh: Mesh, pinned: Mapping[str, Layout] | None = None
) -> tuple[Layout, ...]:
    """The layouts a source node may be held in.

    Parameters and inputs may be split; buffers and constants are whole on every rank (they are
    small, and a slice of them is free), and so is an input that a gradient flows back to: the
    caller gave the whole of it and is owed the whole gradient. `pinned` fixes parameters by their
    dotted name.
    """
    (value,) = node.results
    if node.op == "param" and pinned and node.target in pinned:
        return (pinned[node.target],)
    if node.op == "param" or (node.op == "input" and not value.grad):
        return stored_layouts(value.shape, mesh)
    return (Layout.whole(len(value.shape)),)
