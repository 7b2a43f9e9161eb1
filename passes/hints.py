"""From a strategy as a user writes it to what it fixes about an operator.

Two forms, one entry per dimension of each operand: split counts as in MindSpore,
``((2, 4), (4, 1))``, or mesh axis names, ``(("dp", None, "tp"), ("tp", None))``. Counts that fit
several axis assignments take the first in mesh order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.cut import fills
from autopar.ir.errors import HintError
from autopar.ir.graph import Node
from autopar.ir.layout import INVARIANT
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Dims, Rule, Strategy, is_valid
from autopar.passes.choices import WHOLE, Fix
from autopar.passes.split_entries import Entry, Wanted, listed, tensor_wants


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
        (ZeRO): ``((8, 1), (8, 1))`` of a product. It is in the second result: operand -> the
        layout it is stored in.

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
    stored: dict[int, dict[str, Entry]] = {}
    given = [(k, order[k], spec) for k, spec in enumerate(hint.inputs) if spec is not None]
    # Activations first: what they ask decides how a parameter's strategy is read.
    for k, index, spec in sorted(given, key=lambda g: (g[1] in parameters, g[0])):
        shape = node.operands[index].shape
        label = f"{hint}: input {k} of {node.op}, shape {tuple(shape)}"
        short = rule.flatten_hint and k == 0
        asked = tensor_wants(
            spec, rule, rule.operands[index], shape, label, full_mesh, f"input {k}", short=short
        )
        for want in asked:
            if index in parameters and _stored_only(want, wanted, rule, index, full_mesh):
                stored.setdefault(index, {})[want.factor] = want.entry
            else:
                _want(wanted, want, full_mesh)
    label = f"{hint}: {node.op}, strategy {hint.inputs!r}"
    fix = assign_axes(wanted, full_mesh, label)
    _check_blocks(node.op, rule, fix, wanted, full_mesh, label)
    return fix, {i: _stored_layout(rule.operands[i], kept, fix) for i, kept in stored.items()}


def _stored_only(
    want: Wanted, wanted: Mapping[str, Entry], rule: Rule, index: int, mesh: Mesh
) -> bool:
    """Whether a parameter is split along a summed loop which the activations keep whole."""
    known = wanted.get(want.factor)
    return (
        want.entry.pieces(mesh) > 1
        and known is not None
        and known.pieces(mesh) == 1
        and rule.is_reduced(want.factor)
        and (want.factor,) in rule.operands[index]
    )


def _stored_layout(dims: Dims, kept: Mapping[str, Entry], fix: Fix) -> tuple[Any, ...]:
    """The layout of a parameter: some dimensions as it is stored, the others as it is used."""
    layout: list[Any] = []
    for dim in dims:
        entry = next((kept[factor] for factor in dim if factor in kept), None)
        axes = tuple(axis for factor in dim for axis in fix.exact.get(factor, ()))
        if entry is not None:
            layout.append(entry.count if entry.axes is None else entry.axes)
        else:
            layout.append((axes[0] if len(axes) == 1 else axes) or 1)
    return tuple(layout)


def _check_blocks(
    op: str, rule: Rule, fix: Fix, wanted: Mapping[str, Entry], full_mesh: Mesh, label: str
) -> None:
    """Refuse a split that is no block of a dimension in which several are merged.

    Also one that leaves ranks without a piece of what the operator needs some of.
    """
    mesh = full_mesh.without_trivial_axes()
    for factor in rule.filled:
        ranks, size = mesh.axis_size(*fix.exact.get(factor, ())), rule.by_name[factor].size
        if not fills(size, mesh.sizes_of(fix.exact.get(factor, ()))):
            raise HintError(
                f"{label}: {wanted[factor].at} of size {size} leaves some of {ranks} ranks without "
                f"a piece on the mesh {full_mesh}, which {op} does not allow"
            )
    roles = {axis: factor for factor, axes in fix.exact.items() for axis in axes}
    strategy = Strategy(tuple((axis, roles.get(axis, INVARIANT)) for axis in mesh.names))
    if not is_valid(rule, strategy, mesh):
        merged = [dim for dims in rule.operands + rule.results for dim in dims if len(dim) > 1]
        inner = next(f for dim in merged for f in dim[1:] if strategy.axes_of(f))
        raise HintError(
            f"{label}: {wanted[inner].at} is merged behind another dimension and can be split "
            "only where that one is split into single elements"
        )


def layout_fix(
    spec: Any,
    rule: Rule,
    shape: tuple[int, ...],
    label: str,
    full_mesh: Mesh,
    at: str,
    *,
    short: bool = False,
) -> Fix:
    """What a layout fixes about the identity operator: its splits, and no Partial state.

    Arguments and errors are those of `tensor_wants`.
    """
    asked = tensor_wants(spec, rule, rule.operands[0], shape, label, full_mesh, at, short=short)
    fix = assign_axes({want.factor: want.entry for want in asked}, full_mesh, label)
    used = {axis for axes in fix.exact.values() for axis in axes}
    rest = {axis: WHOLE for axis, size in full_mesh.axes if size > 1 and axis not in used}
    return replace(fix, roles=rest)


def _want(wanted: dict[str, Entry], want: Wanted, mesh: Mesh) -> None:
    """Record what is asked of one factor, unless something else was."""
    entry, known = want.entry, wanted.get(want.factor)
    if known is not None and known != entry:
        by_name = known.axes is not None and entry.axes is not None
        if by_name or known.pieces(mesh) != entry.pieces(mesh):
            raise HintError(
                f"{want.label}: split {entry}, but the same loop of the operator is split {known} "
                f"in {known.at}"
            )
    if known is None or known.axes is None:
        wanted[want.factor] = entry


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
                f"{listed(accepted)}, got {count}"
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
