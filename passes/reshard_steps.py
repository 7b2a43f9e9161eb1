"""The single steps that change a layout, one runtime operator each.

=============== ==================== =========================== ===============================
kind            states               forward                     backward
=============== ==================== =========================== ===============================
all_reduce      P -> I, R            all-reduce                  nothing (I), all-reduce (R)
all_gather      S -> I, R            all-gather                  slice (I), reduce-scatter (R)
reduce_scatter  P -> S               reduce-scatter              all-gather
all_to_all      S(i) -> S(j)         all-to-all                  all-to-all
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

from autopar.ir.layout import INVARIANT, PARTIAL, REPLICATE, Layout
from autopar.ir.mesh import Mesh


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
    """

    kind: str
    axes: tuple[str, ...]
    dim: int | None
    dst_dim: int | None
    state: str | None
    before: Layout
    after: Layout

    @property
    def op(self) -> str:
        """The name of the IR operator."""
        return f"autopar.{self.kind}"

    def __str__(self) -> str:
        where = "" if self.dim is None else f" dim {self.dim}"
        where += "" if self.dst_dim is None else f" to dim {self.dst_dim}"
        preposition = "from" if self.kind in ("slice", "mask") else "to"
        where += "" if self.state is None else f" {preposition} {self.state}"
        return f"{self.kind}[{','.join(self.axes)}]{where}"


def step_node_args(step: Step) -> tuple[Any, ...]:
    """The arguments of the step's IR node after the tensor itself.

    A pass writes ``Node(op=step.op, args=(value, *step_node_args(step)), results=(...,))``.
    """
    rest = (step.dim, step.dst_dim, step.state)
    return (step.axes, *(argument for argument in rest if argument is not None))


def layouts(mesh: Mesh, rank: int) -> Iterator[Layout]:
    """Every layout of a tensor of some rank, in a fixed order."""
    states = (*range(rank), INVARIANT, REPLICATE, PARTIAL)
    for choice in itertools.product(states, repeat=len(mesh.names)):
        held = list(zip(mesh.names, choice, strict=True))
        replicate = [axis for axis, state in held if state == REPLICATE]
        partial = [axis for axis, state in held if state == PARTIAL]
        per_dim = [[axis for axis, state in held if state == d] for d in range(rank)]
        for orders in itertools.product(*(itertools.permutations(axes) for axes in per_dim)):
            yield Layout.make(orders, replicate, partial)


def steps_from(layout: Layout, mesh: Mesh) -> Iterator[Step]:
    """Every step that can be taken from a layout, in a fixed order.

    Only the minor-most axes of a dimension can be gathered or moved, and new axes become its
    minor-most. Axes in the same state may move together. Sizes are not looked at.
    """
    partial = [axis for axis in mesh.names if axis in layout.partial]
    replicate = [axis for axis in mesh.names if axis in layout.replicate]
    used = layout.mentioned
    invariant = [axis for axis in mesh.names if axis not in used]

    for axes in _subsets(partial):
        for to in (INVARIANT, REPLICATE):
            yield _whole("all_reduce", axes, to, to, layout)
    for axes in _subsets(invariant):
        yield _whole("to_replicate", axes, REPLICATE, None, layout)
    for axes in _subsets(replicate):
        yield _whole("to_invariant", axes, INVARIANT, None, layout)
    for axes in _sequences(partial):
        for dim in range(layout.rank):
            after = _moved(layout, axes, None, dim)
            yield Step("reduce_scatter", axes, dim, None, None, layout, after)
    for origin, held in ((INVARIANT, invariant), (REPLICATE, replicate)):
        for axes in _sequences(held):
            for dim in range(layout.rank):
                after = _moved(layout, axes, None, dim)
                yield Step("slice", axes, dim, None, origin, layout, after)
    for dim, split in enumerate(layout.dims):
        for first in reversed(range(len(split))):
            axes = split[first:]
            for dst in range(layout.rank):
                if dst != dim:
                    after = _moved(layout, axes, dim, dst)
                    yield Step("all_to_all", axes, dim, dst, None, layout, after)
            for to in (INVARIANT, REPLICATE):
                yield Step("all_gather", axes, dim, None, to, layout, _to(layout, axes, dim, to))
            yield Step("pad", axes, dim, None, None, layout, _to(layout, axes, dim, PARTIAL))
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
    return Layout(tuple(dims), tuple(replicate), tuple(partial))
