"""The search under a limit on the memory of one rank.

The cheapest plan is kept if it fits. If it does not, the problem is built with every tensor's
memory on it (`memory_usage`), solved under the limit, and what comes out is simulated exactly
(`memory`): a plan over the limit is never returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.errors import MemoryLimitError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.passes.assignment import Assignment
from autopar.passes.build import Built
from autopar.passes.communication import format_bytes
from autopar.passes.kept import Probe
from autopar.passes.memory import memory_timeline
from autopar.passes.memory_nodes import Added, Tie, hold, hold_copy
from autopar.passes.memory_usage import Carrier, ProblemUsages
from autopar.passes.solver import InfeasibleError, Problem, Solution, solve
from autopar.passes.timeline import Timeline

#: Pieces smaller than this share of the limit are not followed one by one: the problem stays
#: small, and the exact check sees them all.
IGNORED_SHARE = 1 / 40
#: How many plans that turn out to be over the limit are put aside, and by how much the limit given
#: to the solver is lowered where no operator is to blame.
ATTEMPTS, MARGIN = 4, 0.95
#: How many contributors an error names.
CONTRIBUTORS = 5


@dataclass(frozen=True)
class MemoryLimit:
    """The most one rank may hold at a time.

    nbytes:
        the limit
    optimizer:
        whose state counts (see `memory_timeline`)
    operators:
        mesh -> what one rank runs for an operator, so that what it keeps can be observed
    seconds:
        how long one solve under the limit may take
    """

    nbytes: int
    optimizer: str
    operators: Probe
    seconds: float = 30.0


Lower = Callable[[Assignment], Graph]


def timeline_of(graph: Graph, limit: MemoryLimit) -> Timeline:
    """What a partitioned graph holds, with the optimizer's state."""
    assert graph.mesh is not None
    return memory_timeline(graph, limit.operators(graph.mesh), optimizer=limit.optimizer)


def solve_within(
    built: Built,
    graph: Graph,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    limit: MemoryLimit,
    lower: Lower,
) -> tuple[Assignment, Solution]:
    """The cheapest assignment whose simulated peak is within the limit.

    built:
        the problem without shared blocks
    lower:
        the partitioned graph of an assignment

    Raises MemoryLimitError, with the smallest peak reached and what it is made of, where no plan
    was found that fits.
    """
    usages = ProblemUsages(
        graph,
        rules,
        mesh,
        optimizer=limit.optimizer,
        ignore_below=limit.nbytes * IGNORED_SHARE,
        probe=limit.operators,
    )
    counted, _ = with_memory(built, graph, usages)
    problem = replace(counted, usage_limit=float(limit.nbytes))
    best: Timeline | None = None
    bound: float | None = None
    for _ in range(ATTEMPTS):
        try:
            solution = solve(problem, seconds=limit.seconds)
        except InfeasibleError as error:
            raise _infeasible(limit, best, error) from None
        # Later problems have fewer choices: only the first bound holds for all plans that fit.
        bound = solution.bound if bound is None else bound
        assignment = built.assignment(mesh, solution.choice)
        timeline = timeline_of(lower(assignment), limit)
        if timeline.peak <= limit.nbytes:
            return assignment, replace(solution, bound=min(bound, solution.cost))
        if best is None or timeline.peak < best.peak:
            best = timeline
        problem = _without_the_largest(problem, built, timeline, solution.choice)
    raise _infeasible(limit, best, None)


def _without_the_largest(
    problem: Problem, built: Built, timeline: Timeline, choice: Sequence[int]
) -> Problem:
    """Forbid what made the largest tensor at a peak that the problem did not see coming.

    The problem leaves out what is held for the length of one reshard. Where that decides, the
    operator behind it loses the choices that make its results as it made them.
    """
    nodes = list(problem.nodes)
    for item in timeline.at_peak:
        name = item.name if item.name in built.strategies else re.sub(r"_\d+$", "", item.name)
        if name not in built.strategies:
            continue
        index, _ = built.strategies[name]
        results = built.choices[index].results
        alike = [
            all(layouts[k] == layouts[choice[index]] for layouts in results)
            for k in range(len(nodes[index].costs))
        ]
        costs = np.where(alike, np.inf, nodes[index].costs)
        if np.isfinite(costs).any():
            nodes[index] = replace(nodes[index], costs=costs)
            return replace(problem, nodes=tuple(nodes))
    assert problem.usage_limit is not None
    return replace(problem, usage_limit=problem.usage_limit * MARGIN)


def _infeasible(
    limit: MemoryLimit, best: Timeline | None, error: InfeasibleError | None
) -> MemoryLimitError:
    """Say by how much it does not fit, what is largest, and what would help."""
    message = f"memory limit {format_bytes(limit.nbytes)}: no plan was found that fits one rank"
    if error is not None and error.peak_bound is not None:
        message += f"; every plan needs at least {format_bytes(error.peak_bound)}"
    if best is not None:
        largest = "; ".join(
            f"{format_bytes(item.nbytes)} {item.kind} {item.name}"
            for item in best.at_peak[:CONTRIBUTORS]
        )
        message += f"; the smallest peak reached is {format_bytes(best.peak)}, made of {largest}"
    return MemoryLimitError(
        message + ". More ranks, a smaller batch, or an optimizer with less state would help"
    )


def with_memory(built: Built, graph: Graph, usages: ProblemUsages) -> tuple[Problem, list[Tie]]:
    """The problem of `build_problem` (without shared blocks) with every tensor's memory on it.

    The nodes of `built` keep their numbers; nodes that only carry memory come after them, each
    with the tie that says what it follows.
    """
    nodes, edges = list(built.problem.nodes), list(built.problem.edges)
    ties: list[Tie] = []

    def take(added: Added) -> None:
        nodes.extend(added.nodes)
        edges.extend(added.edges)
        ties.extend(added.ties)

    def put(index: int, carriers: tuple[Carrier, ...]) -> None:
        nodes[index], added = hold(nodes[index], index, carriers, len(nodes))
        take(added)

    for node in graph.nodes:
        if node.is_source:
            index, layouts = built.sources[node.name]
            carried = usages.parameter if node.op == "param" else usages.source
            put(index, carried(node.results[0], layouts))
        else:
            index, _ = built.strategies[node.name]
            put(index, usages.call(node, built.choices[index]))
    for name, (index, layouts) in built.relays.items():
        put(index, usages.relay(graph.value(name), layouts))
    for output, returned in zip(graph.outputs, built.outputs, strict=True):
        if returned is not None:
            put(returned[0], usages.output(output, returned[1]))
    for value, (node, result) in ((n.results[i], (n, i)) for n, i in graph.producers.values()):
        if node.is_source:
            index, layouts = built.sources[node.name]
        else:
            index, _ = built.strategies[node.name]
            layouts = built.choices[index].results[result]
        name = f"copy of {value.name}"
        if value.name in built.relays:
            relay, handed = built.relays[value.name]
            copy = usages.copy(value, layouts, handed, None)
            take(hold_copy(name, copy, index, relay, len(nodes)))
            index, layouts = relay, handed
        for use, k in graph.consumers[value.name]:
            at, _ = built.strategies[use.name]
            copy = usages.copy(value, layouts, built.choices[at].operands[k], use)
            take(hold_copy(name, copy, index, at, len(nodes)))
    return Problem(tuple(nodes), tuple(edges)), ties
