"""A plan beside the ones people write by hand: `compare`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.comparison import FREE, PLAN, Comparison, ComparisonRow
from autopar.compiler import (
    Request,
    Traced,
    lower_plan,
    make_plan,
    resolve_plan,
    trace_model,
)
from autopar.ir.errors import MeshError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.mixed import MixedPrecision, given_with_plan
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.baselines import baseline_assignments
from autopar.passes.place_hints import Placed
from autopar.passes.prices import DevicePrices
from autopar.plans import Plan


def compare(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    mode: str | None = None,
    hints: Mapping[str, Any] | None = None,
    device: Any = None,
    outputs: str = "auto",
    mixed_precision: str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
) -> Comparison:
    """Set a plan beside data parallel, FSDP, Megatron's tensor parallel and their mixtures.

    Needs no process group, devices or memory for the model (it may be on meta). Arguments and
    errors are those of `autopar.plan`.

    plan:
        the plan to compare, or its file; its mesh, device, outputs and mixed precision hold then,
        and `hints` must be those it was made with. Default: the plan that `autopar.plan` makes.

    Raises PlanError for a plan of another model or mesh, MeshError where neither mesh nor plan is
    given.
    """
    mixed = MixedPrecision.make(mixed_precision, reduce_dtype)
    given = None if plan is None else resolve_plan(plan)
    if given is not None:
        shape = given.mesh if mesh is None else Mesh.of(mesh)
        device, outputs = given.device, given.outputs
        mixed = given_with_plan(mixed, given.mixed)
    elif mesh is not None:
        shape = Mesh.of(mesh)
    else:
        raise MeshError("mesh: give the mesh to plan for, or a plan")
    request = Request.make(shape, mode, hints, device, outputs, mixed=mixed)
    traced = trace_model(model, args, {} if kwargs is None else kwargs, request)
    if given is None:
        given = make_plan(traced, request)
    else:
        lower_plan(traced, given, request)  # refuses a plan that does not fit
    return compare_traced(traced, given)


def compare_traced(traced: Traced, plan: Plan) -> Comparison:
    """The same for a model that is traced already, and a plan that fits it."""
    graph, rules, mesh = traced.graph, traced.rules, plan.assignment.mesh
    prices = DevicePrices(mesh, plan.device)
    outputs: Any = plan.outputs
    unhinted = Placed(graph)
    free = pipeline.decide(unhinted, mesh, plan.device, mode="auto", outputs=outputs)
    baselines = baseline_assignments(unhinted, rules, mesh, prices, outputs, built=free.built)
    priced = {PLAN: (plan.seconds, plan.hidden, plan.assignment)}
    others = dict(baselines.found)
    if plan.mode != "auto" or traced.placed.fixes or plan.device.precision:
        others[FREE] = free
    priced |= {
        name: (found.solution.cost, found.hiding.hidden, found.assignment)
        for name, found in others.items()
    }
    rows = []
    for name, (seconds, hidden, assignment) in priced.items():
        compute = compute_seconds(graph, rules, assignment, prices)
        ratio = seconds / plan.seconds if plan.seconds else 1.0
        rows.append(ComparisonRow(name, seconds, compute, seconds - compute, hidden, ratio))
    return Comparison(
        plan.mesh,
        plan.device.name,
        tuple(sorted(rows, key=lambda row: row.seconds)),
        baselines.skipped,
    )


def compute_seconds(
    graph: Graph, rules: Mapping[str, Rule], assignment: Assignment, prices: DevicePrices
) -> float:
    """The part of an assignment's predicted time that is no communication."""
    total = 0.0
    for node in graph.calls:
        rule, strategy = rules[node.name], assignment.strategies[node.name]
        times = prices.call(node, rule, [strategy])
        total += float(times.forward[0] + times.backward[0])
    for node in graph.sources("param"):
        layout = assignment.sources[node.name]
        total += float(prices.parameter(node.results[0], [layout])[0])
    return total
