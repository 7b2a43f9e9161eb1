"""The single steps that change a layout, one runtime operator each.

=============== ==================== =========================== ===============================
kind            states               forward                     backward
=============== ==================== =========================== ===============================
all_reduce      P -> I, R            all-reduce                  nothing (I), all-reduce (R)
all_gather      S -> I, R            all-gather                  slice (I), reduce-scatter (R)
reduce_scatter  P -> S               reduce-scatter              all-gather
all_to_all      S(i) -> S(j)         all-to-all                  all-to-all
recut           S(i) -> S(i)         exchange of what differs    exchange of what differs
slice           I, R -> S            slice                       all-gather (I), pad (R)
pad             S -> P               zero-pad                    slice
mask            I, R -> P            zeros but on one rank       nothing (I), mask (R)
to_replicate    I -> R               nothing                     all-reduce
to_invariant    R -> I               nothing                     mask
=============== ==================== =========================== ===============================
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.errors import LayoutError
from autopar.ir.layout import INVARIANT, PARTIAL, REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.steps import moved


@dataclass(frozen=True)
class Step:
    """One change of layout.

    kind:
        the operator's name without ``autopar.``
    axes:
        the mesh axes it works on as one group, major first
    dim:
        the dimension it gathers, scatters, slices, pads or (all-to-all) takes apart
    dst_dim:
        the dimension an all-to-all splits
    state:
        what the axes become (all_reduce, all_gather: ``to``) or were (slice, mask: ``origin``),
        "I" or "R"
    unit:
        of the dimension that the axes enter (`autopar.ir.cut`)
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    dst_dim: int | None
    state: str | None
    before: Layout
    after: Layout
    unit: int = 1

    @property
    def op(self) -> str:
        """The name of the IR operator."""
        return f"autopar.{self.kind}"

    def __str__(self) -> str:
        where = "" if self.dim is None else f" dim {self.dim}"
        where += "" if self.dst_dim is None else f" to dim {self.dst_dim}"
        preposition = "from" if self.kind in ("slice", "mask") else "to"
        where += "" if self.state is None else f" {preposition} {self.state}"
        where += "" if self.unit == 1 else f" in units of {self.unit}"
        return f"{self.kind}[{','.join(self.axes)}]{where}"


def step_node_args(step: Step) -> tuple[Any, ...]:
    """The arguments of the step's IR node after the tensor itself.

    A pass writes ``Node(op=step.op, args=(value, *step_node_args(step)), results=(...,))``.
    """
    rest = (step.dim, step.dst_dim, step.state, step.unit if step.unit > 1 else None)
    return (step.axes, *(argument for argument in rest if argument is not None))


@dataclass(frozen=True)
class Cuts:
    """The units in which the dimensions of a tensor may be cut.

    shape:
        the whole tensor's
    units:
        for each dimension its units, 1 among them
    """

    shape: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]


def layouts(mesh: Mesh, rank: int, cuts: Cuts | None = None) -> Iterator[Layout]:
    """Every layout of a tensor of some rank, in a fixed order; without `cuts` in units of 1."""
    for layout in _plain_layouts(mesh, rank):
        if cuts is None:
            yield layout
            continue
        options = [u if axes else (1,) for axes, u in zip(layout.dims, cuts.units, strict=True)]
        for units in itertools.product(*options):
            cut = Layout.make(layout.dims, layout.replicate, layout.partial, units)
            if cut == cut.simplified(cuts.shape, mesh):
                yield cut


def _plain_layouts(mesh: Mesh, rank: int) -> Iterator[Layout]:
    states = (*range(rank), INVARIANT, REPLICATE, PARTIAL)
    for choice in itertools.product(states, repeat=len(mesh.names)):
        held = list(zip(mesh.names, choice, strict=True))
        replicate = [axis for axis, state in held if state == REPLICATE]
        partial = [axis for axis, state in held if state == PARTIAL]
        per_dim = [[axis for axis, state in held if state == d] for d in range(rank)]
        for orders in itertools.product(*(itertools.permutations(axes) for axes in per_dim)):
            yield Layout.make(orders, replicate, partial)


