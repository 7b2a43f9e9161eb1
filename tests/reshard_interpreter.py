"""What reshard steps mean, on numpy arrays of all ranks at once.

Written from the table of states alone, so that it shares no code with the runtime's collectives.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.reshard.path import Step

#: One array per rank.
Pieces = list[np.ndarray]


def scatter(whole: np.ndarray, layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Pieces:
    """What each rank holds of a tensor; terms of a partial sum are random."""
    counts = [mesh.axis_size(axis) for axis in layout.partial]
    terms = {at: rng.integers(-9, 9, whole.shape) for at in itertools.product(*map(range, counts))}
    first = next(iter(terms))
    terms[first] = whole - sum((t for at, t in terms.items() if at != first), np.zeros_like(whole))
    pieces = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        piece = terms[tuple(here[axis] for axis in layout.partial)]
        for dim, axes in enumerate(layout.dims):
            counts = [mesh.axis_size(axis) for axis in axes]
            piece = _chunks(piece, counts, dim, layout.unit(dim))[mesh.index(here, axes)]
        pieces.append(piece)
    return pieces


def gather(pieces: Pieces, layout: Layout, mesh: Mesh) -> np.ndarray:
    """The tensor all ranks hold together; copies along I and R axes must be equal."""
    parts: dict[tuple[int, ...], np.ndarray] = {}
    used = (*layout.partial, *layout.split_axes)
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        part = parts.setdefault(tuple(here[axis] for axis in used), pieces[rank])
        np.testing.assert_array_equal(part, pieces[rank], err_msg=f"copies differ in {layout}")
    sums: dict[tuple[int, ...], np.ndarray] = {}
    for at, part in parts.items():
        block = at[len(layout.partial) :]
        sums[block] = sums.get(block, 0) + part
    blocks = np.empty([mesh.axis_size(*axes) for axes in layout.dims], dtype=object)
    for at, part in sums.items():
        position = dict(zip(layout.split_axes, at, strict=True))
        blocks[tuple(mesh.index(position, axes) for axes in layout.dims)] = part
    return np.array(np.block(blocks.tolist())) if layout.rank else next(iter(sums.values()))


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor in a layout: R and P change places."""
    return Layout.make(layout.dims, layout.partial, layout.replicate, layout.units)


def _chunks(x: np.ndarray, counts: list[int], dim: int, unit: int) -> list[np.ndarray]:
    """The pieces of an array in rank order: the first ones as large as need be, axis by axis."""
    pieces = [x]
    for count in counts:
        pieces = [
            np.take(piece, np.arange(piece.shape[dim])[k * most : (k + 1) * most], axis=dim)
            for piece in pieces
            for most in (-(-(piece.shape[dim] // unit) // count) * unit,)
            for k in range(count)
        ]
    return pieces


def forward(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    dim, after = step.dim, step.after
    match step.kind:
        case "all_reduce":
            return _sum(pieces, step.axes, mesh)
        case "all_gather":
            return _concatenate(pieces, step.axes, dim, mesh)
        case "reduce_scatter":
            return _cut(_sum(pieces, step.axes, mesh), step.axes, dim, mesh, after)
        case "all_to_all":
            whole = _concatenate(pieces, step.axes, dim, mesh)
            return _cut(whole, step.axes, step.dst_dim, mesh, after)
        case "recut":
            return _cut(_concatenate(pieces, step.axes, dim, mesh), step.axes, dim, mesh, after)
        case "slice":
            return _cut(pieces, step.axes, dim, mesh, after)
        case "pad":
            return _pad(pieces, step.axes, dim, mesh)
        case "mask":
            return _mask(pieces, step.axes, mesh)
        case "to_replicate" | "to_invariant":
            return pieces
    raise AssertionError(step.kind)


def backward(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    """The gradient before a step from the gradient after it."""
    axes, dim, before = step.axes, step.dim, step.before
    match step.kind, step.state:
        case ("all_reduce", "I") | ("mask", "I"):
            return pieces
        case ("all_reduce", "R") | ("to_replicate", _):
            return _sum(pieces, axes, mesh)
        case ("all_gather", "I") | ("pad", _):
            return _cut(pieces, axes, dim, mesh, before)
        case ("all_gather", "R"):
            return _cut(_sum(pieces, axes, mesh), axes, dim, mesh, before)
        case ("reduce_scatter", _) | ("slice", "I"):
            return _concatenate(pieces, axes, dim, mesh)
        case ("all_to_all", _):
            whole = _concatenate(pieces, axes, step.dst_dim, mesh)
            return _cut(whole, axes, dim, mesh, before)
        case ("recut", _):
            return _cut(_concatenate(pieces, axes, dim, mesh), axes, dim, mesh, before)
        case ("slice", "R"):
            return _pad(pieces, axes, dim, mesh)
        case ("mask", "R") | ("to_invariant", _):
            return _mask(pieces, axes, mesh)
    raise AssertionError(step.kind)


@cache
def _groups(axes: tuple[str, ...], mesh: Mesh) -> list[tuple[int, ...]]:
    """The group of each rank along some axes."""
    return [mesh.group(rank, axes) for rank in range(mesh.size)]


def _sum(pieces: Pieces, axes: tuple[str, ...], mesh: Mesh) -> Pieces:
    return [np.sum([pieces[r] for r in group], axis=0) for group in _groups(axes, mesh)]


def _concatenate(pieces: Pieces, axes: tuple[str, ...], dim: int | None, mesh: Mesh) -> Pieces:
    assert dim is not None
    return [np.concatenate([pieces[r] for r in g], axis=dim) for g in _groups(axes, mesh)]


def _cut(
    pieces: Pieces, axes: tuple[str, ...], dim: int | None, mesh: Mesh, layout: Layout
) -> Pieces:
    """`layout`: that of the pieces that come of it."""
    assert dim is not None
    counts, unit = [mesh.axis_size(axis) for axis in axes], layout.unit(dim)
    at = (mesh.index(mesh.coordinates(rank), axes) for rank in range(mesh.size))
    return [_chunks(p, counts, dim, unit)[i] for p, i in zip(pieces, at, strict=True)]


def _pad(pieces: Pieces, axes: tuple[str, ...], dim: int | None, mesh: Mesh) -> Pieces:
    assert dim is not None
    padded = []
    for rank, piece in enumerate(pieces):
        blocks = [np.zeros_like(pieces[r]) for r in mesh.group(rank, axes)]
        blocks[mesh.index(mesh.coordinates(rank), axes)] = piece
        padded.append(np.concatenate(blocks, axis=dim))
    return padded


def _mask(pieces: Pieces, axes: tuple[str, ...], mesh: Mesh) -> Pieces:
    first = (mesh.index(mesh.coordinates(r), axes) == 0 for r in range(mesh.size))
    return [p if f else np.zeros_like(p) for p, f in zip(pieces, first, strict=True)]
