"""One tensor of a strategy as the user writes it: its entries, and the loops they split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autopar.ir.cut import fills
from autopar.ir.errors import HintError
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Dims, Rule


@dataclass(frozen=True)
class Entry:
    """How one dimension is to be split: into a count of pieces, or by named axes.

    at:
        where the user wrote it, for messages: "input 0, dimension 1"
    """

    count: int | None = None
    axes: tuple[str, ...] | None = None
    at: str = field(default="", compare=False)

    def pieces(self, mesh: Mesh) -> int:
        if self.axes is not None:
            return mesh.axis_size(*self.axes)
        assert self.count is not None
        return self.count

    def __str__(self) -> str:
        if self.axes is None:
            return f"into {self.count}"
        return "by " + "+".join(self.axes) if self.axes else "by no axis"


class Wanted(NamedTuple):
    """What an entry asks of one factor; `label` names hint, tensor and dimension."""

    factor: str
    entry: Entry
    label: str


def tensor_wants(
    spec: Any,
    rule: Rule,
    dims: Dims,
    shape: tuple[int, ...],
    label: str,
    mesh: Mesh,
    at: str,
    *,
    short: bool = False,
) -> list[Wanted]:
    """What the strategy of one tensor asks of the factors of an operator.

    dims, shape:
        the factors and the size of each dimension
    label, at:
        the tensor in full for messages about it, and in short for messages about others
    short:
        two entries may stand for more dimensions: all leading ones as one, and the last

    Raises HintError for a wrong rank, an unknown axis, a dimension that does not divide, that
    must stay whole, or whose parts do not fit the count.
    """
    entries = parse_entries(spec, len(shape), label, mesh, at, short=short)
    if len(entries) < len(dims):
        dims = (tuple(f for dim in dims[:-1] for f in dim), dims[-1])
        shape = (math.prod(shape[:-1]), shape[-1])
    return [
        wanted
        for d, (dim, entry, size) in enumerate(zip(dims, entries, shape, strict=True))
        for wanted in _dimension_wants(rule, dim, entry, size, f"{label}, dimension {d}", mesh)
    ]


def parse_entries(
    spec: Any, rank: int, label: str, mesh: Mesh, at: str, *, short: bool = False
) -> list[Entry]:
    """One entry per dimension of a tensor (two if `short`), checked against rank and mesh."""
    if not isinstance(spec, (tuple, list)):
        raise HintError(
            f"{label}: expected a tuple with {rank} entries, one per dimension, got {spec!r}; "
            "a strategy is a tuple of such tuples, for one input ((…),)"
        )
    if len(spec) != rank and not (short and len(spec) == 2 < rank):
        also = " (or 2: all leading dimensions as one, and the last)" if short and rank > 2 else ""
        raise HintError(
            f"{label}: expected {rank} entries, one per dimension{also}, "
            f"got {len(spec)}: {tuple(spec)!r}"
        )
    return [_entry(item, label, mesh, f"{at}, dimension {d}") for d, item in enumerate(spec)]


def _entry(item: Any, label: str, mesh: Mesh, at: str) -> Entry:
    if item is None or item == "None":
        return Entry(axes=(), at=at)
    if isinstance(item, int) and not isinstance(item, bool):
        if item < 1:
            raise HintError(f"{label}: a split count must be 1 or more, got {item}")
        return Entry(count=item, at=at)
    if not isinstance(item, (str, tuple, list)):
        raise HintError(f"{label}: expected a count, an axis name or None, got {item!r}")
    names = (item,) if isinstance(item, str) else tuple(item)
    for name in names:
        if name not in mesh.names:
            raise HintError(f"{label}: unknown mesh axis {name!r}, the mesh is {mesh}")
    if len(set(names)) != len(names):
        raise HintError(f"{label}: a mesh axis is named twice in {item!r}")
    return Entry(axes=tuple(n for n in names if mesh.axis_size(n) > 1), at=at)


def _dimension_wants(
    rule: Rule, dim: tuple[str, ...], entry: Entry, size: int, label: str, mesh: Mesh
) -> list[Wanted]:
    """What an entry asks of the factors of one dimension."""
    pieces = entry.pieces(mesh)
    if pieces > 1 and size < 2:
        raise HintError(
            f"{label}: size {size} does not divide into {pieces} pieces; it can be split into 1"
        )
    parts = _spread_over_factors(rule, dim, entry, label, mesh)
    asked = [factor for factor, part in parts if part.pieces(mesh) > 1]
    if pieces > 1 and not (asked and all(rule.by_name[f].splittable for f in asked)):
        raise HintError(
            f"{label}: the operator needs this dimension whole, got {pieces} pieces; "
            "it can be split into 1"
        )
    return [Wanted(factor, part, label) for factor, part in parts]


def listed(counts: Sequence[int]) -> str:
    """``1, 2 or 4``."""
    return " or ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))


def _spread_over_factors(
    rule: Rule, dim: tuple[str, ...], entry: Entry, label: str, mesh: Mesh
) -> list[tuple[str, Entry]]:
    """An entry for a composite dimension: its major factor is split first.

    What is left of it goes to the next factor where the first is split into single elements. No
    rank may be left without a piece.
    """
    if len(dim) <= 1:
        return [(factor, entry) for factor in dim]
    parts: list[tuple[str, Entry]] = []
    axes = list(entry.axes) if entry.axes is not None else None
    left = entry.pieces(mesh)
    for factor in dim:
        size = rule.by_name[factor].size
        if axes is not None:
            mine = _until_single(axes, size, mesh)
            axes = axes[len(mine) :]
            part = replace(entry, axes=tuple(mine))
        else:
            part = replace(entry, count=size if left % size == 0 else left)
        parts.append((factor, part))
        counts = (part.count or 1,) if part.axes is None else mesh.sizes_of(part.axes)
        if not fills(size, counts):
            break
        left //= part.pieces(mesh)
    if left > 1:
        raise HintError(
            f"{label}: {entry} does not fall on the boundaries of its parts "
            f"{[rule.by_name[f].size for f in dim]}"
        )
    return parts


def _until_single(axes: Sequence[str], size: int, mesh: Mesh) -> Sequence[str]:
    """The axes that split a factor: those that leave single elements, else all of them."""
    leading = (axes[:n] for n in range(len(axes)))
    return next((found for found in leading if mesh.axis_size(*found) == size), axes)
