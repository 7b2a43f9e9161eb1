"""The one entry point: from a problem to an assignment with a proven gap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import networkx as nx
import numpy as np

from .clock import Clock, Progress, rounded_up, same_cost
from .errors import InfeasibleError, ProblemError
from .layout import Layout
from .memory import LiveSets, Spans, fits
from .network import Network
from .problem import Problem, Solution, evaluate
from .prune import (
    forbid_conflicts,
    prune_beside_promising,
    prune_dominated,
    prune_unsupported,
    tighten,
)
from .reduction import Reduction
from .search import Found, solve_exactly, solve_part

Method = Literal["auto", "ilp", "reduce"]

# Dominance compares all pairs of options; it is only worth it where elimination gets stuck.
_DOMINANCE_OPTIONS = 20_000


def solve(
    problem: Problem,
    *,
    seconds: float | None = None,
    gap: float = 0.0,
    method: Method = "auto",
    seed: int = 0,
    start: Sequence[int] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Finds the cheapest assignment within the memory limit.

    The result depends on nothing but the arguments, unless the time runs out.

    Args:
        problem: what to decide.
        seconds: time budget, checked between steps. None goes on until the optimum is proven
            or until neither cost nor bound has got better for 20 seconds, or for half of the
            time until then if that is more. With 0 one quick attempt is made.
        gap: how far the bound may stay below the cost, as a fraction; as soon as it is no
            further, the search ends.
        method: "auto" eliminates, passes messages, and proves the rest with integer programs;
            "reduce" eliminates and hands the rest to one integer program; "ilp" hands
            everything to one integer program.
        seed: of the local improvement.
        start: an assignment within the limit, to begin from; the result is never dearer.
        progress: called whenever a better assignment or bound is known.

    Raises:
        InfeasibleError: no assignment of finite cost fits, or none was found in time.
        ProblemError: ``start`` is no assignment of the problem within the limit.
        ValueError: an unknown method, negative seconds or a negative gap.
    """
    if method not in ("auto", "ilp", "reduce"):
        raise ValueError(f"method: got {method!r}, expected 'auto', 'ilp' or 'reduce'")
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"seconds: got {seconds}, expected a number >= 0 or None")
    if not gap >= 0:
        raise ValueError(f"gap: got {gap}, expected a number >= 0")
    clock = Clock(seconds, gap, progress)
    begin = None if start is None else _checked(problem, start)
    network = Network.of(problem)
    reduction = None
    spans = Spans.of(problem)
    if method == "ilp":
        live = _live_sets(problem, spans, network)
    else:
        live = _prune(problem, spans, network, clock)
        reduction = _reduce(network, live, begin, clock)
    constant, network.constant = network.constant, 0.0
    cost = bound = constant
    choice: dict[int, int] = {}
    whole = _whole(problem)
    parts = _components(network, live)
    for index, nodes in enumerate(parts):
        clock.elsewhere = (cost, bound) if index == len(parts) - 1 else None
        clock.patience_anew()
        layout = Layout(network, nodes, live)
        if method == "auto":
            found = solve_part(layout, clock, whole, seed, layout.options_of(begin))
        else:
            found = _exactly(layout, clock, method, layout.options_of(begin))
        cost, bound = cost + found.cost, bound + found.bound
        choice.update(layout.choices(found.choice))
    if reduction is not None:
        choice = reduction.expand(choice)
    original = tuple(choice[node] for node in range(len(problem.nodes)))
    return _finish(problem, original, start, rounded_up(bound, whole), clock)


def _checked(problem: Problem, start: Sequence[int]) -> list[int]:
    """A copy of the assignment to begin from, which must be within the limit."""
    cost, peak = evaluate(problem, start)
    if not np.isfinite(cost):
        raise ProblemError("start: got an assignment with a forbidden choice or pair")
    if not fits(peak, problem.usage_limit):
        raise ProblemError(
            f"start: got an assignment with a peak of {peak:.12g}, expected at most the limit "
            f"of {problem.usage_limit:.12g}"
        )
    return [int(chosen) for chosen in start]


