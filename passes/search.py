"""Choose every strategy and layout of a graph: the modes, and the search behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import INVARIANT, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.passes.assignment import SEARCH, Assignment
from autopar.passes.blocks import NO_BLOCKS, Blocks, find_blocks
from autopar.passes.build import Built, Prices, build_problem
from autopar.passes.choices import Fix
from autopar.passes.overlap import Hiding, solve_overlapping
from autopar.passes.place_hints import Placed
from autopar.passes.propagate import propagate
from autopar.passes.solver import Solution
from autopar.passes.source_layouts import stored_layouts

Mode = Literal["auto", "semi_auto", "data_parallel", "stand_alone"]
Outputs = Literal["auto", "full", "sharded"]
MODES: tuple[str, ...] = ("auto", "semi_auto", "data_parallel", "stand_alone")
OUTPUTS: tuple[str, ...] = ("auto", "full", "sharded")


@dataclass(frozen=True)
class Searched:
    """An assignment with the problem it solves.

    `solution.cost` is the predicted time of one step in seconds, `hiding` what of it overlaps,
    `weighed` the solution of the problem priced at the weight of `hiding` (see `overlap`).

    blocks:
        the repeated blocks whose copies share their decisions
    notes:
        what the user should know about how it was found
    """

    assignment: Assignment
    solution: Solution
    built: Built
    hiding: Hiding
    weighed: Solution
    blocks: Blocks = NO_BLOCKS
    notes: tuple[str, ...] = ()


def search(
    placed: Placed,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    prices: Prices,
    *,
    mode: Mode,
    outputs: Outputs = "auto",
    pinned: Mapping[str, Layout] | None = None,
    method: Literal["auto", "ilp", "reduce"] = "auto",
    share_blocks: bool = True,
) -> Searched:
    """Decide a graph's assignment.

    mesh:
        the mesh without axes of size 1
    mode:
        ``"semi_auto"`` spreads the hints and searches the rest; ``"auto"`` searches everything,
        hints still binding; ``"data_parallel"`` splits the batch of every input over all axes and
        keeps parameters whole; ``"stand_alone"`` computes everything on every rank
    pinned:
        parameter layouts that are given, by dotted name
    method:
        how the solver works (`autopar.passes.solver.solve`)
    share_blocks:
        let the copies of a repeated block have equal strategies and layouts (`find_blocks`). The
        plan reads like the model, and the search takes as long for many copies as for a few. It
        is the cheapest of such plans; without sharing a first or last block may differ. Copies
        for which hints or `pinned` fix other things do not share.

    Raises PlanError where the mode cannot be had.
    """
    graph = placed.graph
    origins = {name: str(hint) for name, hint in placed.hints.items()}
    fixes: Mapping[str, Fix] = placed.fixes
    reasons = {name: dict.fromkeys(mesh.names, origins[name]) for name in fixes}
    fixed_sources: dict[str, Layout] = {}
    if mode == "stand_alone":
        fixes = {n.name: Fix(roles=dict.fromkeys(mesh.names, INVARIANT)) for n in graph.calls}
        reasons = {n.name: dict.fromkeys(mesh.names, "mode stand_alone") for n in graph.calls}
        fixed_sources = {n.name: _whole(n) for n in graph.nodes if n.is_source}
        fixed_sources |= _stored_parameters(graph, pinned or {})
    batches: dict[str, Layout] = {}
    if mode == "data_parallel":
        batches = _split_batches(graph, mesh)
        held = {n.name: batches[n.name] for n in graph.sources("input") if not n.results[0].grad}
        fixed_sources = _stored_parameters(graph, pinned or {}) | held
    if mode in ("data_parallel", "semi_auto"):
        spread = propagate(graph, rules, mesh, fixes, origins, batches)
        fixes, reasons = spread.fixes, spread.reasons
    share: Mapping[str, str] = {}
    blocks = NO_BLOCKS
    if share_blocks:
        decided = _decided_sources(graph, pinned or {}) | fixed_sources | dict(fixes)
        blocks = find_blocks(graph, rules)
        share = blocks.representatives(decided)
    built = build_problem(
        graph,
        rules,
        mesh,
        prices,
        fixes=fixes,
        pinned=pinned,
        fixed_sources=fixed_sources,
        output_layouts=output_choices(graph, mesh, outputs),
        share=share,
    )
    found = solve_overlapping(built.problem, built.parts, method=method)
    assignment = built.assignment(mesh, found.solution.choice)
    reasoned = replace(assignment, reasons=_with_search(graph, mesh, reasons))
    return Searched(reasoned, found.solution, built, found.hiding, found.weighed, blocks)


def _with_search(
    graph: Graph, mesh: Mesh, reasons: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """What no hint decided was decided by the search."""
    return {
        node.name: {axis: reasons.get(node.name, {}).get(axis, SEARCH) for axis in mesh.names}
        for node in graph.calls
    }


def _whole(node: Node) -> Layout:
    return Layout.whole(len(node.results[0].shape))


def _decided_sources(graph: Graph, pinned: Mapping[str, Layout]) -> dict[str, Hashable]:
    """Node name -> layout of the parameters whose layout is given."""
    return {n.name: pinned[n.target] for n in graph.sources("param") if n.target in pinned}


def _stored_parameters(graph: Graph, pinned: Mapping[str, Layout]) -> dict[str, Layout]:
    """Node name -> layout: parameters as they are stored already, else whole."""
    return {node.name: pinned.get(node.target, _whole(node)) for node in graph.sources("param")}


def batch_size(inputs: Sequence[Node]) -> int | None:
    """The most common size of dimension 0 among the inputs (the first one on a tie)."""
    sizes = Counter(n.results[0].shape[0] for n in inputs if n.results[0].shape)
    return sizes.most_common(1)[0][0] if sizes else None


def _split_batches(graph: Graph, mesh: Mesh) -> dict[str, Layout]:
    """Input node name -> its layout with the batch split over all axes."""
    inputs = graph.sources("input")
    batch = batch_size(inputs)
    if batch is None:
        raise PlanError("mode 'data_parallel': no input has a batch dimension")
    if batch < 2 and mesh.size > 1:
        raise PlanError(
            f"mode 'data_parallel': a batch of {batch} cannot be split over the {mesh.size} ranks "
            f"of the mesh {mesh}"
        )
    layouts = {}
    for node in inputs:
        shape = node.results[0].shape
        is_batch = bool(shape) and shape[0] == batch
        dims = [mesh.names if d == 0 and is_batch else () for d in range(len(shape))]
        layouts[node.name] = Layout.make(dims)
    return layouts


def output_choices(
    graph: Graph, mesh: Mesh, outputs: Outputs
) -> tuple[tuple[Layout, ...] | None, ...]:
    """The layouts each output may be returned in.

    ``"full"``: whole; ``"sharded"``: as the plan has it; ``"auto"``: sharded when the model also
    returns a scalar that is differentiated (a loss), else whole.
    """
    values = [v for v in graph.outputs if isinstance(v, Value)]
    has_loss = any(v.grad and v.numel == 1 for v in values)
    sharded = outputs == "sharded" or (outputs == "auto" and has_loss)
    return tuple(
        None
        if not isinstance(v, Value)
        else stored_layouts(v.shape, mesh)
        if sharded
        else (Layout.whole(len(v.shape)),)
        for v in graph.outputs
    )
