"""Random small problems: brute force, reduction, integer program and messages agree."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from autopar.passes.solver import (
    Edge,
    Held,
    InfeasibleError,
    Node,
    Problem,
    ProblemError,
    evaluate,
    prune,
    solve,
)

solve_module = sys.modules[solve.__module__]

METHODS = ("auto", "ilp", "reduce")


def random_problem(
    seed: int,
    *,
    memory: bool,
    whole: bool = True,
    nodes: int = 6,
    choices: int = 4,
    ranges: int = 1,
) -> Problem:
    """Up to ``nodes`` nodes, parallel edges, forbidden choices and pairs, several components.

    Every node holds memory over up to ``ranges`` live ranges, which may overlap.
    """
    random = np.random.default_rng(seed)
    count = int(random.integers(1, nodes + 1))
    sizes = random.integers(1, choices + 1, count)

    def costs(*shape: int) -> np.ndarray:
        values = random.integers(0, 12, shape).astype(float)
        if not whole:
            values += random.normal(size=shape)
        values[random.random(shape) < 0.15] = np.inf
        return values

    def held(size: int) -> Held:
        lo = int(random.integers(0, 6))
        hi = int(random.integers(lo, 7))
        usages = random.integers(0, 8, size).astype(float)
        if not whole:
            usages += random.random(size)
        return Held(usages, (lo, hi))

    made = [
        Node(
            f"n{index}", costs(size), tuple(held(size) for _ in range(random.integers(ranges + 1)))
        )
        for index, size in enumerate(sizes.tolist())
    ]
    edges = []
    if count > 1:
        for _ in range(int(random.integers(0, 2 * count + 1))):
            u, v = (int(end) for end in random.choice(count, 2, replace=False))
            edges.append(Edge.from_dense(u, v, costs(int(sizes[u]), int(sizes[v]))))
    limit = float(random.integers(3, 25)) if memory else None
    return Problem(tuple(made), tuple(edges), limit)


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(node.costs)) for node in problem.nodes))


def fits(problem: Problem, choice: Sequence[int]) -> bool:
    """Whether an assignment is allowed and within the limit."""
    cost, peak = evaluate(problem, choice)
    return bool(cost < np.inf) and (problem.usage_limit is None or peak <= problem.usage_limit)


def brute_force(problem: Problem) -> float:
    """The least cost within the limit; ``inf`` when nothing fits."""
    costs = (evaluate(problem, c)[0] for c in assignments(problem) if fits(problem, c))
    return min(costs, default=np.inf)


def check(problem: Problem, method: str, expected: float) -> None:
    if not np.isfinite(expected):
        with pytest.raises(InfeasibleError) as raised:
            solve(problem, method=method)
        assert raised.value.proven
        return
    solution = solve(problem, method=method)
    cost, peak = evaluate(problem, solution.choice)
    assert cost == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert solution.cost == cost
    assert solution.peak == peak
    assert problem.usage_limit is None or peak <= problem.usage_limit
    assert solution.status == "optimal"
    assert solution.bound <= expected + 1e-6


@pytest.mark.parametrize("memory", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "float"])
@pytest.mark.parametrize("block", range(5))
def test_every_method_finds_the_brute_force_optimum(block: int, whole: bool, memory: bool) -> None:
    for seed in range(15 * block, 15 * (block + 1)):
        problem = random_problem(seed, memory=memory, whole=whole)
        expected = brute_force(problem)
        for method in METHODS:
            check(problem, method, expected)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "float"])
@pytest.mark.parametrize("ranges", [2, 4])
@pytest.mark.parametrize("block", range(4))
def test_nodes_with_several_live_ranges(block: int, ranges: int, whole: bool) -> None:
    for seed in range(2000 + 15 * block, 2000 + 15 * (block + 1)):
        problem = random_problem(seed, memory=True, whole=whole, ranges=ranges)
        expected = brute_force(problem)
        for method in METHODS:
            check(problem, method, expected)


@pytest.mark.parametrize("memory", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("promising", [1, 8])
def test_options_beside_promising_ones_are_not_missed(
    promising: int, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nodes have more options than are compared with all others, the optimum stays, and an
    assignment to begin from is never lost."""
    monkeypatch.setattr(prune, "_PROMISING", promising)
    pruned = []
    original = prune.prune_beside_promising

    def counted(*args: Any) -> int:
        pruned.append(original(*args))
        return pruned[-1]

    monkeypatch.setattr(solve_module, "prune_beside_promising", counted)
    for seed in range(4000, 4030):
        problem = random_problem(seed, memory=memory, whole=seed % 2 == 0, nodes=3, choices=12)
        expected = brute_force(problem)
        check(problem, "auto", expected)
        starts = [choice for choice in assignments(problem) if fits(problem, choice)]
        for start in starts[:: max(1, len(starts) // 3)]:
            assert solve(problem, start=start).cost == pytest.approx(expected)
    assert sum(pruned) > 100


@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("block", range(10))
def test_more_and_larger_problems(block: int, memory: bool) -> None:
    for seed in range(1000 + 40 * block, 1000 + 40 * (block + 1)):
        problem = random_problem(
            seed, memory=memory, whole=seed % 2 == 0, nodes=8, choices=3, ranges=1 + seed % 3
        )
        expected = brute_force(problem)
        for method in METHODS:
            check(problem, method, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_start_is_never_lost(method: str) -> None:
    """From any assignment within the limit: the optimum, and with no time at least the start."""
    for seed in range(3000, 3040):
        problem = random_problem(seed, memory=True, ranges=3)
        expected = brute_force(problem)
        starts = [choice for choice in assignments(problem) if fits(problem, choice)]
        for start in starts[:: max(1, len(starts) // 3)]:
            cost = evaluate(problem, start)[0]
            short = solve(problem, method=method, start=start, seconds=0)
            assert fits(problem, short.choice)
            assert short.bound <= expected <= short.cost <= cost
            assert solve(problem, method=method, start=start).cost == pytest.approx(expected)


def test_a_start_out_of_the_question_is_refused() -> None:
    problem = Problem(
        (
            Node("a", np.array([1.0, 0.0]), (Held(np.array([3.0, 9.0]), (0, 1)),)),
            Node("b", np.array([0.0, np.inf])),
        ),
        usage_limit=5.0,
    )
    assert solve(problem, start=(0, 0)).cost == 1.0
    for start, message in [
        ((1, 0), "peak of 9, expected at most the limit of 5"),
        ((0, 1), "forbidden choice or pair"),
        ((0,), "got 1 choices, expected 2"),
        ((0, 7), "got choice 7, expected 0 to 1"),
    ]:
        with pytest.raises(ProblemError, match=message):
            solve(problem, start=start)


def grid_problem(seed: int, side: int, choices: int, limit: float | None) -> Problem:
    """A grid, which elimination alone can not solve; every node lives through some rows."""
    random = np.random.default_rng(seed)
    nodes, edges = [], []
    for index in range(side * side):
        row = index // side
        costs = random.integers(0, 100, choices).astype(float)
        usages = np.sort(random.integers(0, 50, choices))[::-1].astype(float)
        nodes.append(
            Node(f"n{index}", costs + np.arange(choices) * 10, (Held(usages, (row, row + 2)),))
        )
        for other in ([index - 1] if index % side else []) + ([index - side] if row else []):
            matrix = random.integers(0, 60, (choices, choices)).astype(float)
            matrix[random.random(matrix.shape) < 0.2] = np.inf
            edges.append(Edge.from_dense(other, index, matrix))
    return Problem(tuple(nodes), tuple(edges), limit)


@pytest.mark.parametrize("seed", range(4))
def test_grids_with_a_tight_limit_agree_with_the_integer_program(seed: int) -> None:
    free = solve(grid_problem(seed, 4, 3, None))
    tight = grid_problem(seed, 4, 3, 0.85 * free.peak)
    expected = solve(tight, method="ilp")
    got = solve(tight)
    assert free.status == expected.status == got.status == "optimal"
    assert got.cost == expected.cost >= free.cost
    assert got.peak <= 0.85 * free.peak


def test_the_result_is_the_same_every_time() -> None:
    problem = grid_problem(7, 5, 4, 260.0)
    first, second = solve(problem), solve(problem)
    assert first.choice == second.choice
    assert first.bound == second.bound


@pytest.mark.parametrize("gap", [0.02, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_a_gap_that_is_allowed_bounds_the_cost(method: str, gap: float) -> None:
    for seed in range(4):
        problem = grid_problem(seed, 4, 3, 0.85 * solve(grid_problem(seed, 4, 3, None)).peak)
        optimum = solve(problem).cost
        solution = solve(problem, method=method, gap=gap)
        assert solution.bound <= optimum + 1e-6
        assert optimum <= solution.cost + 1e-6
        assert solution.gap <= gap + 1e-9
    with pytest.raises(ValueError, match="gap"):
        solve(problem, gap=-0.1)
