"""What reshards cost: single steps, shortest paths, and whole matrices for the planner.

All layouts of a tensor form a graph whose edges are the steps of `reshard_steps`. A step's time
is a line over the bytes of the tensor, so a path's is too: shortest paths are searched once per
mesh, rank and pattern of divisible sizes, and a cost matrix is then two array look-ups.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from autopar.ir.errors import LayoutError
from autopar.ir.layout import REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.passes.collective_cost import NOTHING, Line, collective_line
from autopar.passes.device import Device
from autopar.passes.reshard_steps import Step, layouts, steps_from
from autopar.passes.shortest_paths import accumulate, shortest_paths

#: Paths are compared at these sizes in bytes; a tensor uses the one nearest to its own.
REFERENCE_BYTES = (2.0**16, 2.0**21, 2.0**26, 2.0**31)
#: Bytes taken per element when that size is chosen: a path does not depend on the dtype.
_NOMINAL_ITEMSIZE = 4

#: Path lengths are whole picoseconds (exact sums, real ties), and a step must earn a nanosecond:
#: of equally fast paths the one of fewer steps is the shorter.
_PICOSECONDS = 1e12
_STEP_PENALTY = 1000

#: For each dimension, which of the mesh's piece counts divide its size.
Divisibility = tuple[tuple[bool, ...], ...]


class StepLine(NamedTuple):
    """The time of a step, forward and backward, as lines over the bytes of the *whole* tensor."""

    forward: Line
    backward: Line


def step_line(step: Step, mesh: Mesh, device: Device) -> StepLine:
    """The price of a step of a tensor with gradient; without one only `forward` is paid."""
    before, after = _held(step.before, mesh), _held(step.after, mesh)
    return _line(step.kind, step.axes, step.state, before, after, mesh, device)


def _line(
    kind: str,
    axes: tuple[str, ...],
    state: str | None,
    before: float,
    after: float,
    mesh: Mesh,
    device: Device,
) -> StepLine:
    """The price of a step from the shares of the tensor a rank holds before and after it.

    Every operator that runs, collective or local, is also launched.
    """

    def collective(name: str) -> Line:
        # The tensor the group works on is the larger of the two, all-to-all's is in n pieces.
        group = mesh.axis_size(*axes) if name == "all_to_all" else 1
        line = collective_line(device, mesh, name, axes)
        return Line(device.launch + line.latency, line.per_byte * max(before, after) * group)

    def copy(share: float) -> Line:
        return Line(device.launch, share / device.memory_bandwidth)

    cut = copy(2 * min(before, after))  # read a piece, write it
    fill = copy(before + after)  # read a piece, write the whole
    keep = copy(after)  # write zeros; the one rank that keeps its value reads it too
    replicated = state == REPLICATE
    match kind:
        case "all_reduce":
            reduce = collective("all_reduce")
            return StepLine(reduce, reduce if replicated else NOTHING)
        case "all_gather":
            back = collective("reduce_scatter") if replicated else cut
            return StepLine(collective("all_gather"), back)
        case "reduce_scatter":
            return StepLine(collective("reduce_scatter"), collective("all_gather"))
        case "all_to_all":
            move = collective("all_to_all")
            return StepLine(move, move)
        case "slice":
            return StepLine(cut, fill if replicated else collective("all_gather"))
        case "pad":
            return StepLine(fill, cut)
        case "mask":
            return StepLine(keep, keep if replicated else NOTHING)
        case "to_replicate":
            return StepLine(NOTHING, collective("all_reduce"))
        case "to_invariant":
            return StepLine(NOTHING, keep)
    raise LayoutError(f"unknown reshard step {kind!r}")


def step_times(
    step: Step, nbytes: float, mesh: Mesh, device: Device, *, grad: bool
) -> tuple[float, float]:
    """Seconds of a step, forward and backward; `nbytes` is the size of the whole tensor."""
    line = step_line(step, mesh, device)
    return line.forward.at(nbytes), line.backward.at(nbytes) if grad else 0.0


def _held(layout: Layout, mesh: Mesh) -> float:
    """The share of the tensor that one rank holds."""
    return 1 / mesh.axis_size(*layout.split_axes)


class _StepGraph:
    """Every layout of a rank and every step between them, as arrays over edges."""

    def __init__(self, mesh: Mesh, device: Device, rank: int) -> None:
        self.layouts = tuple(layouts(mesh, rank))
        self.ids = {layout: i for i, layout in enumerate(self.layouts)}
        self.steps = [step for layout in self.layouts for step in steps_from(layout, mesh)]
        self.source = np.array([self.ids[s.before] for s in self.steps], dtype=np.intp)
        self.target = np.array([self.ids[s.after] for s in self.steps], dtype=np.intp)
        held = {layout: _held(layout, mesh) for layout in self.layouts}
        # Few prices are distinct, and looking one up hashes the whole device.
        price = cache(partial(_line, mesh=mesh, device=device))
        lines = [price(s.kind, s.axes, s.state, held[s.before], held[s.after]) for s in self.steps]
        # [edge, forward or backward, latency or per byte]
        self.lines = np.array(lines, dtype=np.float64).reshape(len(lines), 2, 2)
        self.has_replicate = np.array([bool(layout.replicate) for layout in self.layouts])


@cache
def _step_graph(mesh: Mesh, device: Device, rank: int) -> _StepGraph:
    return _StepGraph(mesh, device, rank)


class PathTable:
    """Cheapest paths between the layouts of one kind of tensor, found row by row on demand."""

    def __init__(
        self,
        mesh: Mesh,
        device: Device,
        divisibility: Divisibility,
        grad: bool,
        reference_bytes: float,
    ) -> None:
        self._graph = graph = _step_graph(mesh, device, len(divisibility))
        usable = np.array(
            [_divides(layout, divisibility, mesh) for layout in graph.layouts], dtype=bool
        )
        if not grad:
            usable &= ~graph.has_replicate
        kept = np.flatnonzero(usable[graph.source] & usable[graph.target])
        # Sorted by target for the search; stable, so that ties still go by the fixed order.
        self._edges = kept[np.argsort(graph.target[kept], kind="stable")]
        self._source = graph.source[self._edges]
        self._target = graph.target[self._edges]
        lines = graph.lines[self._edges]
        self._cost = lines.sum(axis=1) if grad else lines[:, 0]
        seconds = self._cost[:, 0] + self._cost[:, 1] * reference_bytes
        self._weights = np.rint(seconds * _PICOSECONDS).astype(np.int64) + _STEP_PENALTY
        # One row per source, filled when it is first asked for (memory is committed only then).
        count = len(graph.layouts)
        self._known = np.zeros(count, dtype=bool)
        self._latency, self._per_byte = np.empty((2, count, count))
        self._last = np.empty((count, count), dtype=np.intp)
        self._lock = threading.Lock()

    def ids(self, wanted: Sequence[Layout]) -> np.ndarray:
        """The numbers of layouts in this table; they depend on mesh and rank only."""
        try:
            return np.array([self._graph.ids[layout] for layout in wanted], dtype=np.intp)
        except KeyError as error:
            raise LayoutError(
                f"layout {error.args[0]}: not a layout of a tensor of this rank on this mesh"
            ) from None

    def costs(self, sources: np.ndarray, targets: np.ndarray, nbytes: float) -> np.ndarray:
        """Seconds [source, target]; infinite where a layout does not divide."""
        self._search(sources)
        chosen = np.ix_(sources, targets)
        return self._latency[chosen] + nbytes * self._per_byte[chosen]

    def path(self, source: int, target: int) -> tuple[Step, ...] | None:
        """The steps of the cheapest path, or None where there is none."""
        self._search(np.array([source]))
        steps: list[Step] = []
        while target != source:
            edge = self._last[source, target]
            if edge < 0:
                return None
            steps.append(self._graph.steps[self._edges[edge]])
            target = int(self._source[edge])
        return tuple(reversed(steps))

    def _search(self, sources: np.ndarray) -> None:
        """Fill the rows of the sources that were not asked for before."""
        if self._known[sources].all():
            return
        with self._lock:
            missing = np.unique(sources[~self._known[sources]])
            if not missing.size:  # another thread was faster
                return
            count = len(self._graph.layouts)
            last = shortest_paths(self._source, self._target, self._weights, count, missing)
            latency, per_byte = accumulate(self._source, last, self._cost)
            unreachable = last < 0
            unreachable[np.arange(len(missing)), missing] = False
            latency[unreachable] = np.inf
            self._latency[missing], self._per_byte[missing] = latency, per_byte
            self._last[missing] = last
            self._known[missing] = True


@cache
def _shared_table(
    mesh: Mesh, device: Device, divisibility: Divisibility, grad: bool, reference_bytes: float
) -> PathTable:
    return PathTable(mesh, device, divisibility, grad, reference_bytes)


def path_table(shape: Sequence[int], mesh: Mesh, device: Device, *, grad: bool) -> PathTable:
    """The table of cheapest paths for tensors of a shape; one table serves many shapes."""
    return _shared_table(
        mesh, device, _divisibility(tuple(shape), mesh), grad, _reference_bytes(math.prod(shape))
    )


def _reference_bytes(elements: int) -> float:
    size = math.log2(max(1, elements * _NOMINAL_ITEMSIZE))
    return min(REFERENCE_BYTES, key=lambda reference: abs(math.log2(reference) - size))


@cache
def _axis_subsets(mesh: Mesh) -> dict[frozenset[str], int]:
    """Every set of axes with its position in a `Divisibility` entry."""
    sets = itertools.chain.from_iterable(
        itertools.combinations(mesh.names, n) for n in range(len(mesh.names) + 1)
    )
    return {frozenset(axes): i for i, axes in enumerate(sets)}


def _divisibility(shape: tuple[int, ...], mesh: Mesh) -> Divisibility:
    counts = [mesh.axis_size(*axes) for axes in _axis_subsets(mesh)]
    return tuple(tuple(size % n == 0 for n in counts) for size in shape)


def _divides(layout: Layout, divisibility: Divisibility, mesh: Mesh) -> bool:
    position = _axis_subsets(mesh)
    return all(
        divides[position[frozenset(axes)]]
        for axes, divides in zip(layout.dims, divisibility, strict=True)
    )


class ReshardCosts:
    """Reshard costs of a mesh and device, as matrices over layouts.

    Consistent with `plan_reshard`: an entry is the sum of the prices of the steps it returns.
    """

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh = mesh
        self.device = device
        self._tables: dict[tuple[tuple[int, ...], bool], PathTable] = {}

    def matrix(
        self,
        src_layouts: Sequence[Layout],
        dst_layouts: Sequence[Layout],
        shape: Sequence[int],
        itemsize: int,
        grad: bool,
    ) -> np.ndarray:
        """Seconds, forward and backward together, of every reshard [source, destination].

        `shape` is the whole tensor's, `itemsize` in bytes. Without `grad` R is the same as I and
        nothing is paid backward. A layout whose pieces would be uneven costs infinity.
        """
        if not grad:
            src_layouts = [layout.without_gradient() for layout in src_layouts]
            dst_layouts = [layout.without_gradient() for layout in dst_layouts]
        table = self.table(tuple(shape), grad)
        nbytes = math.prod(shape) * itemsize
        return table.costs(table.ids(src_layouts), table.ids(dst_layouts), nbytes)

    def table(self, shape: tuple[int, ...], grad: bool) -> PathTable:
        """The paths behind `matrix`: for callers that keep layout numbers (`PathTable.ids`)."""
        key = (shape, grad)
        if key not in self._tables:
            self._tables[key] = path_table(shape, self.mesh, self.device, grad=grad)
        return self._tables[key]
