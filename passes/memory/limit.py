"""The search under a limit on the memory of one rank.

First memory has prices instead of a limit (`relaxation`, `branch`), which gives a
bound and good plans. Where these are not near enough, the problem gets every tensor's memory
(`problem`) and is solved under the limit; what reshards use while they run counts only where
it turned out to matter, so that the problem stays small.

What comes out is simulated exactly (`simulation`): a plan over the limit is never returned. Where
the simulation finds a little more than the problem saw, the problem gets a lower limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir.errors import MemoryLimitError
from autopar.ir.graph import Graph
from autopar.passes.assignment import Assignment
from autopar.passes.build import Built
from autopar.passes.communication import format_bytes
from autopar.passes.memory.branch import Branches
from autopar.passes.memory.contributors import contributors, remedies
from autopar.passes.memory.kept import Probe
from autopar.passes.memory.problem import with_memory
from autopar.passes.memory.relaxation import Column, Relaxation
from autopar.passes.memory.simulation import memory_timeline
from autopar.passes.memory.step import StepMemory, step_memory
from autopar.passes.memory.timeline import Timeline
from autopar.passes.memory.usage import ProblemUsages
from autopar.passes.solver import (
    InfeasibleError,
    Problem,
    Solution,
    evaluate,
    least_peak,
    solve,
)

#: How long the search under a limit may take, in seconds, when nothing else is said. The exact
#: simulation of the last plan comes on top.
SECONDS = 20.0
#: How far the bound may stay below the cost of a plan under a limit, as a fraction.
GAP = 0.01
#: How near prices on memory come to the best ones, as a fraction: branching does the rest.
_TOLERANCE = GAP / 4
#: The part of the time left that one solve, and the search for the least peak, may take.
_SHARE, _LEAST_SHARE = 0.5, 0.3
#: How long a bound on plans of any memory may take, in seconds. It is quick to have.
_BOUND_SECONDS = 2.0
#: The part of the time left for prices on memory, for branching, for putting pieces together, and
#: for more branching after that.
_PRICES_SHARE, _FIRST_BRANCHES_SHARE, _PIECES_SHARE, _BRANCHES_SHARE = 0.3, 0.25, 0.15, 0.5
#: How often what a solve finds may turn out to be over the limit.
_ATTEMPTS = 6
#: How often the smallest peak is sought, with more reshards counted each time.
_LEAST_ATTEMPTS = 3
#: How much lower the limit gets than the simulation asks for.
_MARGIN = 0.998
#: The problem counts a little too much at most: what it finds this much over the limit is over it.
_CLEARLY = 1.1
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
        how long the search under the limit may take in all
    separate_memory:
        whether what is kept on the host does not count (see `memory_timeline`)
    """

    nbytes: int
    optimizer: str
    operators: Probe
    seconds: float = SECONDS
    separate_memory: bool = True


@dataclass(frozen=True)
class Within:
    """A plan within the limit.

    solution:
        its choices are those of the problem without memory; the bound holds for all plans that
        fit
    note:
        what the user should know about how it was found
    """

    assignment: Assignment
    solution: Solution
    note: str = ""


Lower = Callable[[Assignment], Graph]
#: Plans that people write by hand, cheapest first.
Experts = Callable[[], Iterable[tuple[str, Assignment]]]


def timeline_of(graph: Graph, limit: MemoryLimit) -> Timeline:
    """What a partitioned graph holds, with the optimizer's state."""
    assert graph.mesh is not None
    return memory_timeline(
        graph,
        limit.operators(graph.mesh),
        optimizer=limit.optimizer,
        separate_memory=limit.separate_memory,
    )


def is_far_over(memory: StepMemory, choice: tuple[int, ...], limit: MemoryLimit) -> bool:
    """Whether an assignment is over the limit by more than the problem may count too much."""
    return memory.peak(choice) > _CLEARLY * limit.nbytes


def solve_within(
    built: Built,
    usages: ProblemUsages,
    limit: MemoryLimit,
    lower: Lower,
    experts: Experts,
    cheapest: Solution,
    known: Timeline | None,
    *,
    memory: StepMemory | None = None,
    overcounts: bool = False,
) -> Within:
    """The cheapest assignment whose simulated peak is within the limit, and never dearer than the
    best of the experts' plans that are.

    built:
        the problem that `usages` is about, with the costs to go by
    lower:
        the partitioned graph of an assignment
    cheapest:
        the solution of the problem without a limit
    known:
        the simulation of the cheapest plan, which is over the limit, if there was one
    memory:
        what `usages` add up to, where it is known already
    overcounts:
        whether `usages` counts things that `lower` does not keep. What is over the limit by it
        may fit then, so nothing it says is a bound or a proof

    Raises MemoryLimitError, with the smallest peak reached and what it is made of, where no plan
    was found that fits.
    """
    return _Search(built, usages, limit, lower, cheapest, known, memory, overcounts).run(experts)


