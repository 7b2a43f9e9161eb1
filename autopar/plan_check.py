"""Does a plan fit a model and a mesh? A plan file may be old, of another model, or edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.errors import LayoutError, MeshError, PlanError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, is_valid
from autopar.passes.assignment import Assignment
from autopar.plans import Plan

#: How many differences between two models an error lists.
LISTED = 3


def source_label(node: Node) -> str:
    """What a source node is to the user: ``param fc1.weight``, ``input x``."""
    return f"{node.op} {node.target}"


def source_type(value: Value) -> str:
    """The type of a value: ``float32[8, 16]``."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def check_plan(
    plan: Plan,
    mesh: Mesh,
    graph: Graph,
    rules: Mapping[str, Rule],
    fingerprint: str,
    training: bool,
) -> None:
    """Refuse a plan that does not fit, saying what differs.

    mesh:
        the mesh it is to run on, axes of size 1 included
    graph, rules, fingerprint, training:
        the traced model's

    Raises PlanError, naming the file that the plan was read from.
    """
    check_mesh(plan, mesh)
    try:
        if plan.fingerprint != fingerprint:
            raise PlanError(f"made for another model: {_difference(plan, graph, training)}")
        _check_decisions(plan, graph, rules)
    except PlanError as error:
        raise PlanError(f"{plan.called}: {error}") from None


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Refuse a plan for another mesh."""
    if plan.mesh != mesh:
        raise PlanError(f"{plan.called}: made for the mesh {plan.mesh}, this run has {mesh}")


def _check_decisions(plan: Plan, graph: Graph, rules: Mapping[str, Rule]) -> None:
    """Refuse what was edited into something that the graph cannot run."""
    decided = plan.assignment
    for node in graph.nodes:
        known: Mapping[str, Any] = decided.sources if node.is_source else decided.strategies
        if node.name not in known:
            raise PlanError(f"operator {node.name!r} ({node.origin}) is missing")
        if node.is_source:
            _check_source(node, decided.sources[node.name], decided.mesh)
        else:
            _check_strategy(node, rules[node.name], decided.strategies[node.name], decided.mesh)
    _check_policies(plan, graph)
    _check_relays(graph, decided)
    _check_returned(graph, decided)


def _check_policies(plan: Plan, graph: Graph) -> None:
    """Refuse policies for what the graph lacks."""
    calls = {node.name for node in graph.calls}
    for field, names in (("recompute", plan.policies.regions), ("forms", plan.policies.forms)):
        unknown = [name for name in names if name not in calls]
        if unknown:
            raise PlanError(f"'policies.{field}' names {unknown[0]!r}, which the graph lacks")
    parameters = {node.target for node in graph.sources("param")}
    unknown = sorted(plan.policies.regather - parameters)
    if unknown:
        raise PlanError(f"'policies.regather' names {unknown[0]!r}, which the graph lacks")


def _check_strategy(node: Node, rule: Rule, strategy: Strategy, mesh: Mesh) -> None:
    what = f"operator {node.name!r} ({node.op} in {node.origin})"
    if sorted(strategy.role) != sorted(mesh.names):
        raise PlanError(
            f"{what}: roles are given for the axes {list(strategy.role)}, "
            f"the mesh has {list(mesh.names)}"
        )
    copies = ["I"] if rule.opaque else ["I", "R", *(f"P{k}" for k in range(len(rule.linear)))]
    allowed = [f.name for f in rule.factors if f.splittable] + copies
    for axis, role in strategy.roles:
        if role not in allowed:
            raise PlanError(
                f"{what}: axis {axis!r} has the role {role!r}, it may be one of {allowed}"
            )
    if not is_valid(rule, strategy, mesh):
        raise PlanError(f"{what}: the strategy {strategy} cannot be had of its dimensions")


def _check_source(node: Node, layout: Layout, mesh: Mesh) -> None:
    label = source_label(node)
    _check_held(label, node.results[0].shape, layout, mesh)
    may_split = node.op == "param" or (node.op == "input" and not node.results[0].grad)
    if layout.split_axes and not may_split:
        raise PlanError(f"{label} is kept whole on every rank, it cannot be held as {layout}")


def _check_held(what: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> None:
    """What a user sees is split or whole, as a DTensor's placements can say it."""
    if layout.replicate or layout.partial or layout.units:
        raise PlanError(f"{what} of shape {shape} cannot be held as {layout}")
    _check_divides(what, shape, layout, mesh)
    for axes in layout.dims:
        in_order = tuple(axis for axis in mesh.names if axis in axes)
        if axes != in_order:
            raise PlanError(
                f"{what}: the axes {axes} of one dimension must stand in the order of the "
                f"mesh, {in_order}"
            )


def _check_divides(what: str, shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> None:
    try:
        mesh.axis_size(*layout.mentioned)
        layout.check(shape)
    except (LayoutError, MeshError) as error:
        raise PlanError(f"{what}: {error}") from None


def _check_relays(graph: Graph, decided: Assignment) -> None:
    for name, layout in decided.relays.items():
        if name not in graph.producers:
            raise PlanError(f"the field 'relays' names {name!r}, which the model lacks")
        shape = graph.value(name).shape
        _check_divides(f"value {name!r} handed on", shape, layout, decided.mesh)


def _check_returned(graph: Graph, decided: Assignment) -> None:
    if len(decided.outputs) != len(graph.outputs):
        raise PlanError(
            f"the field 'returned' has {len(decided.outputs)} layouts, the model returns "
            f"{len(graph.outputs)} values"
        )
    for i, (value, layout) in enumerate(zip(graph.outputs, decided.outputs, strict=True)):
        if isinstance(value, Value) != (layout is not None):
            wanted = "a layout" if layout is None else "null, it is no tensor"
            raise PlanError(f"the field 'returned': output {i} needs {wanted}")
        if isinstance(value, Value) and layout is not None:
            _check_held(f"output {i}", value.shape, layout, decided.mesh)


def _difference(plan: Plan, graph: Graph, training: bool) -> str:
    """What differs between a plan's model and this one, the first few things."""
    here = {source_label(n): source_type(n.results[0]) for n in graph.nodes if n.is_source}
    there = plan.signature
    found = [
        f"{label} is {here.get(label, 'absent')} here, {there.get(label, 'absent')} in the plan"
        for label in dict.fromkeys([*here, *there])
        if here.get(label) != there.get(label)
    ]
    if plan.training != training:
        found.insert(0, f"the plan is for {'training' if plan.training else 'evaluation'} mode")
    if not found:
        found.append("the operators or the hints of the graph differ")
    if plan.torch_version != torch.__version__:
        found[LISTED - 1 :] = [
            f"it was made with torch {plan.torch_version}, this is {torch.__version__}"
        ]
    return "; ".join(found[:LISTED])
