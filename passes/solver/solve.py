"""The one entry point: from a problem to an assignment with a proven gap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import networkx as nx
import numpy as np

from .clock import Clock, Progress, rounded_up, same_cost
from .errors import InfeasibleError
from .layout import Layout
from .memory import LiveSets, fits
from .network import Network
from .problem import Problem, Solution, evaluate
from .prune import forbid_conflicts, prune_dominated, prune_oversized, prune_unsupported
from .reduction import Reduction
from .search import Found, solve_exactly, solve_part

Method = Literal["auto", "ilp", "reduce"]

# Dominance compares all pairs of options; it is only worth it where elimination gets stuck.
_DOMINANCE_OPTIONS = 20_000


def solve(
    problem: Problem,
    *,
    seconds: float | None = None,
    method: Method = "auto",
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Finds the cheapest assignment within the memory limit.

    The result depends on nothing but the arguments, unless the time runs out.

    Args:
        problem: what to decide.
        seconds: time budget, checked between steps; None goes on until the optimum is proven
            or nothing more is found. With 0 one quick attempt is made.
        method: "auto" eliminates, passes messages, and proves the rest with integer programs;
            "reduce" eliminates and hands the rest to one integer program; "ilp" hands
            everything to one integer program.
        seed: of the local improvement.
        progress: called whenever a better assignment or bound is known.

    Raises:
        InfeasibleError: no assignment of finite cost fits, or none was found in time.
        ValueError: an unknown method or negative seconds.
    """
    if method not in ("auto", "ilp", "reduce"):
        raise ValueError(f"method: got {method!r}, expected 'auto', 'ilp' or 'reduce'")
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"seconds: got {seconds}, expected a number >= 0 or None")
    clock = Clock(seconds, progress)
    network = Network.of(problem)
    reduction = None
    if method == "ilp":
        live = _live_sets(problem, network)
    else:
        live = _prune(problem, network, clock)
        reduction = _reduce(network, live, clock)
    constant, network.constant = network.constant, 0.0
    cost = bound = constant
    choice: dict[int, int] = {}
    whole = _whole(problem)
    parts = _components(network, live)
    for index, nodes in enumerate(parts):
        clock.elsewhere = (cost, bound) if index == len(parts) - 1 else None
        layout = Layout(network, nodes, live)
        if method == "auto":
            found = solve_part(layout, clock, whole, seed)
        else:
            found = _exactly(layout, clock, method)
        cost, bound = cost + found.cost, bound + found.bound
        choice.update(layout.choices(found.choice))
    if reduction is not None:
        choice = reduction.expand(choice)
    return _finish(problem, choice, rounded_up(bound, whole), clock)


def _prune(problem: Problem, network: Network, clock: Clock) -> LiveSets | None:
    """Removes impossible options until none is left; returns the live sets that remain."""
    began = clock.elapsed()
    names = [node.name for node in problem.nodes]
    removed = prune_unsupported(network, names)
    live = _live_sets(problem, network)
    while live is not None:
        oversized, affected = prune_oversized(network, live)
        if not oversized:
            break
        removed += oversized + prune_unsupported(network, names, affected)
        live = _live_sets(problem, network)
    conflicts = 0
    if live is not None:
        conflicts = forbid_conflicts(network, live)
        if conflicts:
            removed += prune_unsupported(network, names)
    clock.done("prune", began, f"{removed} impossible options, {conflicts} pairs in conflict")
    return live


def _live_sets(problem: Problem, network: Network) -> LiveSets | None:
    live = LiveSets.of(problem, network.options)
    if live is not None and live.room.min() < 0:
        raise InfeasibleError(
            f"memory: no assignment is within the limit of {problem.usage_limit:.12g}: "
            f"whatever is chosen, {live.floor:.12g} is in use at some time; "
            "raise the limit or allow choices that hold less",
            peak_bound=live.floor,
        )
    return live


def _reduce(network: Network, live: LiveSets | None, clock: Clock) -> Reduction:
    """Eliminates every node whose memory does not matter and that has few neighbours."""
    began = clock.elapsed()
    before = len(network.alive())
    keep = set() if live is None else live.varying()
    reduction = Reduction(network, lambda node: node not in keep).run()
    left = network.alive()
    if left and sum(len(network.costs(node)) for node in left) <= _DOMINANCE_OPTIONS:
        prune_dominated(network, None if live is None else live.usages)
        reduction.run()
    clock.done("reduce", began, f"{before} -> {len(network.alive())} nodes")
    return reduction


def _exactly(layout: Layout, clock: Clock, method: str) -> Found:
    began = clock.elapsed()
    found = solve_exactly(layout, clock)
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


def _finish(problem: Problem, choice: dict[int, int], bound: float, clock: Clock) -> Solution:
    original = tuple(choice[node] for node in range(len(problem.nodes)))
    cost, peak = evaluate(problem, original)
    if not np.isfinite(cost):
        raise InfeasibleError("problem: every assignment uses a forbidden choice or pair")
    assert fits(peak, problem.usage_limit), f"peak {peak} over the limit {problem.usage_limit}"
    optimal = same_cost(cost, bound)
    clock.elsewhere = (0.0, 0.0)
    clock.report("done", cost, min(bound, cost))
    return Solution(
        original,
        cost,
        cost if optimal else bound,
        peak,
        "optimal" if optimal else "feasible",
        tuple(clock.stages),
    )


def _whole(problem: Problem) -> bool:
    """Whether all costs are whole numbers, so that bounds may be rounded up."""
    arrays = [node.costs for node in problem.nodes]
    arrays += [edge.costs.reshape(-1) for edge in problem.edges]
    values = np.concatenate([np.zeros(1), *arrays])
    values = values[np.isfinite(values)]
    return bool(np.abs(values).max() < 2**53 and (values == np.rint(values)).all())
