"""From a strategy as a user writes it to what it fixes about an operator.

Two forms, one entry per dimension of each operand: split counts as in MindSpore,
``((2, 4), (4, 1))``, or mesh axis names, ``(("dp", None, "tp"), ("tp", None))``. Counts that fit
several axis assignments take the first in mesh order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.errors import HintError
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.passes.choices import Fix


@dataclass(frozen=True)
class Hint:
    """One `shard()` call or one entry of `hints=`.

    where:
        how the user named the operator: a module path, a pattern, a source line
    inputs:
        one tuple per operand, or None where only the output is hinted
    outputs:
        one tuple for the result, or None
    """

    where: str
    inputs: tuple[Any, ...] | None = None
    outputs: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        return f"hint {self.where}"


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


def operator_fix(
    node: Node,
    rule: Rule,
    hint: Hint,
    full_mesh: Mesh,
    parameters: Collection[int] = (),
    order: Sequence[int] | None = None,
) -> tuple[Fix, dict[int, Any]]:
    """What a hint's `inputs` fix about an operator, and how they want parameters stored.

    order:
        the operands in the order the strategy lists them; default: that of the rule
    parameters:
        the operands that are parameters. Where the activations keep a summed loop whole and a
        parameter is split along it, the parameter is stored so and gathered for the operator
        (ZeRO): ``((8, 1), (8, 1))`` of a product. It is in the second result: operand -> its
        strategy.

    Raises HintError naming the hint, the operand and the dimension: a wrong rank, an unknown
    axis, a dimension that does not divide or cannot be split, counts that contradict each other
    or fit no assignment of axes.
    """
    assert hint.inputs is not None
    if order is None:
        order = rule.hint_order or range(len(rule.operands))
    if len(hint.inputs) > len(order):
        shapes = [tuple(node.operands[i].shape) for i in order]
        raise HintError(
            f"{hint}: {node.op} has {len(order)} tensor operands {shapes}, "
            f"the strategy {hint.inputs!r} has {len(hint.inputs)}"
        )
    wanted: dict[str, Entry] = {}
    stored: dict[int, Any] = {}
    given = [(k, order[k], spec) for k, spec in enumerate(hint.inputs) if spec is not None]
    # Activations first: what they ask decides how a parameter's strategy is read.
    for k, index, spec in sorted(given, key=lambda g: (g[1] in parameters, g[0])):
        shape = node.operands[index].shape
        where = f"{hint}: input {k} of {node.op}, shape {tuple(shape)}"
        short = rule.flatten_hint and k == 0
        entries = parse_entries(spec, len(shape), where, full_mesh, f"input {k}", short=short)
        dims, sizes = rule.operands[index], shape
        if len(entries) < len(dims):
            dims = (tuple(f for dim in dims[:-1] for f in dim), dims[-1])
            sizes = (math.prod(shape[:-1]), shape[-1])
        asked = [
            item
            for d, (dim, entry, size) in enumerate(zip(dims, entries, sizes, strict=True))
            for item in dimension_wants(
                rule, dim, entry, size, f"{where}, dimension {d}", full_mesh
            )
        ]
        if index in parameters and _only_stored(asked, wanted, rule, full_mesh):
            stored[index] = spec
            continue
        for factor, entry, label in asked:
            _want(wanted, factor, entry, label, full_mesh)
    return assign_axes(wanted, full_mesh, f"{hint}: {node.op}, strategy {hint.inputs!r}"), stored


def parse_entries(
    spec: Any, rank: int, label: str, mesh: Mesh, at: str, *, short: bool = False
) -> list[Entry]:
    """One entry per dimension of a tensor, checked against its rank and the mesh.

    short:
        two entries may stand for more dimensions: all leading ones as one, and the last
    """
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


def dimension_wants(
    rule: Rule, dim: tuple[str, ...], entry: Entry, size: int, label: str, mesh: Mesh
) -> list[tuple[str, Entry, str]]:
    """What an entry asks of the factors of one dimension: (factor, entry, label)."""
    pieces = entry.pieces(mesh)
    if pieces > 1 and size % pieces:
        raise HintError(
            f"{label}: size {size} does not divide into {pieces} pieces; "
            f"it can be split into {_listed(_possible(size, mesh))}"
        )
    if pieces > 1 and not any(rule.by_name[f].splittable for f in dim):
        raise HintError(
            f"{label}: the operator needs this dimension whole, got {pieces} pieces; "
            "it can be split into 1"
        )
    return [(f, part, label) for f, part in _spread_over_factors(rule, dim, entry, label, mesh)]


def _possible(size: int, mesh: Mesh) -> list[int]:
    """The counts into which the axes of a mesh can split a dimension."""
    counts = {1}
    for _, axis in mesh.axes:
        counts |= {count * axis for count in counts}
    return sorted(count for count in counts if size % count == 0)


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))


def _only_stored(
    asked: Sequence[tuple[str, Entry, str]], wanted: Mapping[str, Entry], rule: Rule, mesh: Mesh
) -> bool:
    """Whether a parameter is split along summed loops only, which the activations keep whole."""
    split = [factor for factor, entry, _ in asked if entry.pieces(mesh) > 1]
    return bool(split) and all(
        rule.is_reduced(f) and f in wanted and wanted[f].pieces(mesh) == 1 for f in split
    )


def _want(wanted: dict[str, Entry], factor: str, entry: Entry, label: str, mesh: Mesh) -> None:
    """Record what is asked of one factor, unless something else was."""
    known = wanted.get(factor)
    if known is not None and known != entry:
        by_name = known.axes is not None and entry.axes is not None
        if by_name or known.pieces(mesh) != entry.pieces(mesh):
            raise HintError(
                f"{label}: split {entry}, but the same loop of the operator is split {known} "
                f"in {known.at}"
            )
    if known is None or known.axes is None:
        wanted[factor] = entry


def _spread_over_factors(
    rule: Rule, dim: tuple[str, ...], entry: Entry, label: str, mesh: Mesh
) -> list[tuple[str, Entry]]:
    """An entry for a composite dimension: its major factor is split first."""
    if len(dim) <= 1:
        return [(factor, entry) for factor in dim]
    parts: list[tuple[str, Entry]] = []
    axes = list(entry.axes) if entry.axes is not None else None
    left = entry.pieces(mesh)
    for factor in dim:
        size = rule.by_name[factor].size
        if axes is not None:
            mine: list[str] = []
            while axes and size % mesh.axis_size(*mine, axes[0]) == 0:
                mine.append(axes.pop(0))
            part = replace(entry, axes=tuple(mine))
        else:
            count = next(c for c in range(min(size, left), 0, -1) if not (size % c or left % c))
            part = replace(entry, count=count)
        parts.append((factor, part))
        left //= part.pieces(mesh)
        if left > 1 and part.pieces(mesh) != size:
            raise HintError(
                f"{label}: {entry} does not fall on the boundaries of its parts "
                f"{[rule.by_name[f].size for f in dim]}"
            )
    return parts


def assign_axes(wanted: Mapping[str, Entry], full_mesh: Mesh, label: str) -> Fix:
    """Give every count its mesh axes: the first assignment in mesh order.

    Raises HintError where no assignment exists.
    """
    exact: dict[str, tuple[str, ...]] = {f: e.axes for f, e in wanted.items() if e.axes is not None}
    user: dict[str, Entry] = {}
    for entry in wanted.values():
        for axis in entry.axes or ():
            if axis in user:
                raise HintError(
                    f"{label}: mesh axis {axis!r} splits two different loops of the operator, "
                    f"{user[axis].at} and {entry.at}"
                )
            user[axis] = entry
    counted = [(f, e) for f, e in wanted.items() if e.axes is None]
    free = [a for a, size in full_mesh.axes if size > 1 and a not in user]
    counts = [e.pieces(full_mesh) for _, e in counted]
    found = first_assignment(counts, free, full_mesh)
    if found is None:
        raise HintError(
            f"{label}: no assignment of mesh axes gives the split counts "
            f"{tuple(c for c in counts if c > 1)}; each must be a product of different axes of "
            f"{full_mesh}{_way_out([e for _, e in counted], counts, free, full_mesh)}"
        )
    multiple = set()
    for (factor, _), axes in zip(counted, found, strict=True):
        exact[factor] = axes
        if len(axes) > 1:
            multiple.add(factor)
    return Fix(exact=exact, any_order=frozenset(multiple))


def _way_out(entries: list[Entry], counts: list[int], free: list[str], mesh: Mesh) -> str:
    """The first count whose change alone would do, and to what."""
    for k, count in enumerate(counts):
        accepted = [
            other
            for other in range(1, count + 1)
            if first_assignment([*counts[:k], other, *counts[k + 1 :]], free, mesh) is not None
        ]
        if accepted and count > 1:
            return (
                f"; with the others as they are, {entries[k].at} can be split into "
                f"{_listed(accepted)}, got {count}"
            )
    return ""


def first_assignment(
    counts: Sequence[int], axes: Sequence[str], mesh: Mesh
) -> list[tuple[str, ...]] | None:
    """Disjoint axes for each count, the earliest ones in mesh order first."""
    if not counts:
        return []
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(axes)), length) for length in range(len(axes) + 1)
    )
    for subset in sorted(subsets):
        chosen = tuple(axes[i] for i in subset)
        if mesh.axis_size(*chosen) == counts[0]:
            rest = first_assignment(counts[1:], [a for a in axes if a not in chosen], mesh)
            if rest is not None:
                return [chosen, *rest]
    return None