def _prune(problem: Problem, spans: Spans, network: Network, clock: Clock) -> LiveSets | None:
    """Removes impossible options until none is left; returns the live sets that remain."""
    began = clock.elapsed()
    names = [node.name for node in problem.nodes]
    removed = prune_unsupported(network, names)
    live = _live_sets(problem, spans, network)
    if live is not None:
        live, _, oversized = tighten(network, live, names)
        removed += oversized
    conflicts = 0
    if live is not None:
        conflicts = forbid_conflicts(network, live)
        if conflicts:
            removed += prune_unsupported(network, names)
    clock.done("prune", began, f"{removed} impossible options, {conflicts} pairs in conflict")
    return live


def _live_sets(problem: Problem, spans: Spans, network: Network) -> LiveSets | None:
    if problem.usage_limit is None:
        return None
    live = LiveSets.of(spans, problem.usage_limit, network.options)
    if live is not None:
        live.check()
    return live


def _reduce(
    network: Network, live: LiveSets | None, begin: list[int] | None, clock: Clock
) -> Reduction:
    """Eliminates every node whose memory does not matter and that has few neighbours.

    Where an option of ``begin`` goes, it gets one that is no worse.
    """
    began = clock.elapsed()
    before = len(network.alive())
    keep = set() if live is None else live.varying()
    prune_beside_promising(network, live, begin)
    reduction = Reduction(network, lambda node: node not in keep).run()
    left = network.alive()
    if left and sum(len(network.costs(node)) for node in left) <= _DOMINANCE_OPTIONS:
        prune_dominated(network, live, begin)
        reduction.run()
    clock.done("reduce", began, f"{before} -> {len(network.alive())} nodes")
    return reduction


def _exactly(layout: Layout, clock: Clock, method: str, begin: np.ndarray | None) -> Found:
    began = clock.elapsed()
    found = solve_exactly(layout, clock, begin)
    clock.done(method, began, f"{len(layout.nodes)} nodes, cost {found.cost:.12g}")
    return found


def _components(network: Network, live: LiveSets | None) -> list[list[int]]:
    """Nodes that must be decided together, linked or under one limit; the largest last."""
    alive = network.alive()
    graph = nx.Graph()
    graph.add_nodes_from(alive)
    graph.add_edges_from((u, v) for u in alive for v in network.links[u])
    if live is not None:
        graph.add_edges_from(itertools.pairwise(sorted(live.varying() & set(alive))))
    parts = sorted(sorted(part) for part in nx.connected_components(graph))
    return sorted(parts, key=len)


def _finish(
    problem: Problem,
    choice: tuple[int, ...],
    start: Sequence[int] | None,
    bound: float,
    clock: Clock,
) -> Solution:
    cost, peak = evaluate(problem, choice)
    if start is not None:
        started, at_start = evaluate(problem, start)
        if started < cost:
            choice, cost, peak = tuple(int(chosen) for chosen in start), started, at_start
    if not np.isfinite(cost):
        raise InfeasibleError("problem: every assignment uses a forbidden choice or pair")
    assert fits(peak, problem.usage_limit), f"peak {peak} over the limit {problem.usage_limit}"
    optimal = same_cost(cost, bound)
    clock.elsewhere = (0.0, 0.0)
    clock.report("done", cost, min(bound, cost))
    return Solution(
        choice,
        cost,
        cost if optimal else bound,
        peak,
        "optimal" if optimal else "feasible",
        tuple(clock.stages),
    )


def _whole(problem: Problem) -> bool:
    """Whether all costs are whole numbers, so that bounds may be rounded up."""
    arrays = itertools.chain(
        (node.costs for node in problem.nodes), (edge.costs for edge in problem.edges)
    )
    return all(_of_whole_numbers(costs) for costs in arrays)


def _of_whole_numbers(costs: np.ndarray) -> bool:
    values = costs[np.isfinite(costs)]
    return bool((np.abs(values) < 2**53).all() and (values == np.rint(values)).all())