class _Search:
    def __init__(
        self,
        built: Built,
        usages: ProblemUsages,
        limit: MemoryLimit,
        lower: Lower,
        cheapest: Solution,
        known: Timeline | None,
        memory: StepMemory | None,
        overcounts: bool,
    ) -> None:
        self.until = time.perf_counter() + limit.seconds
        self.built, self.usages, self.limit, self.lower = built, usages, limit, lower
        self.overcounts, self.cheapest = overcounts, cheapest
        self.memory = step_memory(usages) if memory is None else memory
        # What the problem is told: lower than the limit where it saw less than there is.
        self.told = float(limit.nbytes)
        self.followed: set[int] = set()
        self.bound: float | None = None
        self.best = known
        self.simulated = 0 if known is None else known.peak

    def left(self) -> float:
        return max(self.until - time.perf_counter(), 0.0)

    def run(self, experts: Experts) -> Within:
        found, proven = self._solve_repeatedly(None)
        if found is not None and found.gap <= GAP:
            return Within(self._assignment(found.choice), found)
        expert = None if proven else self._expert(experts, found)
        if expert is not None:
            name, found = expert
            better, _ = self._solve_repeatedly(found)
            if better is not None and better.cost < found.cost:
                return Within(self._assignment(better.choice), better)
            note = (
                f"memory limit {format_bytes(self.limit.nbytes)}: no better plan than {name} was "
                "found in time"
            )
            return Within(self._assignment(found.choice), found, note)
        if found is not None:
            return Within(self._assignment(found.choice), found)
        return self._least()

    def _assignment(self, choice: tuple[int, ...]) -> Assignment:
        return self.built.assignment(self.usages.mesh, choice)

    def _fits(self, choice: tuple[int, ...]) -> bool:
        """Whether the simulation of an assignment is within the limit; else remember it."""
        timeline = timeline_of(self.lower(self._assignment(choice)), self.limit)
        self.simulated = timeline.peak
        if self.best is None or timeline.peak < self.best.peak:
            self.best = timeline
        return timeline.peak <= self.limit.nbytes

    # -- the solver ---------------------------------------------------------------------------

    def _solve_repeatedly(self, start: Solution | None) -> tuple[Solution | None, bool]:
        """The best solution that is simulated to fit, and whether it is proven that none does."""
        for attempt in range(_ATTEMPTS):
            if attempt and not self.left():
                return None, False
            try:
                choice = self._candidate(None if start is None else start.choice)
            except InfeasibleError as error:
                return None, error.proven and attempt == 0 and not self.overcounts
            if self._follow(choice, self.limit.nbytes):
                continue
            if self._fits(choice):
                return self._as_found(choice), False
            self.told *= min(self.limit.nbytes / self.simulated * _MARGIN, _MARGIN)
        return None, False

    def _candidate(self, start: tuple[int, ...] | None) -> tuple[int, ...]:
        """The best choice that is found within what the problem is told."""
        # Later problems have fewer solutions: only the first bounds hold for all that fit.
        holds = self.told == self.limit.nbytes and not self.overcounts
        problem = self.built.problem
        relaxation = Relaxation(
            problem, self.memory, self.told, cheapest=self.cheapest, tolerance=_TOLERANCE
        )
        branches = Branches(relaxation, GAP)
        if start is not None:
            branches.offer(self._column(start))
        branches.relax(_PRICES_SHARE * self.left())
        branches.search(_FIRST_BRANCHES_SHARE * self.left())
        if branches.found and not branches.near:
            choices = [column.choice for column in branches.found]
            better = self._of_pieces(choices, branches.best)
            if better is not None:
                branches.offer(self._column(better))
        branches.search(_BRANCHES_SHARE * self.left())
        if holds:
            self._bound_is(branches.bound)
        best = branches.best
        if best is not None and branches.near:
            return best.choice
        try:
            begin = None if best is None else best.choice
            solution = self._solve(problem, _SHARE * self.left(), begin, self.followed)
        except InfeasibleError:
            if best is None:
                raise
            return best.choice
        if holds:
            self._bound_is(solution.bound)
        choice = solution.choice[: len(problem.nodes)]
        return choice if best is None or solution.cost < best.cost else best.choice

    def _column(self, choice: tuple[int, ...]) -> Column:
        cost, _ = evaluate(self.built.problem, choice)
        return Column(choice, cost, self.memory.profile(choice))

    def _bound_is(self, bound: float) -> None:
        self.bound = bound if self.bound is None else max(self.bound, bound)

    def _of_pieces(
        self, choices: list[tuple[int, ...]], best: Column | None
    ) -> tuple[int, ...] | None:
        """The best choice made of pieces of these; None for nothing new."""
        start = None
        if best is not None:
            start, choices = best.choice, [*choices, best.choice]
        nodes = []
        for node, options in zip(self.built.problem.nodes, zip(*choices, strict=True), strict=True):
            costs = np.full(len(node.costs), np.inf)
            kept = sorted(set(options))
            costs[kept] = node.costs[kept]
            nodes.append(replace(node, costs=costs))
        problem = replace(self.built.problem, nodes=tuple(nodes))
        try:
            solution = self._solve(problem, _PIECES_SHARE * self.left(), start, None)
        except InfeasibleError:
            return None
        return solution.choice[: len(nodes)]

    def _solve(
        self,
        problem: Problem,
        seconds: float,
        start: tuple[int, ...] | None,
        followed: set[int] | None,
    ) -> Solution:
        """A problem without memory, solved with it, and with the reshards that are followed."""
        made = with_memory(problem, self.memory, self.told, followed=followed)
        limited = replace(made.problem, usage_limit=self.told)
        begin = None if start is None else made.extended(start)
        if begin is not None:
            cost, peak = evaluate(limited, begin)
            if peak > self.told or not np.isfinite(cost):
                begin = None
        return solve(limited, seconds=seconds, gap=GAP, start=begin)

    def _follow(self, choice: tuple[int, ...], level: float) -> bool:
        """Count the reshards that take a solution over a level while they run, if any do."""
        profile = self.memory.profile(choice)
        over = np.flatnonzero(profile > level)
        found = set()
        for number, link in enumerate(self.memory.links):
            if number in self.followed or link.source == link.target:
                continue
            for part in link.parts:
                if part.copy or not part.of(choice[link.source], choice[link.target]):
                    continue
                times = part.times
                if any(((lo <= over) & (over < hi)).any() for lo, hi in times):
                    found.add(number)
        self.followed |= found
        return bool(found)

    def _as_found(self, choice: tuple[int, ...]) -> Solution:
        cost, _ = evaluate(self.built.problem, choice)
        if self.bound is None:
            # No search under the limit came to a bound; that of all plans holds as well.
            self.bound = solve(self.built.problem, seconds=_BOUND_SECONDS).bound
        bound = min(self.bound, cost)
        same = bound >= cost * (1 - 1e-9)
        return Solution(
            choice,
            cost,
            cost if same else bound,
            self.memory.peak(choice),
            "optimal" if same else "feasible",
        )

    # -- otherwise ----------------------------------------------------------------------------

    def _expert(self, experts: Experts, found: Solution | None) -> tuple[str, Solution] | None:
        """The cheapest expert's plan that fits and is cheaper than what was found."""
        for name, assignment in experts():
            choice = self.built.choice(assignment)
            cost, _ = evaluate(self.built.problem, choice)
            if found is not None and cost >= found.cost:
                continue
            too_large = not self.overcounts and is_far_over(self.memory, choice, self.limit)
            if not too_large and self._fits(choice):
                return name, self._as_found(choice)
        return None

    def _least(self) -> Within:
        """The plan of the smallest peak if that fits; raises MemoryLimitError if not."""
        seconds = max(_LEAST_SHARE * self.limit.seconds, self.left()) / _LEAST_ATTEMPTS
        for _ in range(_LEAST_ATTEMPTS):
            problem = with_memory(self.built.problem, self.memory, followed=self.followed)
            least = least_peak(problem.problem, seconds=seconds)
            choice = least.choice[: problem.nodes]
            if self._fits(choice):
                note = (
                    f"memory limit {format_bytes(self.limit.nbytes)}: this is the plan of the "
                    "smallest peak; no cheaper one that fits was found in time"
                )
                return Within(self._assignment(choice), self._as_found(choice), note)
            if not self._follow(choice, least.peak):
                break
        assert self.best is not None
        largest = "; ".join(map(str, contributors(self.best)[:CONTRIBUTORS]))
        raise MemoryLimitError(
            f"memory limit {format_bytes(self.limit.nbytes)}: no plan was found that fits one "
            f"rank; the smallest peak found is {format_bytes(self.best.peak)}, made of {largest}. "
            f"What would help: {remedies(self.best, self.limit.optimizer)}"
        )
