"""One graph of a parallel module, from its trace to what this rank runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from autopar import agreement
from autopar.compiler import Request, Traced, lower_plan, make_plan
from autopar.ir.errors import MemoryLimitError, PlanError
from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node
from autopar.ir.layout import Layout
from autopar.ir.steps import STEPS
from autopar.plan_reports import with_reports
from autopar.plans import Plan
from autopar.runtime.emit import emit
from autopar.runtime.groups import RankContext


@dataclass(frozen=True)
class Compiled:
    """A traced and planned graph of the model, ready to run on this rank.

    run:
        takes the local tensor of every source of `graph`
    random:
        whether it draws random numbers
    why:
        what made it necessary beside the graphs there were; nothing for the first one
    """

    traced: Traced
    plan: Plan
    graph: Graph
    run: fx.GraphModule
    random: bool
    why: str = ""

    @cached_property
    def sources(self) -> tuple[Node, ...]:
        """The graph's source nodes, in the order in which `run` takes their tensors."""
        return tuple(node for node in self.graph.nodes if node.is_source)

    @cached_property
    def bucketed(self) -> frozenset[str]:
        """The parameters, by the names of their nodes, that nothing but a bucket reads.

        It takes them as they are, and brings their gradients to them.
        """
        return frozenset(
            node.name
            for node in self.graph.sources("param")
            if node.name not in self.graph.leaving
            and all(reader.op == FUSED for reader, _ in self.graph.consumers[node.name])
        )


def agree_on_plan(
    context: RankContext,
    traced: Traced,
    request: Request,
    given: Plan | None,
    pinned: Mapping[str, Layout] | None,
) -> Plan:
    """The plan of a graph that every rank has traced, the same on all of them.

    given:
        a plan to use as it is
    pinned:
        parameter layouts that are decided already

    The first rank plans, the others receive its plan. Raises DesyncError where ranks traced
    different models or were given different plans.
    """
    agreement.require_equal(
        context,
        traced.fingerprint,
        "the traced model",
        "build the same model, and give an example call of the same shapes, on every rank",
    )
    plan = given or agreement.from_first_rank(
        context, lambda: _make_plan(traced, request, pinned), "planning"
    )
    digest = hashlib.sha256(json.dumps(plan.to_json()).encode()).hexdigest()
    # Before the plan is looked at: a wrong one must fail on all ranks, or on none.
    agreement.require_equal(context, digest, "the plan", "give every rank the same plan file")
    return with_reports(traced, plan)


def _make_plan(traced: Traced, request: Request, pinned: Mapping[str, Layout] | None) -> Plan:
    """The searched plan; a later batch that is too small to be divided is computed whole."""
    try:
        return make_plan(traced, request, pinned)
    except MemoryLimitError:
        raise
    except PlanError:
        if pinned is None or request.mode != "data_parallel":
            raise
        return make_plan(traced, replace(request, mode="stand_alone"), pinned)


def compile_plan(
    context: RankContext,
    traced: Traced,
    plan: Plan,
    request: Request,
    device: torch.device,
    why: str,
) -> Compiled:
    """Rewrite a traced graph by its plan and emit it; every rank calls this together."""
    graph = lower_plan(traced, plan, request)
    context.prepare(groups_of(graph))
    random = any(rule.always_assist for rule in traced.rules.values())
    run = emit(graph, device, context.coordinates)
    return Compiled(traced, plan, graph, run, random, why)


def groups_of(graph: Graph) -> list[tuple[str, ...]]:
    """Every tuple of axes that a partitioned graph communicates over, and the whole mesh."""
    assert graph.mesh is not None
    found = [graph.mesh.names]
    for node in graph.nodes:
        if node.op in STEPS:
            found.append(node.args[1])
        elif node.op == FUSED:
            found += [axes for _, axes, _ in node.args[1]]
        for _, axes, _ in node.kwargs.get("split", ()):
            found.append(axes)
    return list(dict.fromkeys(found))
