"""What reshards cost: shortest paths over single steps, and whole matrices for the planner.

All layouts of a tensor form a graph whose edges are the steps of `steps`. A step's time
is a line over the bytes of the tensor, so a path's is too: shortest paths are searched once per
mesh, rank and pattern of cuts, and a cost matrix is then two array look-ups. Sizes that the mesh
divides share their pattern; one that it does not divide has its own, with the largest pieces.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Hashable, Iterable, Sequence
from functools import cache, cached_property, lru_cache, partial

import numpy as np

from autopar.ir.cut import is_even, is_offered, largest
from autopar.ir.errors import LayoutError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.device import Device
from autopar.passes.fetch_cost import in_buckets
from autopar.passes.reshard.price import even_share, line_of, step_line
from autopar.passes.reshard.shortest_paths import accumulate, shortest_paths
from autopar.passes.reshard.steps import Cuts, Step, layouts, steps_from

#: Paths are compared at these sizes in bytes; a tensor uses the one nearest to its own.
REFERENCE_BYTES = (2.0**16, 2.0**21, 2.0**26, 2.0**31)
#: Bytes taken per element when that size is chosen: a path does not depend on the dtype.
_NOMINAL_ITEMSIZE = 4

#: Path lengths are whole picoseconds (exact sums, real ties), and a step must earn a nanosecond:
#: of equally fast paths the one of fewer steps is the shorter.
_PICOSECONDS = 1e12
_STEP_PENALTY = 1000

#: For each dimension and each way in which axes may cut it (`_axis_orders`), how many times an even
#: piece the largest one is; None where that cut is not to be used.
Pattern = tuple[tuple[float | None, ...], ...]

#: A cut that is to be used though no search considers it: dimension, axes, unit.
Extra = tuple[int, tuple[str, ...], int]


class _StepGraph:
    """Every layout of a rank and every step between them, as arrays over edges.

    Without `cuts` pieces are in units of one element, and prices those of even pieces; with them
    all is that of one shape.
    """

    def __init__(self, mesh: Mesh, device: Device, rank: int, cuts: Cuts | None = None) -> None:
        self.layouts = tuple(layouts(mesh, rank, cuts))
        self.ids = {layout: i for i, layout in enumerate(self.layouts)}
        self.steps = [
            step
            for layout in self.layouts
            for step in steps_from(layout, mesh, cuts)
            if cuts is None or step.after in self.ids
        ]
        self.source = np.array([self.ids[s.before] for s in self.steps], dtype=np.intp)
        self.target = np.array([self.ids[s.after] for s in self.steps], dtype=np.intp)
        # Few prices are distinct, and looking one up hashes the whole device.
        self._price = cache(partial(line_of, mesh=mesh, device=device))
        self.even = np.array([even_share(layout, mesh) for layout in self.layouts])
        if cuts is None:
            self.lines = self.priced(range(len(self.steps)), self.even)
        else:
            lines = [step_line(step, mesh, device, cuts.shape) for step in self.steps]
            self.lines = np.array(lines, dtype=np.float64).reshape(len(lines), 2, 2)
        self.has_replicate = np.array([bool(layout.replicate) for layout in self.layouts])

    @cached_property
    def alike(self) -> tuple[tuple[Step, np.ndarray], ...]:
        """A step of each kind, and the numbers of all of that kind and dimensions."""
        numbers: dict[Hashable, list[int]] = {}
        for number, step in enumerate(self.steps):
            kind = step.kind, step.dim, step.dst_dim, step.state
            numbers.setdefault(kind, []).append(number)
        return tuple((self.steps[found[0]], np.array(found)) for found in numbers.values())

    def priced(self, edges: Iterable[int], held: np.ndarray, *, padded: bool = False) -> np.ndarray:
        """[edge, forward or backward, latency or per byte], from the share of each layout."""
        shares = held.tolist()
        lines = [
            self._price(
                s.kind, s.axes, s.state, shares[self.source[e]], shares[self.target[e]],
                padded=padded,
            )
            for e in edges
            for s in (self.steps[e],)
        ]  # fmt: skip
        return np.array(lines, dtype=np.float64).reshape(len(lines), 2, 2)


@cache
def _step_graph(mesh: Mesh, device: Device, rank: int) -> _StepGraph:
    return _StepGraph(mesh, device, rank)


@lru_cache(maxsize=256)
def _unit_graph(mesh: Mesh, device: Device, cuts: Cuts) -> _StepGraph:
    return _StepGraph(mesh, device, len(cuts.shape), cuts)


class PathTable:
    """Cheapest paths between the layouts of one kind of tensor, found row by row on demand."""

    def __init__(
        self,
        graph: _StepGraph,
        usable: np.ndarray,
        lines: np.ndarray,
        grad: bool,
        nbytes: float,
        sent: np.ndarray | None = None,
        hidden: float = 0.0,
    ) -> None:
        """`usable`: which layouts [layout]; `lines` [edge]; paths are compared at `nbytes`.

        `sent`: what of the lines are collectives of a parameter's gradient [edge, 2], of which
        the share `hidden` does not count where paths are compared.
        """
        self._graph = graph
        self._usable: list[bool] = usable.tolist()
        if not grad:
            usable = usable & ~graph.has_replicate
        kept = np.flatnonzero(usable[graph.source] & usable[graph.target])
        # Sorted by target for the search; stable, so that ties still go by the fixed order.
        self._edges = kept[np.argsort(graph.target[kept], kind="stable")]
        self._source = graph.source[self._edges]
        self._target = graph.target[self._edges]
        lines = lines[self._edges]
        self._cost = lines.sum(axis=1) if grad else lines[:, 0]
        self._sent = (np.zeros((len(graph.steps), 2)) if sent is None else sent)[self._edges]
        compared = self._cost - hidden * self._sent
        seconds = compared[:, 0] + compared[:, 1] * nbytes
        self._weights = np.rint(seconds * _PICOSECONDS).astype(np.int64) + _STEP_PENALTY
        # One row per source, filled when it is first asked for (memory is committed only then).
        count = len(graph.layouts)
        self._known = np.zeros(count, dtype=bool)
        self._latency, self._per_byte = np.empty((2, count, count))
        self._last = np.empty((count, count), dtype=np.intp)
        self._lock = threading.Lock()

    def knows(self, wanted: Iterable[Layout]) -> bool:
        """Whether the table has paths between some layouts (those of another rank aside)."""
        ids = self._graph.ids
        rank = self._graph.layouts[0].rank
        return all(
            self._usable[ids[layout]] if layout in ids else layout.rank != rank for layout in wanted
        )

    def ids(self, wanted: Sequence[Layout]) -> np.ndarray:
        """The numbers of layouts in this table."""
        try:
            return np.array([self._graph.ids[layout] for layout in wanted], dtype=np.intp)
        except KeyError as error:
            raise LayoutError(
                f"layout {error.args[0]}: not a layout of a tensor of this rank on this mesh"
            ) from None

    def costs(self, sources: np.ndarray, targets: np.ndarray, nbytes: float) -> np.ndarray:
        """Seconds [source, target]; infinite where there is no path."""
        self._search(sources)
        chosen = np.ix_(sources, targets)
        return self._latency[chosen] + nbytes * self._per_byte[chosen]

    def sent(self, sources: np.ndarray, targets: np.ndarray, nbytes: float) -> np.ndarray:
        """What of `costs` are collectives of a parameter's gradient [source, target]."""
        self._search(sources)
        latency, per_byte = accumulate(self._source, self._last[sources], self._sent)[:, :, targets]
        return latency + nbytes * per_byte

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

    def last_steps(self, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last step of the cheapest path from each source to its target, and its start.

        Both are int [pair]: the step's number in `steps`, and the layout it starts from; -1
        where no step is taken.
        """
        self._search(sources)
        last = self._last[sources, targets]
        if not len(self._edges):
            return last, last
        reached = last >= 0
        return np.where(reached, self._edges[last], -1), np.where(reached, self._source[last], -1)

    @property
    def steps(self) -> Sequence[Step]:
        """Every step between layouts of this rank, whatever its size."""
        return self._graph.steps

    @property
    def alike(self) -> tuple[tuple[Step, np.ndarray], ...]:
        """A step of each kind, and the numbers of all of that kind and dimensions."""
        return self._graph.alike

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The layouts, by number, before and after each step [step]."""
        return self._graph.source, self._graph.target

    @property
    def layouts(self) -> Sequence[Layout]:
        """Every layout of this rank, by number."""
        return self._graph.layouts

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


def path_table(
    shape: Sequence[int],
    mesh: Mesh,
    device: Device,
    *,
    grad: bool,
    between: Iterable[Layout] = (),
    fetched: bool = False,
) -> PathTable:
    """The table of cheapest paths for tensors of a shape; one table serves many shapes.

    fetched:
        whether the tensor is a parameter that comes into the graph (`fetch_cost`)
    between:
        layouts that the table must know. It knows all that a search considers by itself, but not
        those which a hint asked for, nor those in units of more than one element
    """
    sizes, nbytes = tuple(shape), _reference_bytes(math.prod(shape))
    plain = _fetch_table if fetched and grad else _plain_table
    table = plain(mesh, device, _pattern(sizes, mesh, frozenset()), grad, nbytes)
    if table.knows(between):
        return table
    extra = _extra(sizes, mesh, between)
    if all(unit == 1 for *_, unit in extra):
        return plain(mesh, device, _pattern(sizes, mesh, extra), grad, nbytes)
    return _unit_table(mesh, device, sizes, extra, grad, nbytes)


@cache
def _plain_table(
    mesh: Mesh, device: Device, pattern: Pattern, grad: bool, nbytes: float
) -> PathTable:
    graph = _step_graph(mesh, device, len(pattern))
    times, lines = _plain_lines(graph, mesh, pattern)
    return PathTable(graph, times > 0, lines, grad, nbytes)


@cache
def _fetch_table(
    mesh: Mesh, device: Device, pattern: Pattern, grad: bool, nbytes: float
) -> PathTable:
    graph = _step_graph(mesh, device, len(pattern))
    times, lines = _plain_lines(graph, mesh, pattern)
    held = np.where(times == 1, graph.even, 0.0)
    ends = np.stack([held[graph.source], held[graph.target]], axis=1)
    lines, sent = in_buckets(graph.steps, lines, ends, mesh, device, nbytes)
    return PathTable(graph, times > 0, lines, grad, nbytes, sent, device.overlap)


def _plain_lines(graph: _StepGraph, mesh: Mesh, pattern: Pattern) -> tuple[np.ndarray, np.ndarray]:
    """How many times an even piece the largest of each layout is, and the price of each step."""
    times = np.array([_times_even(layout, pattern, mesh) for layout in graph.layouts])
    usable = times > 0
    if not (times[usable] != 1).any():
        return times, graph.lines
    edges = np.flatnonzero(usable[graph.source] & usable[graph.target])
    lines = np.zeros_like(graph.lines)
    lines[edges] = graph.priced(edges.tolist(), graph.even * times, padded=True)
    return times, lines


@lru_cache(maxsize=256)
def _unit_table(
    mesh: Mesh,
    device: Device,
    shape: tuple[int, ...],
    extra: frozenset[Extra],
    grad: bool,
    nbytes: float,
) -> PathTable:
    units = [{1} for _ in shape]
    for dim, _, unit in extra:
        units[dim].add(unit)
    cuts = Cuts(shape, tuple(tuple(sorted(found)) for found in units))
    graph = _unit_graph(mesh, device, cuts)

    def known(layout: Layout) -> bool:
        return all(
            not axes
            or (d, axes, layout.unit(d)) in extra
            or is_offered(shape[d], mesh.sizes_of(axes), layout.unit(d))
            for d, axes in enumerate(layout.dims)
        )

    usable = np.array([known(layout) for layout in graph.layouts], dtype=bool)
    return PathTable(graph, usable, graph.lines, grad, nbytes)


def _reference_bytes(elements: int) -> float:
    size = math.log2(max(1, elements * _NOMINAL_ITEMSIZE))
    return min(REFERENCE_BYTES, key=lambda reference: abs(math.log2(reference) - size))


@cache
def _axis_orders(mesh: Mesh) -> dict[tuple[str, ...], int]:
    """Every order of every set of axes, with its position in an entry of a `Pattern`."""
    orders = itertools.chain.from_iterable(
        itertools.permutations(mesh.names, n) for n in range(len(mesh.names) + 1)
    )
    return {axes: i for i, axes in enumerate(orders)}


def _extra(shape: tuple[int, ...], mesh: Mesh, between: Iterable[Layout]) -> frozenset[Extra]:
    """The cuts of some layouts that no search considers, or that are in larger units."""
    found = set()
    for layout in between:
        if len(shape) != layout.rank:
            continue  # the table refuses it
        for d, axes in enumerate(layout.dims):
            unit = layout.unit(d)
            if axes and (unit > 1 or not is_offered(shape[d], mesh.sizes_of(axes))):
                found.add((d, axes, unit))
    return frozenset(found)


def _pattern(shape: tuple[int, ...], mesh: Mesh, extra: frozenset[Extra]) -> Pattern:
    asked: list[list[tuple[str, ...]]] = [[] for _ in shape]
    for dim, axes, _ in sorted(extra):
        asked[dim].append(axes)
    return tuple(
        _pattern_of(size, mesh, tuple(more)) for size, more in zip(shape, asked, strict=True)
    )


@lru_cache(maxsize=4096)
def _pattern_of(
    size: int, mesh: Mesh, asked: tuple[tuple[str, ...], ...]
) -> tuple[float | None, ...]:
    found: list[float | None] = []
    for axes in _axis_orders(mesh):
        counts = mesh.sizes_of(axes)
        if is_even(size, counts):
            found.append(1.0)
        elif axes in asked or is_offered(size, counts):
            found.append(largest(size, counts) * math.prod(counts) / size)
        else:
            found.append(None)
    return tuple(found)


def _times_even(layout: Layout, pattern: Pattern, mesh: Mesh) -> float:
    """How many times an even piece the largest one is; 0 where some cut is not to be used."""
    position = _axis_orders(mesh)
    times = 1.0
    for axes, entry in zip(layout.dims, pattern, strict=True):
        times *= entry[position[axes]] or 0.0
    return times


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
        nothing is paid backward.
        """
        if not grad:
            src_layouts = [layout.without_gradient() for layout in src_layouts]
            dst_layouts = [layout.without_gradient() for layout in dst_layouts]
        table, both = self._table(tuple(shape), grad), (*src_layouts, *dst_layouts)
        if not table.knows(both):
            table = path_table(shape, self.mesh, self.device, grad=grad, between=both)
        nbytes = math.prod(shape) * itemsize
        return table.costs(table.ids(src_layouts), table.ids(dst_layouts), nbytes)

    def fetch(
        self,
        src_layouts: Sequence[Layout],
        dst_layouts: Sequence[Layout],
        shape: Sequence[int],
        itemsize: int,
        grad: bool,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """As `matrix`, for a parameter that comes into the graph; and what of it are collectives
        that bring its gradient back, None for nothing."""
        if not grad:
            return self.matrix(src_layouts, dst_layouts, shape, itemsize, grad), None
        both = (*src_layouts, *dst_layouts)
        table = path_table(shape, self.mesh, self.device, grad=True, between=both, fetched=True)
        sources, targets = table.ids(src_layouts), table.ids(dst_layouts)
        nbytes = math.prod(shape) * itemsize
        sent = table.sent(sources, targets, nbytes)
        return table.costs(sources, targets, nbytes), sent if sent.any() else None

    def _table(self, shape: tuple[int, ...], grad: bool) -> PathTable:
        key = (shape, grad)
        if key not in self._tables:
            self._tables[key] = path_table(shape, self.mesh, self.device, grad=grad)
        return self._tables[key]
