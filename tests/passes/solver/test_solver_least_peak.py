"""The smallest peak of any assignment, against brute force and against the solver itself."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.passes.solver import (
    Edge,
    Held,
    InfeasibleError,
    Node,
    Problem,
    evaluate,
    least_peak,
    solve,
)


def random_problem(seed: int) -> Problem:
    """Up to six nodes, each holding memory over up to three ranges, with forbidden pairs."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, int(random.integers(2, 7))).tolist()

    def forbidden(*shape: int) -> np.ndarray:
        return np.where(random.random(shape) < 0.2, np.inf, random.integers(0, 9, shape))

    def held(size: int) -> Held:
        lo = int(random.integers(0, 6))
        scale = 1.0 if seed % 2 else 1 / 3
        usages = scale * random.integers(0, 12, size)
        return Held(usages, (lo, int(random.integers(lo, 8))))

    nodes = tuple(
        Node(f"n{k}", forbidden(size), tuple(held(size) for _ in range(random.integers(4))))
        for k, size in enumerate(sizes)
    )
    edges = []
    for _ in range(int(random.integers(0, 2 * len(sizes)))):
        u, v = (int(end) for end in random.choice(len(sizes), 2, replace=False))
        edges.append(Edge.from_dense(u, v, forbidden(sizes[u], sizes[v])))
    return Problem(nodes, tuple(edges))


def brute_force(problem: Problem) -> float:
    """The least peak of an assignment of finite cost; ``inf`` where there is none."""
    shape = tuple(len(node.costs) for node in problem.nodes)
    scored = (evaluate(problem, choice) for choice in np.ndindex(shape))
    return min((peak for cost, peak in scored if np.isfinite(cost)), default=np.inf)


@pytest.mark.parametrize("block", range(6))
def test_it_is_the_brute_force_optimum(block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if expected == np.inf:
            with pytest.raises(InfeasibleError) as raised:
                least_peak(problem)
            assert raised.value.proven
            continue
        found = least_peak(problem)
        cost, peak = evaluate(problem, found.choice)
        assert np.isfinite(cost)
        assert found.peak == peak == pytest.approx(expected)
        assert found.bound <= expected + 1e-9
        assert found.bound == pytest.approx(expected)


def test_at_the_least_peak_there_is_a_solution_and_below_there_is_none() -> None:
    random = np.random.default_rng(3)
    nodes = tuple(
        Node(
            f"n{k}",
            random.integers(0, 50, 4).astype(float),
            tuple(
                Held(random.integers(1, 40, 4).astype(float), (k + 3 * copy, k + 3 * copy + 5))
                for copy in range(3)
            ),
        )
        for k in range(14)
    )
    edges = tuple(
        Edge.from_dense(k, k + step, random.integers(0, 30, (4, 4)).astype(float))
        for step in (1, 3)
        for k in range(14 - step)
    )
    found = least_peak(Problem(nodes, edges))
    assert found.bound == found.peak
    at = solve(Problem(nodes, edges, found.peak))
    assert at.peak == found.peak
    with pytest.raises(InfeasibleError) as raised:
        solve(Problem(nodes, edges, found.peak - 1))
    assert raised.value.proven


def test_without_memory_it_is_nothing() -> None:
    found = least_peak(Problem((Node("a", np.array([np.inf, 3.0])), Node("b", np.zeros(2)))))
    assert (found.peak, found.bound, found.choice) == (0.0, 0.0, (1, 0))


def test_no_time_still_gives_an_honest_answer() -> None:
    for seed in range(30):
        problem = random_problem(seed)
        expected = brute_force(problem)
        if expected == np.inf:
            continue
        found = least_peak(problem, seconds=0)
        assert found.bound <= expected + 1e-9 <= found.peak + 2e-9


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="seconds: got -1"):
        least_peak(Problem(()), seconds=-1)
