"""Parameters that are whole along data axes, stored in shards there: ZeRO as layouts.

before::    %w : f32[8, 4] grad = param "w"                       used as rep(dp)
after::     %w : f32[8@dp, 4] grad = param "w"

The data axes of a parameter are those along which it is the same on every rank and its gradient is
a sum of the ranks' terms. Stored in shards along them, it is gathered for use, its gradient is
scattered instead of reduced, and the optimizer updates one shard. Strategies stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Node
from autopar.ir.keep import moves
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import is_parameter_cast
from autopar.ir.rule import Strategy
from autopar.passes.overlap import settle
from autopar.passes.search import Searched
from autopar.passes.source_layouts import stored_layouts


@dataclass(frozen=True)
class Sharded:
    """A searched assignment whose parameters are stored in shards.

    shards:
        the parameters (dotted names) that are now split along more axes
    whole:
        those that stay whole along a data axis: no dimension of theirs can be cut there
    axes:
        the data axes that were found
    """

    searched: Searched
    shards: tuple[str, ...]
    whole: tuple[str, ...]
    axes: tuple[str, ...]


def store_in_shards(
    graph: Graph,
    partitioned: Graph,
    searched: Searched,
    again: Callable[[Mapping[str, Layout]], Searched],
) -> Sharded:
    """Store what data parallelism keeps whole in shards, and price that.

    graph, partitioned:
        the traced graph, and what the searched assignment makes of it, before buckets
    again:
        searches with given layouts of parameters (by dotted name), where the problem that was
        solved did not have them among its choices
    """
    assignment = searched.assignment
    sources, shards, whole = dict(assignment.sources), [], []
    found: set[str] = set()
    axes_of = data_axes(partitioned)
    for node in graph.sources("param"):
        axes = axes_of.get(node.name, ())
        if not axes:
            continue
        found.update(axes)
        layout = _shard(node, sources[node.name], axes, assignment.mesh)
        if layout is None:
            whole.append(node.target)
        else:
            sources[node.name] = layout
            shards.append(node.target)
    if shards:
        searched = _priced(graph, searched, sources, again)
    axes = tuple(axis for axis in assignment.mesh.names if axis in found)
    return Sharded(searched, tuple(shards), tuple(whole), axes)


def _priced(
    graph: Graph,
    searched: Searched,
    sources: dict[str, Layout],
    again: Callable[[Mapping[str, Layout]], Searched],
) -> Searched:
    built = searched.built
    known = all(sources[name] in options for name, (_, options) in built.sources.items())
    if not known:
        return again({node.target: sources[node.name] for node in graph.sources("param")})
    strategies = _casts_in_shards(graph, searched, sources)
    made = replace(searched.assignment, sources=sources, strategies=strategies)
    solution = replace(searched.solution, choice=built.choice(made))
    settled = settle(built.problem, built.parts, solution, searched.hiding.weight)
    return replace(searched, assignment=made, solution=settled.solution, hiding=settled.hiding)


def _casts_in_shards(
    graph: Graph, searched: Searched, sources: Mapping[str, Layout]
) -> dict[str, Strategy]:
    """The strategies with parameters cast as they are stored, so that what is gathered is cast."""
    built, assignment = searched.built, searched.assignment
    found = dict(assignment.strategies)
    for node in graph.calls:
        if not is_parameter_cast(node) or node.operands[0].name in assignment.relays:
            continue
        index, strategies = built.strategies[node.name]
        stored = sources[node.operands[0].name]
        for strategy, layout in zip(strategies, built.choices[index].operands[0], strict=True):
            if layout == stored:
                found[node.name] = strategy
                break
    return found


def data_axes(partitioned: Graph) -> Mapping[str, tuple[str, ...]]:
    """Parameter node -> the axes along which its gradient is summed and it is stored whole."""
    root = {node.name: node.name for node in partitioned.sources("param")}
    found: dict[str, set[str]] = {}
    for node in partitioned.calls:
        if not moves(node) or node.operands[0].name not in root:
            continue
        (value,) = node.results
        root[value.name] = parameter = root[node.operands[0].name]
        stored = partitioned.value(parameter).layout
        if node.op == "autopar.to_replicate" and stored is not None:
            summed = {axis for axis in node.args[1] if axis not in stored.split_axes}
            found.setdefault(parameter, set()).update(summed)
    mesh = partitioned.mesh
    assert mesh is not None
    return {name: _ordered(axes, mesh) for name, axes in found.items() if axes}


def _ordered(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    chosen = set(axes)
    return tuple(axis for axis in mesh.names if axis in chosen)


def _shard(node: Node, stored: Layout, axes: Sequence[str], mesh: Mesh) -> Layout | None:
    """The stored layout split along the axes as well; along fewer where that is not possible."""
    (value,) = node.results
    options = stored_layouts(value.shape, mesh)
    for wanted in (tuple(axes), *((axis,) for axis in axes if len(axes) > 1)):
        fitting = []
        for option in options:
            rest = [tuple(a for a in dim if a not in wanted) for dim in option.dims]
            own = [dim for dim, r in zip(option.dims, rest, strict=True) if dim != r]
            added = sum(len(dim) for dim in option.dims) - sum(len(r) for r in rest)
            # In a dimension that is cut already a data axis would not be the first to be gathered.
            alone = all(set(dim) <= set(wanted) for dim in own)
            if rest == [tuple(dim) for dim in stored.dims] and added == len(wanted) and alone:
                fitting.append(option)
        if fitting:
            return min(
                fitting,
                key=lambda o: (not o.divides(value.shape, mesh), sum(map(bool, o.dims))),
            )
    return None
