"""The call that one rank makes, where ranks hold pieces of different shapes.

A partitioned graph is the same on every rank. Where pieces are uneven, what a rank passes to an
operator depends on where the rank stands in the mesh::

    %y : f32[7@dp, 768] = aten.view.default(%x, [4, 768]) {local=((1, 0),)}
    %z : f32[7, 768]    = autopar.all_gather(%y, ("dp",), 0, "I")

The second of two ranks runs ``view(x, [3, 768])`` and ``all_gather(y, ("dp",), 0, "I",
sizes=(4, 3))``. The arguments in the graph are those of the first rank, whose pieces are the
largest. `Node.attrs["local"]` says which of them are sizes: pairs of an argument (a position or a
keyword) and the result whose local shape it spells, or triples of an argument, the whole size and
the axes of the factor whose local size it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.cut import piece_sizes, span
from autopar.ir.fused import FUSED, layouts_through
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import with_reduction
from autopar.ir.steps import STEPS

#: The key of `Node.attrs` that names the arguments which spell local sizes.
LOCAL = "local"


def is_uniform(graph: Graph) -> bool:
    """Whether every rank makes the same calls: nothing in the graph is cut unevenly."""
    mesh = graph.mesh
    return mesh is None or all(
        value.layout is None or value.layout.divides(value.shape, mesh)
        for node in graph.nodes
        for value in node.results
    )


def rank_call(node: Node, mesh: Mesh, coordinates: Mapping[str, int]) -> Node:
    """The node as the rank at `coordinates` runs it: sizes, and the pieces that a step moves."""
    if node.op in STEPS:
        return with_reduction(_step_call(node, mesh, coordinates))
    if node.op == FUSED:
        return with_reduction(_fused_call(node, mesh, coordinates))
    if LOCAL not in node.attrs:
        return node
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument, *what in node.attrs[LOCAL]:
        where: Any = args if isinstance(argument, int) else kwargs
        where[argument] = _spelled(node, what, mesh, coordinates)
    attrs = {key: item for key, item in node.attrs.items() if key != LOCAL}
    return replace(node, args=tuple(args), kwargs=kwargs, attrs=attrs)


def is_empty(node: Node, mesh: Mesh, coordinates: Mapping[str, int]) -> bool:
    """Whether a call has nothing to do on a rank, because what it makes is empty there.

    The compiler's own operators are called all the same: other ranks may wait for this one.
    """
    return not node.op.startswith("autopar.") and any(
        0 not in value.shape and 0 in _layout(value).local_shape(value.shape, mesh, coordinates)
        for value in node.results
        if node.operands
    )


def _spelled(
    node: Node, what: list[Any], mesh: Mesh, coordinates: Mapping[str, int]
) -> int | list[int]:
    """One number or shape that an argument spells."""
    if len(what) == 1:
        value = node.results[what[0]]
        return list(_layout(value).local_shape(value.shape, mesh, coordinates))
    size, axes = what
    start, stop = span(size, mesh.sizes_of(axes), [coordinates[a] for a in axes])
    return stop - start


#: Step -> its positional arguments but for the unit, and the dimension whose axes leave and the
#: one which axes enter, as positions of arguments; with the keywords for the sizes of the pieces.
_PIECES: dict[str, tuple[int, tuple[int, str] | None, tuple[int, str] | None]] = {
    "autopar.all_gather": (4, (2, "sizes"), None),
    "autopar.all_to_all": (4, (2, "src_sizes"), (3, "dst_sizes")),
    "autopar.pad": (3, (2, "sizes"), None),
    "autopar.recut": (3, (2, "before"), (2, "after")),
    "autopar.reduce_scatter": (3, None, (2, "sizes")),
    "autopar.slice": (4, None, (2, "sizes")),
}


def _step_call(node: Node, mesh: Mesh, coordinates: Mapping[str, int]) -> Node:
    if node.op not in _PIECES:
        return node
    count, leave, enter = _PIECES[node.op]
    (before,), (after,) = node.operands, node.results
    axes = node.args[1]
    sizes = {}
    for where, value in ((leave, before), (enter, after)):
        if where is not None:
            position, keyword = where
            sizes[keyword] = _group_pieces(value, node.args[position], axes, mesh, coordinates)
    if node.op != "autopar.recut" and all(len(set(pieces)) == 1 for pieces in sizes.values()):
        sizes = {}
    return replace(node, args=node.args[:count], kwargs={**node.kwargs, **sizes})


def _fused_call(node: Node, mesh: Mesh, coordinates: Mapping[str, int]) -> Node:
    """A bucket as one rank runs it: sizes of uneven pieces are the last argument of their step."""
    values, steps = node.args
    ways = [layouts_through(node, mesh, k) for k in range(len(values))]
    spelled = []
    for i, (op, axes, arguments) in enumerate(steps):
        given = []
        for value, way, mine in zip(values, ways, arguments, strict=True):
            before, after = (replace(value, layout=layout) for layout in way[i : i + 2])
            step = Node(op, (before, axes, *mine), results=(after,))
            call = _step_call(step, mesh, coordinates)
            given.append((*call.args[2:], *call.kwargs.values()))
        spelled.append((op, axes, tuple(given)))
    return replace(node, args=(values, tuple(spelled)))


def _group_pieces(
    value: Value, dim: int, axes: tuple[str, ...], mesh: Mesh, coordinates: Mapping[str, int]
) -> tuple[int, ...]:
    """The sizes, along a dimension, of what the ranks of a group hold, in their order.

    `axes` are the minor-most of the dimension; the others decide which stretch the group shares.
    """
    layout = _layout(value)
    unit, majors = layout.unit(dim), layout.dims[dim][: -len(axes)]
    at = [coordinates[axis] for axis in majors]
    start, stop = span(value.shape[dim], mesh.sizes_of(majors), at, unit)
    return piece_sizes(stop - start, mesh.sizes_of(axes), unit)


def _layout(value: Value) -> Layout:
    assert value.layout is not None, f"{value.name} has no layout: the graph is not partitioned"
    return value.layout
