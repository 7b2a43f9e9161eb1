"""The passes, in the order they run.

traced graph ──place──▶ hints as fixes ──decide──▶ assignment ──lower──▶ graph that ranks run

`lower` is `partitioned`, then `fuse`, then `apply_policies`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch

from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.verify import verify_graph
from autopar.passes import zero
from autopar.passes.assignment import Assignment
from autopar.passes.baselines import baseline_assignments
from autopar.passes.casts import explicit_casts
from autopar.passes.choices import rules_of
from autopar.passes.collector import no_collection
from autopar.passes.device import Device
from autopar.passes.fuse import fuse
from autopar.passes.hints import Hint
from autopar.passes.keep import apply_policies
from autopar.passes.memory.limit import MemoryLimit, is_far_over, solve_within, timeline_of
from autopar.passes.memory.step import step_memory, without_reshards
from autopar.passes.memory.usage import ProblemUsages
from autopar.passes.overlap import priced, settle
from autopar.passes.partition import partition
from autopar.passes.place_hints import Placed, place_hints
from autopar.passes.policies import NO_POLICIES, Policies
from autopar.passes.prices import DevicePrices
from autopar.passes.search import Mode, Outputs, Searched, search
from autopar.passes.zero import Sharded

#: From which part of the limit on, in what nodes hold, what reshards hold is counted as well.
_RESHARDS_COUNT = 0.5


def place(
    graph: Graph,
    mesh: Mesh,
    module_hints: Mapping[str, Hint],
    pattern_hints: Mapping[str, Hint],
    module_paths: Mapping[str, str],
    reduce_dtype: torch.dtype = torch.float32,
) -> Placed:
    """Check the traced graph, resolve its hints, write its casts down.

    See `place_hints` and `explicit_casts`.
    """
    verify_graph(graph, stage="traced")
    placed = place_hints(graph, mesh, module_hints, pattern_hints, module_paths)
    placed = replace(placed, graph=explicit_casts(placed.graph, reduce_dtype))
    verify_graph(placed.graph, stage="traced")
    return placed


@no_collection()
def decide(
    placed: Placed,
    mesh: Mesh,
    device: Device,
    *,
    mode: Mode,
    outputs: Outputs,
    pinned: Mapping[str, Layout] | None = None,
    method: Literal["auto", "ilp", "reduce"] = "auto",
    share_blocks: bool = True,
    limit: MemoryLimit | None = None,
    policies: Policies = NO_POLICIES,
) -> Searched:
    """Choose the assignment of a placed graph (see `search`), within a memory limit if given.

    policies:
        what is kept for the backward pass. Plans are simulated so; the search under a limit
        prices everything kept, which is more, so that its bound is that without a limit

    Raises MemoryLimitError where no plan was found that fits the limit.
    """
    mesh = mesh.without_trivial_axes()
    rules = rules_of(placed.graph)

    prices = DevicePrices(mesh, device)
    found = search(
        placed,
        rules,
        mesh,
        prices,
        mode=mode,
        outputs=outputs,
        pinned=pinned,
        method=method,
        share_blocks=share_blocks,
    )
    if limit is None:
        return found

    def lowered(assignment: Assignment) -> Graph:
        return lower(placed.graph, assignment, device, policies)

    built, weight = found.built, found.hiding.weight
    # One weight for all of it: the bound holds, and what is found is priced as it is.
    fixed = replace(built, problem=priced(built.problem, built.parts, weight))
    usages = ProblemUsages(
        fixed,
        placed.graph,
        rules,
        mesh,
        device,
        blocks=found.blocks,
        optimizer=limit.optimizer,
        probe=limit.operators,
    )
    overcounts, choice = bool(policies), found.solution.choice
    memory = known = None
    if not overcounts:
        nodes = without_reshards(usages)
        if nodes.peak(choice) > _RESHARDS_COUNT * limit.nbytes:
            memory = step_memory(usages, nodes)
    # A simulation takes as long as all of the search: it is left out where it can only say no.
    if memory is None or not is_far_over(memory, choice, limit):
        known = timeline_of(lowered(found.assignment), limit)
        if known.peak <= limit.nbytes:
            return found

    def experts() -> list[tuple[str, Assignment]]:
        # What people write by hand knows nothing of hints or of layouts that are given.
        if mode != "auto" or placed.fixes or pinned:
            return []
        baselines = baseline_assignments(
            placed, rules, mesh, prices, outputs, built=found.built
        ).found
        ranked = sorted(baselines.items(), key=lambda item: item[1].solution.cost)
        return [(name, each.assignment) for name, each in ranked]

    within = solve_within(
        fixed,
        usages,
        limit,
        lowered,
        experts,
        found.weighed,
        known,
        memory=memory,
        overcounts=overcounts,
    )
    settled = settle(built.problem, built.parts, within.solution, weight)
    return replace(
        found,
        assignment=replace(within.assignment, reasons=found.assignment.reasons),
        solution=settled.solution,
        hiding=settled.hiding,
        notes=(within.note,) if within.note else (),
    )


def store_in_shards(
    graph: Graph,
    searched: Searched,
    device: Device,
    again: Callable[[Mapping[str, Layout]], Searched],
) -> Sharded:
    """The searched assignment with data parallel parameters stored in shards (see `zero`)."""
    made = partitioned(graph, searched.assignment, device)
    return zero.store_in_shards(graph, made, searched, again)


@no_collection()
def lower(
    graph: Graph, assignment: Assignment, device: Device, policies: Policies = NO_POLICIES
) -> Graph:
    """The graph that each rank runs under an assignment: its parameters travel in buckets.

    policies:
        what is kept for the backward pass (see `apply_policies`)
    """
    return in_buckets(_partitioned(graph, assignment, device), device, policies)


def in_buckets(made: Graph, device: Device, policies: Policies = NO_POLICIES) -> Graph:
    """What follows `partitioned` in `lower`."""
    fused = apply_policies(fuse(made, device, policies.regather), policies)
    verify_graph(fused, stage="partitioned")
    return fused


def partitioned(graph: Graph, assignment: Assignment, device: Device) -> Graph:
    """The graph with layouts and reshards, each for itself (see `partition`)."""
    made = _partitioned(graph, assignment, device)
    verify_graph(made, stage="partitioned")
    return made


#: The last graph that was partitioned, what for, and what became of it: a plan is simulated,
#: described, and then run. The traced graph is not kept alive for it.
_latest: tuple[weakref.ref[Graph], Assignment, Device, Graph] | None = None


def _partitioned(graph: Graph, assignment: Assignment, device: Device) -> Graph:
    global _latest
    decided, known = replace(assignment, reasons={}), _latest
    if known is not None and known[0]() is graph and known[1:3] == (decided, device):
        return known[3]
    prices = DevicePrices(assignment.mesh, device)
    made = partition(graph, rules_of(graph), assignment, prices.steps)
    _latest = weakref.ref(graph), decided, device, made
    return made
