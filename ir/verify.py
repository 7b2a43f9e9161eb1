"""The legality of the IR, as code: `verify_graph` runs after every pass.

The failing node is shown between its neighbours::

    value %e: layout [@pp, -] names the mesh axis 'pp', the mesh is {dp=2, tp=4}
          %w  : f32[64, 8] grad = param "wte.weight"
      --> %e  : f32[8@pp, 8]    = aten.embedding.default(%w, %ids)
          %e1 : f32[8, 8]       = aten.relu.default(%e)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from autopar.ir.errors import GraphError, LayoutError
from autopar.ir.fused import FUSED, dtype_after, layouts_through, steps_of
from autopar.ir.graph import Graph, Node, Value, values_in
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.steps import STEPS, step_layout
from autopar.ir.text import VALUE_NAME, format_literal, format_nodes, format_update, has_text

Stage = Literal["traced", "planned", "partitioned"]


def verify_graph(graph: Graph, *, stage: Stage) -> None:
    """Raise GraphError at the first rule of the IR that the graph breaks.

    stage:
        ``"traced"``: values have no layouts yet. ``"planned"``: every value has one.
        ``"partitioned"``: each reshard step also starts and ends where it says, and what enters,
        leaves or stays (inputs, parameters, outputs, updates) is split or Invariant.
    """
    defined: dict[str, Value] = {}
    targets: set[tuple[str, str]] = set()
    # Layouts that were looked at, with the rest of what they depend on: few are distinct.
    legal: set[tuple[Layout, tuple[int, ...], bool]] = set()
    for index, node in enumerate(graph.nodes):
        try:
            _check_form(node)
            _check_operands(node, defined)
            _check_results(node, defined)
            if node.is_source:
                if (node.op, node.target) in targets:
                    raise GraphError(f"{node.op} {node.target!r}: it is in the graph twice")
                targets.add((node.op, node.target))
            _check_layouts(node, graph.mesh, stage, legal)
            if stage == "partitioned":
                assert graph.mesh is not None
                _check_partitioned(node, graph.mesh)
        except GraphError as error:
            raise GraphError(f"{error}\n{_neighbourhood(graph, index)}") from None
        defined.update({value.name: value for value in node.results})
    _check_outputs(graph, defined, stage)
    _check_updates(graph, defined, stage)


def _check_form(node: Node) -> None:
    """The parts that a node of its kind has, and no others."""
    if node.is_source:
        if not node.target:
            raise GraphError(f"{node.op}: a source needs a target, the name of what it brings in")
        if len(node.results) != 1 or node.args or node.kwargs:
            raise GraphError(
                f"{node.op} {node.target!r}: a source has one result and no arguments, got "
                f"{len(node.results)} and {len(node.args) + len(node.kwargs)}"
            )
    else:
        if "." not in node.op:
            raise GraphError(f"operator {node.op!r}: its full name has a namespace (aten.…)")
        if node.target:
            raise GraphError(f"{node.op}: a call has no target, got {node.target!r}")
    for what, named in (("keyword", node.kwargs), ("attribute", node.attrs)):
        for key in named:
            if not key.isidentifier():
                raise GraphError(f"{node.op}: {what} {key!r} is not an identifier")
    for item in (*node.args, *node.kwargs.values(), *node.attrs.values()):
        if not has_text(item):
            raise GraphError(f"{node.op}: the argument {item!r} has no text form")


def _check_operands(node: Node, defined: dict[str, Value]) -> None:
    _check_uses(node.op, node.operands, defined)
    if node.attrs:
        _check_uses(node.op, values_in(node.attrs), defined)


def _check_uses(what: str, values: Iterable[Value], defined: dict[str, Value]) -> None:
    """Every one of these values is defined, and is the value its producer made."""
    for used in values:
        made = defined.get(used.name)
        if made is None:
            raise GraphError(f"{what}: %{used.name} is used before it is defined")
        if used is not made and used != made:
            names = [f.name for f in dataclasses.fields(Value)]
            key = next(n for n in names if getattr(used, n) != getattr(made, n))
            raise GraphError(
                f"{what}: operand %{used.name} has {key} {_shown(getattr(used, key))}, "
                f"its producer made {_shown(getattr(made, key))}"
            )


def _shown(item: Any) -> str:
    return str(item) if isinstance(item, (Layout, tuple)) else format_literal(item)


def _check_results(node: Node, defined: dict[str, Value]) -> None:
    seen: set[str] = set()
    for value in node.results:
        if not VALUE_NAME.fullmatch(value.name):
            raise GraphError(f"value %{value.name}: a name has letters, digits, '_' and '.' only")
        if value.name in defined or value.name in seen:
            raise GraphError(f"value %{value.name}: it is defined twice")
        seen.add(value.name)
        if not all(isinstance(n, int) and n >= 0 for n in value.shape):
            raise GraphError(f"value %{value.name}: shape {value.shape} must be of sizes >= 0")
        if value.grad and not (value.dtype.is_floating_point or value.dtype.is_complex):
            raise GraphError(f"value %{value.name}: {value.dtype} cannot carry a gradient")
    if not node.is_source and node.differentiable and not any(v.grad for v in node.operands):
        raise GraphError(f"value %{node.name}: it carries a gradient, no operand of it does")


def _check_layouts(
    node: Node,
    mesh: Mesh | None,
    stage: Stage,
    legal: set[tuple[Layout, tuple[int, ...], bool]],
) -> None:
    if mesh is None and stage != "traced":
        raise GraphError(f"{node.op}: a {stage} graph has a mesh, this one has none")
    for value in node.results:
        layout = value.layout
        if layout is None and stage != "traced":
            raise GraphError(f"value %{value.name}: in a {stage} graph it needs a layout")
        if layout is not None and stage == "traced":
            raise GraphError(f"value %{value.name}: in a traced graph it has no layout yet")
        if layout is not None and mesh is not None:
            known = layout, value.shape, value.grad
            if known not in legal:
                _check_layout(f"value %{value.name}", value, layout, mesh)
                legal.add(known)


def _check_layout(what: str, value: Value, layout: Layout, mesh: Mesh) -> None:
    axes = layout.mentioned
    for axis in axes:
        if axis not in mesh.names:
            raise GraphError(
                f"{what}: layout {layout} names the mesh axis {axis!r}, the mesh is {mesh}"
            )
    if len(set(axes)) != len(axes):
        raise GraphError(f"{what}: layout {layout} uses a mesh axis twice")
    if layout.replicate and not value.grad:
        raise GraphError(
            f"{what}: layout {layout} is Replicate along {layout.replicate}, the value carries "
            "no gradient (Invariant is meant)"
        )
    try:
        layout.check(value.shape)
    except LayoutError as error:
        raise GraphError(f"{what}: {error}") from None
    simple = layout.simplified(value.shape, mesh)
    if layout != simple:
        raise GraphError(f"{what}: layout {layout} is the same as {simple}, which is meant")


def _check_partitioned(node: Node, mesh: Mesh) -> None:
    if node.is_source:
        _check_settled(f"{node.op} {node.target!r}", node.results[0])
    elif node.op in STEPS:
        _check_step(node, mesh)
    elif node.op == FUSED:
        _check_fused(node, mesh)


def _check_settled(what: str, value: Value) -> None:
    layout = value.layout
    if layout is not None and (layout.replicate or layout.partial):
        raise GraphError(
            f"{what}: layout {layout} must be split or Invariant along every axis, it is neither "
            f"along {layout.replicate + layout.partial}"
        )
    if layout is not None and layout.units:
        raise GraphError(
            f"{what}: layout {layout} cuts units of {max(layout.units)}; what is stored or "
            "returned is cut by single elements, as a DTensor is"
        )


def _check_step(node: Node, mesh: Mesh) -> None:
    if node.kwargs or len(node.args) < 2 or not isinstance(node.args[0], Value):
        raise GraphError(f"{node.op}: it takes a value, the axes and the rest by position")
    if len(node.operands) != 1 or len(node.results) != 1:
        raise GraphError(f"{node.op}: it has one operand and one result")
    before, after = node.args[0], node.results[0]
    assert before.layout is not None
    try:
        expected = step_layout(
            node.op, before.layout, *node.args[1:], shape=before.shape, mesh=mesh
        )
    except LayoutError as error:
        raise GraphError(f"value %{after.name}: {error}") from None
    _check_result_of_step(node, before, after, expected)


def _check_result_of_step(node: Node, before: Value, after: Value, expected: Layout) -> None:
    for key, got, want in (
        ("layout", after.layout, expected),
        ("shape", after.shape, before.shape),
        ("dtype", after.dtype, before.dtype),
        # A copy for uses through which no gradient flows carries none.
        ("grad", after.grad, after.grad and before.grad),
    ):
        if got != want:
            raise GraphError(
                f"value %{after.name}: {node.op} gives {key} {_shown(want)}, got {_shown(got)}"
            )


def _check_fused(node: Node, mesh: Mesh) -> None:
    steps_of(node)
    for k, (before, after) in enumerate(zip(node.args[0], node.results, strict=True)):
        if before.dtype != node.args[0][0].dtype:
            raise GraphError(
                f"{node.op}: its values have one dtype, got {before.dtype} for %{before.name} and "
                f"{node.args[0][0].dtype} for %{node.args[0][0].name}"
            )
        try:
            *_, expected = layouts_through(node, mesh, k)
        except LayoutError as error:
            raise GraphError(f"value %{after.name}: {error}") from None
        _check_result_of_step(
            node, dataclasses.replace(before, dtype=dtype_after(node)), after, expected
        )


def _check_outputs(graph: Graph, defined: dict[str, Value], stage: Stage) -> None:
    line = f"return {', '.join(map(format_literal, graph.outputs))}"
    try:
        _check_uses("return", values_in(graph.outputs), defined)
        for output in graph.outputs:
            if not has_text(output):
                raise GraphError(f"return: the output {output!r} has no text form")
            if isinstance(output, Value) and stage == "partitioned":
                _check_settled(f"output %{output.name}", output)
    except GraphError as error:
        raise GraphError(f"{error}\n{_at_the_end(graph, line)}") from None


def _check_updates(graph: Graph, defined: dict[str, Value], stage: Stage) -> None:
    buffers = {node.target: node.results[0] for node in graph.sources("buffer")}
    updated: set[str] = set()
    for name, value in graph.updates:
        try:
            _check_uses(f"update {name!r}", (value,), defined)
            if name not in buffers:
                raise GraphError(f"update {name!r}: the graph has no buffer of this name")
            if name in updated:
                raise GraphError(f"update {name!r}: the buffer is updated twice")
            updated.add(name)
            keys = ("shape", "dtype", "layout") if stage == "partitioned" else ("shape", "dtype")
            for key in keys:
                got, want = getattr(value, key), getattr(buffers[name], key)
                if got != want:
                    raise GraphError(
                        f"update {name!r}: %{value.name} has {key} {_shown(got)}, the buffer has "
                        f"{_shown(want)}"
                    )
        except GraphError as error:
            line = format_update(name, value)
            raise GraphError(f"{error}\n{_at_the_end(graph, line)}") from None


def _neighbourhood(graph: Graph, index: int) -> str:
    first = max(0, index - 1)
    nodes = graph.nodes[first : index + 2]
    lines = format_nodes(nodes, laid=graph.mesh is not None)
    return _marked(lines, index - first)


def _at_the_end(graph: Graph, line: str) -> str:
    lines = [*format_nodes(graph.nodes[-1:], laid=graph.mesh is not None), line]
    return _marked(lines, len(lines) - 1)


def _marked(lines: Iterable[str], marked: int) -> str:
    return "\n".join(f"  {'-->' if i == marked else '   '} {x}" for i, x in enumerate(lines))
