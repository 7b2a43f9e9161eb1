"""Gradients on their way beside the backward pass: what that hides, and the search that knows it.

The collectives that bring gradients to their parameters are started as soon as the gradients exist
and waited for when the backward pass ends (`autopar.runtime.fused`). With G(x) their time and B(x)
the backward computing of an assignment x, and k the device's `overlap`, a step takes

    T(x) = rest(x) + max(0, G(x) - k B(x))

The gradients that come last have no backward pass left to run beside: they are part of the rest
(`last_gradients`).

That is no sum over nodes and edges, as the solver wants one, but the larger of two such sums, and
so the largest over a weight w from 0 to 1 of

    A(w, x) = rest(x) + w (G(x) - k B(x))

For each w the cheapest x is found as ever, and its cost is a bound on every T. If the one for
w = 0 hides all of its gradients it is the best there is; so is the one for w = 1 if it hides as
much as its backward pass allows. Else w is sought where the cost is largest (the costs of all x
are lines over w, their minimum a concave function), and the best T seen is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autopar.ir.graph import Graph
from autopar.ir.reduced import is_parameter_cast
from autopar.passes.solver import Edge, Problem, Solution, evaluate, solve
from autopar.passes.solver import Node as ProblemNode

#: How often the weight is narrowed down, at most. Each time is one search of the problem.
ROUNDS = 8
#: A bound this close (as a fraction) to the lines that cross there cannot rise any further.
SAME = 1e-9


@dataclass(frozen=True, eq=False)
class Parts:
    """What of a problem's costs runs beside what, in seconds and in the problem's own shape.

    sent:
        node -> the gradient collectives in the costs of its choices [choice]
    edges:
        the same of each edge [class, class], None where it has none; no entries for no edges
    covering:
        node -> what its backward computing can cover of them [choice]
    """

    sent: Mapping[int, np.ndarray] = field(default_factory=dict)
    edges: tuple[np.ndarray | None, ...] = ()
    covering: Mapping[int, np.ndarray] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to hide, and anything that hides."""
        sends = bool(self.sent) or any(part is not None for part in self.edges)
        return sends and bool(self.covering)

    def of(self, problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
        """Seconds of gradient collectives of an assignment, and what can cover them."""
        sent = sum(float(part[choice[i]]) for i, part in self.sent.items())
        for edge, part in zip(problem.edges, self.edges, strict=bool(self.edges)):
            if part is not None:
                sent += float(part[edge.u_class[choice[edge.u]], edge.v_class[choice[edge.v]]])
        return sent, sum(float(part[choice[i]]) for i, part in self.covering.items())


def last_gradients(graph: Graph, nbytes: float) -> frozenset[str]:
    """The parameters whose gradients exist when the backward pass is over, and their casts: those
    used first, until they fill a bucket of so many bytes."""
    found: set[str] = set()
    parameters = {node.results[0].name: node.results[0] for node in graph.sources("param")}
    for node in graph.calls:
        for value in node.operands:
            if value.name in parameters and value.name not in found:
                if nbytes <= 0:
                    return frozenset(found)
                found.add(value.name)
                nbytes -= value.nbytes
                if is_parameter_cast(node):
                    found.add(node.name)
    return frozenset(found)


@dataclass(frozen=True)
class Hiding:
    """How much of its gradient communication an assignment hides.

    gradients:
        seconds of the collectives that bring gradients to parameters
    covering:
        seconds of them that backward computing can cover
    weight:
        the weight at which the assignment was found
    """

    gradients: float = 0.0
    covering: float = 0.0
    weight: float = 1.0

    @property
    def hidden(self) -> float:
        """Seconds that cost nothing."""
        return min(self.gradients, self.covering)


NOTHING_HIDDEN = Hiding()


def priced(problem: Problem, parts: Parts, weight: float) -> Problem:
    """The problem whose costs are A(weight, x) for every assignment x; nothing is built anew."""
    if not parts:
        return problem
    made: dict[tuple[int, int], np.ndarray] = {}

    def node_of(index: int, node: ProblemNode) -> ProblemNode:
        costs = node.costs
        if index in parts.sent:
            costs = costs - (1 - weight) * parts.sent[index]
        if index in parts.covering:
            costs = costs - weight * parts.covering[index]
        return node if costs is node.costs else replace(node, costs=costs)

    def edge_of(edge: Edge, sent: np.ndarray | None) -> Edge:
        if sent is None:
            return edge
        # Equal edges go on sharing their arrays.
        key = id(edge.costs), id(sent)
        if key not in made:
            made[key] = edge.costs - (1 - weight) * sent
        return replace(edge, costs=made[key])

    sent = parts.edges or (None,) * len(problem.edges)
    return replace(
        problem,
        nodes=tuple(node_of(i, node) for i, node in enumerate(problem.nodes)),
        edges=tuple(map(edge_of, problem.edges, sent)),
    )


@dataclass(frozen=True)
class Found:
    """A solution with its T as the cost; `rest` is what is left of it without gradients."""

    solution: Solution
    hiding: Hiding
    rest: float

    @property
    def slope(self) -> float:
        """What the weight adds to the assignment's cost A."""
        return self.hiding.gradients - self.hiding.covering


def settle(problem: Problem, parts: Parts, solution: Solution, weight: float) -> Found:
    """What a solution of `priced(problem, parts, weight)` costs in truth.

    Its choices may go on behind the problem's nodes. The bound stays one: at any weight no
    assignment costs more than its T.
    """
    choice = solution.choice[: len(problem.nodes)]
    hiding = replace(hidden_by(problem, parts, choice), weight=weight)
    total, _ = evaluate(problem, choice)
    seconds = total - hiding.hidden
    return Found(
        replace(solution, cost=seconds, bound=min(solution.bound, seconds)),
        hiding,
        total - hiding.gradients,
    )


def hidden_by(problem: Problem, parts: Parts, choice: Sequence[int]) -> Hiding:
    """What one assignment hides of its gradient communication."""
    return Hiding(*parts.of(problem, choice))


@dataclass(frozen=True)
class Overlapping:
    """The assignment of least T that is found, with a bound on every T, and what it hides.

    hiding:
        its weight is the one that says most about all assignments, for whoever searches further
    weighed:
        the solution of the problem priced at that weight
    """

    solution: Solution
    hiding: Hiding
    weighed: Solution


def solve_overlapping(
    problem: Problem, parts: Parts, *, method: Literal["auto", "ilp", "reduce"] = "auto"
) -> Overlapping:
    """Find the assignment of least T.

    Raises InfeasibleError where the problem has no assignment.
    """
    found = list(_search(problem, parts, method))
    best = min(found, key=lambda each: each.solution.cost)
    bound = max(each.solution.bound for each in found)
    cost = best.solution.cost
    # Rounding must not put a bound above what is proven to exist.
    optimal = bound >= cost * (1 - SAME)
    solution = replace(
        best.solution,
        bound=cost if optimal else bound,
        status="optimal" if optimal else "feasible",
        stages=tuple(stage for each in found for stage in each.solution.stages),
    )
    most = max(found, key=lambda each: each.solution.bound)
    hiding = replace(best.hiding, weight=most.hiding.weight)
    return Overlapping(solution, hiding, most.solution)


def _search(problem: Problem, parts: Parts, method: str) -> Iterator[Found]:
    def at(weight: float) -> Found:
        solution = solve(priced(problem, parts, weight), method=method)  # type: ignore[arg-type]
        return settle(problem, parts, solution, weight)

    if not parts:
        yield at(1.0)
        return
    low = at(0.0)
    yield low
    if low.slope <= 0:
        return
    high = at(1.0)
    yield high
    if high.slope >= 0:
        return
    for _ in range(ROUNDS):
        # The lines of two assignments; the minimum of all is nowhere above where they cross.
        weight = (high.rest - low.rest) / (low.slope - high.slope)
        crossing = low.rest + weight * low.slope
        middle = at(weight)
        yield middle
        if middle.rest + weight * middle.slope >= crossing * (1 - SAME) or not middle.slope:
            return
        low, high = (middle, high) if middle.slope > 0 else (low, middle)
