"""The passes, in the order they run.

traced graph ──place──▶ hints as fixes ──decide──▶ assignment ──lower──▶ graph that ranks run

`lower` is `partitioned` and then `fuse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.verify import verify_graph
from autopar.passes.assignment import Assignment
from autopar.passes.choices import rules_of
from autopar.passes.device import Device
from autopar.passes.fuse import fuse
from autopar.passes.hints import Hint
from autopar.passes.memory_limit import MemoryLimit, solve_within, timeline_of
from autopar.passes.overlap import priced, settle
from autopar.passes.partition import partition
from autopar.passes.place_hints import Placed, place_hints
from autopar.passes.prices import DevicePrices
from autopar.passes.search import Mode, Outputs, Searched, search


def place(
    graph: Graph,
    mesh: Mesh,
    module_hints: Mapping[str, Hint],
    pattern_hints: Mapping[str, Hint],
    module_paths: Mapping[str, str],
) -> Placed:
    """Check the traced graph and resolve its hints (see `place_hints`)."""
    verify_graph(graph, stage="traced")
    placed = place_hints(graph, mesh, module_hints, pattern_hints, module_paths)
    verify_graph(placed.graph, stage="traced")
    return placed


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
) -> Searched:
    """Choose the assignment of a placed graph (see `search`), within a memory limit if given.

    Raises MemoryLimitError where no plan was found that fits the limit.
    """
    mesh = mesh.without_trivial_axes()
    rules = rules_of(placed.graph)

    def find(share: bool) -> Searched:
        return search(
            placed,
            rules,
            mesh,
            DevicePrices(mesh, device),
            mode=mode,
            outputs=outputs,
            pinned=pinned,
            method=method,
            share_blocks=share,
        )

    def lowered(assignment: Assignment) -> Graph:
        return lower(placed.graph, assignment, device)

    found = find(share_blocks)
    if limit is None or timeline_of(lowered(found.assignment), limit).peak <= limit.nbytes:
        return found
    apart = find(False)
    built, weight = apart.built, apart.hiding.weight
    # One weight for all of it: the bound holds, and what is found is priced as it is.
    fixed = replace(built, problem=priced(built.problem, built.parts, weight))
    assignment, solution = solve_within(fixed, placed.graph, rules, mesh, limit, lowered)
    settled = settle(built.problem, built.parts, solution, weight)
    reasons = found.assignment.reasons
    return Searched(replace(assignment, reasons=reasons), settled.solution, built, settled.hiding)


def lower(graph: Graph, assignment: Assignment, device: Device) -> Graph:
    """The graph that each rank runs under an assignment: its parameters travel in buckets."""
    fused = fuse(partitioned(graph, assignment, device), device)
    verify_graph(fused, stage="partitioned")
    return fused


def partitioned(graph: Graph, assignment: Assignment, device: Device) -> Graph:
    """The graph with layouts and reshards, each for itself (see `partition`)."""
    prices = DevicePrices(assignment.mesh, device)
    made = partition(graph, rules_of(graph), assignment, prices.steps)
    verify_graph(made, stage="partitioned")
    return made
