"""Infeasible problems, time limits, and what a caller is told."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from autopar.passes.solver import (
    Edge,
    Held,
    InfeasibleError,
    Node,
    Problem,
    Progress,
    clock,
    evaluate,
    solve,
)

METHODS = ("auto", "ilp", "reduce")


def ring(count: int, choices: int, seed: int, limit: float | None) -> Problem:
    """A ring with chords, all nodes live at once: more cost buys less memory."""
    random = np.random.default_rng(seed)
    nodes = tuple(
        Node(
            f"n{index}",
            np.sort(random.integers(0, 100, choices)).astype(float),
            (Held(np.sort(random.integers(0, 100, choices))[::-1].astype(float), (0, 1)),),
        )
        for index in range(count)
    )
    edges = tuple(
        Edge.from_dense(
            index, (index + step) % count, random.integers(0, 50, (choices, choices)).astype(float)
        )
        for step in (1, 5)
        for index in range(count)
    )
    return Problem(nodes, edges, limit)


def two_nodes(limit: float) -> Problem:
    """The second node is cheap only where the first holds much."""
    nodes = (
        Node("a", np.array([0.0, 0.0]), (Held(np.array([9.0, 2.0]), (0, 2)),)),
        Node("b", np.array([0.0, 5.0]), (Held(np.array([4.0, 3.0]), (1, 3)),)),
    )
    forbidden = Edge.from_dense(0, 1, np.array([[0.0, 0.0], [np.inf, np.inf]]))
    return Problem(nodes, (forbidden,), limit)


@pytest.mark.parametrize("method", METHODS)
def test_no_nodes_cost_nothing(method: str) -> None:
    solution = solve(Problem(()), method=method)
    assert (solution.choice, solution.cost, solution.status) == ((), 0.0, "optimal")


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_below_every_assignment_is_infeasible(method: str) -> None:
    with pytest.raises(InfeasibleError, match="limit of 11") as raised:
        solve(two_nodes(11.0), method=method)
    assert raised.value.proven
    assert raised.value.peak_bound is not None and raised.value.peak_bound <= 12.0


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_that_is_met_exactly_fits(method: str) -> None:
    solution = solve(two_nodes(12.0), method=method)
    assert (solution.choice, solution.cost, solution.peak) == ((0, 1), 5.0, 12.0)


@pytest.mark.parametrize("method", METHODS)
def test_forbidden_everywhere_is_infeasible(method: str) -> None:
    matrix = np.full((2, 2), np.inf)
    problem = Problem(
        (Node("a", np.zeros(2)), Node("b", np.zeros(2))), (Edge.from_dense(0, 1, matrix),)
    )
    with pytest.raises(InfeasibleError) as raised:
        solve(problem, method=method)
    assert raised.value.proven


@pytest.mark.parametrize("method", METHODS)
def test_a_node_with_forbidden_choices_only_is_infeasible(method: str) -> None:
    with pytest.raises(InfeasibleError):
        solve(Problem((Node("a", np.array([np.inf])),)), method=method)


def test_the_odd_ring_of_forbidden_equals_is_proven_infeasible() -> None:
    """Every pair has support, so only a search can see it: five nodes, two colours."""
    different = np.array([[np.inf, 0.0], [0.0, np.inf]])
    nodes = tuple(Node(f"n{index}", np.zeros(2)) for index in range(5))
    edges = tuple(Edge.from_dense(index, (index + 1) % 5, different) for index in range(5))
    for method in METHODS:
        with pytest.raises(InfeasibleError) as raised:
            solve(Problem(nodes, edges), method=method)
        assert raised.value.proven


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [None, 700.0])
def test_zero_seconds_give_an_honest_answer_or_a_clear_error(
    method: str, limit: float | None
) -> None:
    problem = ring(14, 4, 0, limit)
    try:
        solution = solve(problem, seconds=0, method=method)
    except InfeasibleError as error:
        assert not error.proven
        assert "time" in str(error)
        return
    cost, peak = evaluate(problem, solution.choice)
    assert solution.cost == cost and (limit is None or peak <= limit)
    assert solution.bound <= solve(problem).cost


def test_the_bound_of_a_cut_off_solve_is_below_the_optimum() -> None:
    problem = ring(14, 4, 1, 700.0)
    best = solve(problem)
    assert best.status == "optimal"
    try:
        short = solve(problem, seconds=0.02)
    except InfeasibleError as error:
        assert not error.proven
        return
    assert short.bound <= best.cost <= short.cost
    assert short.peak <= 700.0


def test_a_tighter_limit_never_gets_cheaper() -> None:
    free = solve(ring(12, 3, 2, None))
    costs = [solve(ring(12, 3, 2, part * free.peak)).cost for part in (1.0, 0.9, 0.85, 0.8)]
    assert costs[0] == free.cost
    assert costs == sorted(costs)
    assert costs[-1] > costs[0]


def test_progress_only_gets_better_and_ends_at_the_solution() -> None:
    reports: list[Progress] = []
    solution = solve(ring(14, 4, 3, 700.0), progress=reports.append)
    assert reports
    for before, after in itertools.pairwise(reports):
        assert after.best <= before.best
        assert after.bound >= before.bound
        assert after.seconds >= before.seconds
    assert reports[-1].best == solution.cost
    assert {stage.name for stage in solution.stages} >= {"prune", "reduce"}
    assert all(stage.seconds >= 0 for stage in solution.stages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "method: got 'magic'"),
        ({"seconds": -1.0}, "seconds: got -1.0"),
        ({"seconds": float("nan")}, "seconds: got nan"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(Problem(()), **arguments)


@pytest.mark.parametrize("seconds", [0, 1])
@pytest.mark.parametrize("count", [4, 64, 1024])
def test_a_chain_is_eliminated_exactly(count: int, seconds: float) -> None:
    random = np.random.default_rng(count)
    costs = random.integers(0, 50, (count, 3)).astype(float)
    between = random.integers(0, 50, (count - 1, 3, 3)).astype(float)
    nodes = tuple(
        Node(f"n{k}", costs[k], (Held(np.arange(3.0), (k, k + 2)),)) for k in range(count)
    )
    edges = tuple(Edge.from_dense(k, k + 1, between[k]) for k in range(count - 1))
    best = costs[0]
    for k in range(1, count):
        best = costs[k] + (best[:, None] + between[k - 1]).min(axis=0)
    for method in ("auto", "reduce"):
        solution = solve(Problem(nodes, edges), seconds=seconds, method=method)
        assert (solution.cost, solution.bound, solution.status) == (
            best.min(),
            best.min(),
            "optimal",
        )


def test_a_hard_limit_without_a_budget_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_PATIENCE", 0.5)
    problem = ring(40, 8, 5, 900.0)
    began = time.monotonic()
    solution = solve(problem)
    assert time.monotonic() - began < 60
    assert evaluate(problem, solution.choice) == (solution.cost, solution.peak)
    assert solution.peak <= 900.0
    assert solution.bound <= solution.cost


@pytest.mark.parametrize("method", METHODS)
def test_the_budget_is_kept(method: str) -> None:
    problem = ring(40, 10, 6, 1000.0)
    began = time.process_time()
    try:
        solution = solve(problem, seconds=1.0, method=method)
    except InfeasibleError as error:
        assert not error.proven
    else:
        assert solution.peak <= 1000.0
    assert time.process_time() - began < 4
