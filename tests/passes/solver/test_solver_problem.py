"""What a problem may look like, and what its errors say."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.passes.solver import Edge, Held, Node, Problem, ProblemError, Solution, evaluate

TWO = (Node("a", np.zeros(2)), Node("b", np.zeros(3)))


def holder(usages: np.ndarray, interval: tuple[int, int] = (0, 1), choices: int = 1) -> Node:
    return Node("x", np.zeros(choices), (Held(usages, interval),))


def edge(costs: np.ndarray, u: int = 0, v: int = 1) -> Edge:
    rows, columns = costs.shape
    return Edge(u, v, costs, np.arange(rows), np.arange(columns))


def test_from_dense_merges_equal_rows_and_columns() -> None:
    matrix = np.array([[1.0, 2.0, 1.0], [1.0, 2.0, 1.0], [3.0, np.inf, 3.0]])
    made = Edge.from_dense(0, 1, matrix)
    assert made.costs.tolist() == [[1.0, 2.0], [3.0, np.inf]]
    assert made.u_class.tolist() == [0, 0, 1]
    assert made.v_class.tolist() == [0, 1, 0]
    np.testing.assert_array_equal(made.dense(), matrix)


def test_evaluate_adds_nodes_edges_and_parallel_edges() -> None:
    nodes = (
        Node("a", np.array([1.0, 2.0]), (Held(np.array([5.0, 0.0]), (0, 2)),)),
        Node("b", np.array([10.0, 20.0]), (Held(np.array([1.0, 7.0]), (1, 3)),)),
        Node("c", np.array([0.5]), (Held(np.array([4.0]), (2, 2)),)),
    )
    first = edge(np.array([[0.0, 3.0], [4.0, 0.0]]))
    second = edge(np.array([[0.0, 0.0], [6.0, 0.0]]), 1, 0)
    problem = Problem(nodes, (first, second))
    assert evaluate(problem, [0, 1, 0]) == (1 + 20 + 0.5 + 3 + 6, 12.0)
    assert evaluate(problem, [1, 1, 0]) == (2 + 20 + 0.5, 7.0)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ([0], "assignment: got 1 choices, expected 2"),
        ([0, 3], "assignment of b: got choice 3, expected 0 to 2"),
        ([-1, 0], "assignment of a: got choice -1, expected 0 to 1"),
    ],
)
def test_evaluate_refuses_what_is_no_assignment(choice: list[int], message: str) -> None:
    with pytest.raises(ProblemError) as raised:
        evaluate(Problem(TWO), choice)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node("x", np.zeros(0)), "node 0 (x): got no choices"),
        (Node("x", np.zeros((1, 2))), "node 0 (x): got costs of 2 dimensions, expected 1"),
        (Node("x", np.array([np.nan])), "node 0 (x): got costs with nan or -inf"),
        (Node("x", np.array([-np.inf])), "node 0 (x): got costs with nan or -inf"),
        (Node("x", np.array(["1"])), "node 0 (x): got costs ndarray, expected a numeric array"),
        (Node("x", [1.0]), "node 0 (x): got costs list, expected a numeric array"),  # type: ignore[arg-type]
        (holder(np.zeros(3), choices=2), "node 0 (x): got 3 usages for 2 costs"),
        (holder(np.array([-1.0])), "node 0 (x): got usages [-1.]"),
        (holder(np.array([np.inf])), "node 0 (x): got usages [inf]"),
        (holder(np.zeros(1), (3, 2)), "node 0 (x): got interval [3, 2)"),
        (holder(np.zeros(1), (-1, 2)), "node 0 (x): got interval [-1, 2)"),
    ],
)
def test_a_malformed_node_is_named(node: Node, message: str) -> None:
    with pytest.raises(ProblemError) as raised:
        Problem((node,))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (edge(np.zeros((2, 3)), 0, 2), "edge 0 (0-2): got node 2, expected 0 to 1"),
        (edge(np.zeros((2, 2)), 0, 0), "edge 0 (0-0): got the same node twice"),
        (edge(np.zeros((3, 3))), "edge 0 (0-1): got classes of shape (3,) for node 0 (a)"),
        (edge(np.full((2, 3), np.nan)), "edge 0 (0-1): got costs with nan or -inf"),
        (
            Edge(0, 1, np.zeros((1, 3)), np.array([0, 1]), np.arange(3)),
            "edge 0 (0-1): got classes [0 1] for node 0 (a), expected integers from 0 to 0",
        ),
        (
            Edge(0, 1, np.zeros((2, 3)), np.array([0.0, 1.0]), np.arange(3)),
            "edge 0 (0-1): got classes [0. 1.] for node 0 (a)",
        ),
    ],
)
def test_a_malformed_edge_is_named(bad: Edge, message: str) -> None:
    with pytest.raises(ProblemError) as raised:
        Problem(TWO, (bad,))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_malformed_limit_is_refused(limit: float) -> None:
    with pytest.raises(ProblemError, match="usage limit"):
        Problem(TWO, (), limit)


def test_the_gap_is_a_fraction_of_the_cost() -> None:
    assert Solution((), 200.0, 190.0, 0.0, "feasible").gap == pytest.approx(0.05)
    assert Solution((), 200.0, 200.0, 0.0, "optimal").gap == 0.0