def steps_from(layout: Layout, mesh: Mesh, cuts: Cuts | None = None) -> Iterator[Step]:
    """Every step that can be taken from a layout, in a fixed order.

    Only the minor-most axes of a dimension can be gathered or moved, and new axes become its
    minor-most. Axes in the same state may move together. Without `cuts` sizes are not looked at.
    """
    partial = [axis for axis in mesh.names if axis in layout.partial]
    replicate = [axis for axis in mesh.names if axis in layout.replicate]
    used = layout.mentioned
    invariant = [axis for axis in mesh.names if axis not in used]

    def entered(axes: tuple[str, ...], src: int | None, dst: int) -> Iterator[tuple[Layout, int]]:
        """The layouts in which the axes have become the minor-most of `dst`, and its units."""
        if cuts is None:
            yield _moved(layout, axes, src, dst), 1
            return
        for unit in cuts.units[dst]:
            try:
                after = moved(layout, axes, dst, unit, cuts.shape, mesh)
            except LayoutError:
                continue
            if after.unit(dst) == unit:
                yield after, unit

    def left(axes: tuple[str, ...], src: int, to: str) -> Layout:
        if cuts is None:
            return _to(layout, axes, src, to)
        return moved(layout, axes, to, 1, cuts.shape, mesh)

    for axes in _subsets(partial):
        for to in (INVARIANT, REPLICATE):
            yield _whole("all_reduce", axes, to, to, layout)
    for axes in _subsets(invariant):
        yield _whole("to_replicate", axes, REPLICATE, None, layout)
    for axes in _subsets(replicate):
        yield _whole("to_invariant", axes, INVARIANT, None, layout)
    for axes in _sequences(partial):
        for dim in range(layout.rank):
            for after, unit in entered(axes, None, dim):
                yield Step("reduce_scatter", axes, dim, None, None, layout, after, unit)
    for origin, held in ((INVARIANT, invariant), (REPLICATE, replicate)):
        for axes in _sequences(held):
            for dim in range(layout.rank):
                for after, unit in entered(axes, None, dim):
                    yield Step("slice", axes, dim, None, origin, layout, after, unit)
    for dim, split in enumerate(layout.dims):
        for first in reversed(range(len(split))):
            axes = split[first:]
            for dst in range(layout.rank):
                for after, unit in entered(axes, dim, dst) if dst != dim else ():
                    yield Step("all_to_all", axes, dim, dst, None, layout, after, unit)
            for to in (INVARIANT, REPLICATE):
                after = left(axes, dim, to)
                yield Step("all_gather", axes, dim, None, to, layout, after)
            after = left(axes, dim, PARTIAL)
            yield Step("pad", axes, dim, None, None, layout, after)
        for after, unit in entered(split, dim, dim) if split and cuts is not None else ():
            if after != layout:
                yield Step("recut", split, dim, None, None, layout, after, unit)
    for origin, held in ((INVARIANT, invariant), (REPLICATE, replicate)):
        for axes in _subsets(held):
            yield _whole("mask", axes, PARTIAL, origin, layout)


def _whole(kind: str, axes: tuple[str, ...], to: str, state: str | None, layout: Layout) -> Step:
    """A step between I, R and P."""
    return Step(kind, axes, None, None, state, layout, _to(layout, axes, None, to))


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(
        itertools.combinations(axes, n) for n in range(1, len(axes) + 1)
    )


def _sequences(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(
        itertools.permutations(axes, n) for n in range(1, len(axes) + 1)
    )


def _moved(layout: Layout, axes: tuple[str, ...], src: int | None, dst: int) -> Layout:
    """The axes leave dimension `src` (or I, R, P) and become the minor-most of `dst`."""
    base = _to(layout, axes, src, INVARIANT)
    dims = list(base.dims)
    dims[dst] += axes
    return Layout(tuple(dims), base.replicate, base.partial)


def _to(layout: Layout, axes: tuple[str, ...], src: int | None, to: str) -> Layout:
    """The axes leave dimension `src` (or I, R, P) and take the state `to` ("I", "R", "P")."""
    dims = list(layout.dims)
    if src is not None:
        dims[src] = dims[src][: -len(axes)]
    replicate = [axis for axis in layout.replicate if axis not in axes]
    partial = [axis for axis in layout.partial if axis not in axes]
    if to == REPLICATE:
        replicate = sorted((*replicate, *axes))
    elif to == PARTIAL:
        partial = sorted((*partial, *axes))
    if not layout.units:
        return Layout(tuple(dims), tuple(replicate), tuple(partial))
    return Layout.make(dims, replicate, partial, layout.units)
