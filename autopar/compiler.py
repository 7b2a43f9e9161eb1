"""From a model to its plan, and from a plan to the graph that ranks run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.ir.errors import HintError, LayoutError, MeshError, PlanError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, is_valid
from autopar.ir.text import print_graph
from autopar.ir.trace import Program, trace
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.choices import rules_of
from autopar.passes.device import Device, device_for
from autopar.passes.hints import Hint
from autopar.passes.place_hints import Placed
from autopar.passes.prices import DevicePrices
from autopar.passes.search import MODES, OUTPUTS
from autopar.plan import Plan
from autopar.report import make_rows
from autopar.sharding import make_hint, module_hints


@dataclass(frozen=True)
class Request:
    """What a user asks of the compiler, checked: everything but the model and its inputs.

    mesh:
        the full mesh, axes of size 1 included
    mode:
        None: semi-auto when there are hints, else auto
    """

    mesh: Mesh
    mode: str | None
    hints: Mapping[str, Hint]
    device: Device
    outputs: str

    @staticmethod
    def make(
        mesh: Mesh, mode: str | None, hints: Mapping[str, Any] | None, device: Any, outputs: str
    ) -> Request:
        """Check and normalise. Raises PlanError or HintError naming the argument."""
        if mode is not None and mode not in MODES:
            raise PlanError(f"mode: expected one of {MODES} or None, got {mode!r}")
        if outputs not in OUTPUTS:
            raise PlanError(f"outputs: expected one of {OUTPUTS}, got {outputs!r}")
        return Request(
            mesh, mode, _pattern_hints(hints), device_for(device or "cpu", mesh), outputs
        )


def _pattern_hints(hints: Mapping[str, Any] | None) -> dict[str, Hint]:
    """`hints=` of a call: a strategy, or a dict with in_strategy and out_strategy."""
    if hints is None:
        return {}
    if not isinstance(hints, Mapping):
        raise HintError(f"hints: expected a dict of module name pattern -> strategy, got {hints!r}")
    found = {}
    for pattern, spec in hints.items():
        if isinstance(spec, Mapping):
            unknown = set(spec) - {"in_strategy", "out_strategy"}
            if unknown:
                raise HintError(f"hint {pattern!r}: unknown keys {sorted(unknown)}")
            found[pattern] = make_hint(
                repr(pattern), spec.get("in_strategy"), spec.get("out_strategy")
            )
        else:
            found[pattern] = make_hint(repr(pattern), spec, None)
    return found


@dataclass(frozen=True)
class Traced:
    """A model traced and its hints placed; the same on every rank."""

    program: Program
    placed: Placed
    rules: Mapping[str, Rule]
    fingerprint: str

    @property
    def graph(self) -> Graph:
        return self.placed.graph


def trace_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request
) -> Traced:
    """Trace a model and resolve its hints; no communication."""
    program = trace(model, tuple(args), dict(kwargs))
    placed = pipeline.place(
        program.graph,
        request.mesh,
        module_hints(model),
        request.hints,
        [name for name, _ in model.named_modules()],
    )
    text = print_graph(placed.graph)
    hints = sorted(f"{name} {fix}" for name, fix in placed.fixes.items())
    digest = hashlib.sha256("\n".join([text, *hints]).encode()).hexdigest()
    return Traced(program, placed, rules_of(placed.graph), digest)


def make_plan(traced: Traced, request: Request, pinned: Mapping[str, Layout] | None = None) -> Plan:
    """Search the assignment of a traced model. `pinned` gives parameter layouts by name."""
    mode = request.mode or ("semi_auto" if traced.placed.fixes else "auto")
    searched = pipeline.decide(
        traced.placed,
        request.mesh,
        request.device,
        mode=mode,  # type: ignore[arg-type]
        outputs=request.outputs,  # type: ignore[arg-type]
        pinned=pinned,
    )
    return describe_plan(
        traced, request, searched.assignment, mode, searched.solution.cost, searched.solution.bound
    )


def describe_plan(
    traced: Traced,
    request: Request,
    assignment: Assignment,
    mode: str,
    seconds: float,
    bound: float,
) -> Plan:
    """The plan of an assignment, with its rows for reading."""
    graph = traced.graph
    partitioned = pipeline.lower(graph, assignment, request.device)
    prices = DevicePrices(assignment.mesh, request.device)
    labels = {n.name: _label(n) for n in graph.nodes if n.is_source}
    return Plan(
        mesh=request.mesh,
        mode=mode,
        outputs=request.outputs,
        device=request.device.name,
        training=traced.program.training,
        fingerprint=traced.fingerprint,
        signature={_label(n): _type(n.results[0]) for n in graph.nodes if n.is_source},
        labels=labels,
        assignment=assignment,
        seconds=seconds,
        bound=bound,
        rows=make_rows(graph, partitioned, traced.rules, assignment, prices),
        notes=(*traced.program.notes, *_unsplit_notes(graph, traced.rules)),
    )


def _label(node: Node) -> str:
    return f"{node.op} {node.target}"


def _type(value: Value) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _unsplit_notes(graph: Graph, rules: Mapping[str, Rule]) -> list[str]:
    """One note per unknown operator: it runs whole on every rank."""
    where: dict[str, list[str]] = {}
    for node in graph.calls:
        if rules[node.name].opaque:
            where.setdefault(node.op, []).append(str(node.origin))
    return [
        f"{op} has no rule: it runs whole on every rank ({len(places)} calls, first in {places[0]})"
        for op, places in where.items()
    ]


def lower_plan(traced: Traced, plan: Plan, request: Request) -> Graph:
    """The partitioned graph of a plan.

    Raises PlanError where the plan was made for another model or mesh, or was edited into
    something that cannot run.
    """
    check_plan(traced, plan, request.mesh)
    try:
        return pipeline.lower(traced.graph, plan.assignment, request.device)
    except LayoutError as error:
        raise PlanError(f"plan: {error}") from None


def check_plan(traced: Traced, plan: Plan, mesh: Mesh) -> None:
    """Refuse a plan that does not fit, saying what differs."""
    if plan.mesh != mesh:
        raise PlanError(f"plan: made for the mesh {plan.mesh}, this run has {mesh}")
    if plan.fingerprint != traced.fingerprint:
        raise PlanError(f"plan: made for another model: {_difference(traced, plan)}")
    graph, decided = traced.graph, plan.assignment
    for node in graph.nodes:
        known: Mapping[str, Any] = decided.sources if node.is_source else decided.strategies
        if node.name not in known:
            raise PlanError(f"plan: operator {node.name!r} ({node.origin}) is missing")
    for node in graph.calls:
        strategy, rule = decided.strategies[node.name], traced.rules[node.name]
        if sorted(strategy.role) != sorted(decided.mesh.names):
            raise PlanError(
                f"plan: operator {node.name!r}: roles are given for the axes "
                f"{list(strategy.role)}, the mesh has {list(decided.mesh.names)}"
            )
        allowed = [f.name for f in rule.factors if f.splittable]
        copies = ["I", "R", *(f"P{k}" for k in range(len(rule.linear)))]
        for axis, role in strategy.roles:
            if role not in allowed and role not in (["I"] if rule.opaque else copies):
                raise PlanError(
                    f"plan: operator {node.name!r} ({node.op}): axis {axis!r} has the role "
                    f"{role!r}, it may be one of {allowed + copies}"
                )
        if not is_valid(rule, strategy, decided.mesh):
            raise PlanError(
                f"plan: operator {node.name!r} ({node.op} in {node.origin}): the strategy "
                f"{strategy} does not divide its dimensions"
            )
    for node in graph.nodes:
        if node.is_source:
            _check_source(node, decided.sources[node.name], decided.mesh)


def _check_source(node: Node, layout: Layout, mesh: Mesh) -> None:
    shape = node.results[0].shape
    if layout.replicate or layout.partial or layout.rank != len(shape):
        raise PlanError(f"plan: {_label(node)} of shape {shape} cannot be held as {layout}")
    try:
        layout.local_shape(shape, mesh)
    except (LayoutError, MeshError) as error:
        raise PlanError(f"plan: {_label(node)}: {error}") from None


def _difference(traced: Traced, plan: Plan) -> str:
    """What differs between a plan's model and this one, the first few things."""
    here = {_label(n): _type(n.results[0]) for n in traced.graph.nodes if n.is_source}
    there = plan.signature
    found = [
        f"{label} is {here.get(label, 'absent')} here, {there.get(label, 'absent')} in the plan"
        for label in dict.fromkeys([*here, *there])
        if here.get(label) != there.get(label)
    ]
    if plan.training != traced.program.training:
        found.insert(0, f"the plan is for {'training' if plan.training else 'evaluation'} mode")
    if not found:
        found.append("the operators or the hints of the graph differ")
    return "; ".join(found[:3])


def resolve_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan given as itself or as a file."""
    return plan if isinstance(plan, Plan) else Plan.load(plan)
