"""Prices instead of a limit on memory: bounds against brute force, and branching on them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from autopar.passes.memory.branch import Branches
from autopar.passes.memory.relaxation import Relaxation
from autopar.passes.memory.step import Link, Part, StepMemory
from autopar.passes.solver import Edge, Node, Problem, evaluate

GAP = 2e-3
TIMES = 4


def interval(random: np.random.Generator) -> tuple[int, int]:
    lo = int(random.integers(TIMES))
    return lo, int(random.integers(lo + 1, TIMES + 1))


def random_case(seed: int) -> tuple[Problem, StepMemory]:
    """A chain of decisions and one edge across, with what nodes and reshards hold."""
    random = np.random.default_rng(seed)
    count, choices = 5, 3

    def classes() -> np.ndarray:
        return np.array([0, *random.integers(2, size=choices - 1)])

    nodes = [Node(f"n{i}", random.uniform(1, 10, choices)) for i in range(count)]
    pairs = [*itertools.pairwise(range(count)), (0, count - 1)]
    edges = []
    for u, v in pairs:
        costs = random.uniform(0, 5, (2, 2))
        # One pair is forbidden, but never the first: the first choices go together.
        costs.reshape(-1)[int(random.integers(1, 4))] = np.inf
        edges.append(Edge(u, v, costs, classes(), classes()))
    held = tuple(
        tuple((interval(random), random.uniform(0, 10, choices).round()) for _ in range(2))
        for _ in nodes
    )

    def part() -> Part:
        times = {interval(random): int(random.integers(1, 3))}
        return Part(True, random.uniform(0, 6, (2, 2)).round(), classes(), classes(), times)

    links = tuple(Link(u, v, (part(), part())) for u, v in [*pairs[:2], (1, 1)])
    return Problem(tuple(nodes), tuple(edges)), StepMemory(held, links, TIMES)


def brute_force(problem: Problem, memory: StepMemory, limit: float) -> float:
    sizes = [range(len(node.costs)) for node in problem.nodes]
    return min(
        evaluate(problem, choice)[0]
        for choice in itertools.product(*sizes)
        if memory.peak(choice) <= limit
    )


def limits(problem: Problem, memory: StepMemory) -> Any:
    """A loose limit and a tight one that can be met."""
    sizes = [range(len(node.costs)) for node in problem.nodes]
    peaks = [
        memory.peak(choice)
        for choice in itertools.product(*sizes)
        if np.isfinite(evaluate(problem, choice)[0])
    ]
    return [float(np.quantile(peaks, share, method="higher")) for share in (0.02, 0.4)]


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_and_branching_closes_the_gap(seed: int) -> None:
    problem, memory = random_case(seed)
    for limit in limits(problem, memory):
        best = brute_force(problem, memory, limit)
        relaxation = Relaxation(problem, memory, limit)
        for column in relaxation.columns(10.0):
            assert column.cost == pytest.approx(evaluate(problem, column.choice)[0])
            assert column.held == pytest.approx(memory.profile(column.choice))
            assert relaxation.bound <= best * (1 + 1e-9)
        branches = Branches(Relaxation(problem, memory, limit), GAP)
        branches.relax(10.0)
        assert branches.bound <= best * (1 + 1e-9)
        branches.search(20.0)
        assert branches.bound <= best * (1 + 1e-9)
        if branches.near:
            assert branches.cost <= best * (1 + 2 * GAP)
        elif branches.best is not None:
            assert branches.cost >= best * (1 - 1e-9)


def test_most_gaps_close() -> None:
    closed = 0
    for seed in range(12):
        problem, memory = random_case(seed)
        branches = Branches(Relaxation(problem, memory, limits(problem, memory)[1]), GAP)
        branches.relax(10.0)
        branches.search(20.0)
        closed += branches.near
    assert closed >= 10


def test_without_a_need_for_prices_the_optimum_is_the_only_column() -> None:
    problem, memory = random_case(0)
    found = list(Relaxation(problem, memory, 1e9).columns(10.0))
    assert len(found) == 1
    assert found[0].cost == pytest.approx(brute_force(problem, memory, 1e9))
