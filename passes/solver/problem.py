"""The assignment problem: choose one option per node, pay for nodes and for edges.

    minimise    sum_i costs_i[x_i]  +  sum_(u,v) costs_uv[x_u, x_v]
    subject to  at every time t:  sum of usages_ih[x_i] over holds h live at t  <=  usage_limit

It knows nothing of tensors: a caller states choices, costs, memory use and live ranges. A node
may hold memory over several live ranges, and what it holds then follows from its one choice.
An infinite cost forbids a choice or a pair of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ProblemError

# Times are 64-bit integers, with room to spare.
_LAST_TIME = 2**62


@dataclass(frozen=True, eq=False)
class Held:
    """Memory that a node holds over one live range.

    Attributes:
        usages: float64 [k], the memory each choice holds.
        interval: half-open live range ``[lo, hi)`` in schedule time; empty holds no memory.
    """

    usages: np.ndarray
    interval: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Node:
    """One decision.

    Attributes:
        name: how messages call it.
        costs: float64 [k], the cost of each choice; ``inf`` forbids the choice.
        held: the memory it holds, one entry per live range; where ranges overlap, it adds up.
    """

    name: str
    costs: np.ndarray
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost between two decisions, stored over classes of choices that behave alike.

    Attributes:
        u, v: indices of the two nodes, ``u != v``.
        costs: float64 [Lu, Lv] over layout classes; ``inf`` forbids the pair.
        u_class: int [k_u], the layout class of each choice of ``u``.
        v_class: int [k_v], the layout class of each choice of ``v``.
    """

    u: int
    v: int
    costs: np.ndarray
    u_class: np.ndarray
    v_class: np.ndarray

    def dense(self) -> np.ndarray:
        """The cost of every pair of choices, float64 [k_u, k_v]."""
        return self.costs[self.u_class[:, None], self.v_class]

    @staticmethod
    def from_dense(u: int, v: int, matrix: np.ndarray) -> Edge:
        """An edge from the costs of all pairs [k_u, k_v]; equal rows and columns are merged."""
        matrix = np.ascontiguousarray(matrix, dtype=np.float64)
        if matrix.ndim != 2:
            raise ProblemError(
                f"edge {u}-{v}: got costs of {matrix.ndim} dimensions, expected [k_u, k_v]"
            )
        first_rows, u_class = identical_rows(matrix)
        rows = matrix[first_rows]
        first_columns, v_class = identical_rows(np.ascontiguousarray(rows.T))
        return Edge(u, v, np.ascontiguousarray(rows[:, first_columns]), u_class, v_class)


def identical_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups equal rows of a C-contiguous [n, m]: (first row of each class, class [n])."""
    classes: dict[bytes, int] = {}
    first: list[int] = []
    of_row = np.empty(len(matrix), dtype=np.intp)
    for index, row in enumerate(matrix):
        key = row.tobytes()
        found = classes.get(key)
        if found is None:
            found = classes[key] = len(first)
            first.append(index)
        of_row[index] = found
    return np.asarray(first, dtype=np.intp), of_row


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, edges and an optional memory limit; parallel edges add up.

    Raises:
        ProblemError: a shape, an index, a number or an interval is wrong; the message names
            the node or edge.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    usage_limit: float | None = None

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            _check_node(index, node)
        for index, edge in enumerate(self.edges):
            _check_edge(index, edge, self.nodes)
        limit = self.usage_limit
        if limit is not None and not limit >= 0:
            raise ProblemError(f"usage limit: got {limit}, expected a number >= 0 or None")


@dataclass(frozen=True)
class Stage:
    """One step of a solve: what it did and how long it took."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class Solution:
    """An assignment within the memory limit, and how good it is proven to be.

    Attributes:
        choice: the chosen option of every node.
        cost: the total cost of ``choice``.
        bound: a proven lower bound on the cost of every assignment within the limit.
        peak: the largest memory in use at any time.
        status: "optimal" when cost and bound meet, else "feasible".
        stages: what the solver did, in order.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    peak: float
    status: str
    stages: tuple[Stage, ...] = ()

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, as a fraction of the cost."""
        difference = self.cost - self.bound
        return 0.0 if difference <= 0 else difference / max(abs(self.cost), 1e-300)


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
    """The (cost, peak memory) of an assignment.

    Raises:
        ProblemError: the assignment has the wrong length or an index out of range.
    """
    nodes = problem.nodes
    if len(choice) != len(nodes):
        raise ProblemError(f"assignment: got {len(choice)} choices, expected {len(nodes)}")
    for node, chosen in zip(nodes, choice, strict=True):
        if not 0 <= chosen < len(node.costs):
            raise ProblemError(
                f"assignment of {node.name}: got choice {chosen}, "
                f"expected 0 to {len(node.costs) - 1}"
            )
    cost = sum(float(node.costs[x]) for node, x in zip(nodes, choice, strict=True))
    for edge in problem.edges:
        cost += float(edge.costs[edge.u_class[choice[edge.u]], edge.v_class[choice[edge.v]]])
    return cost, _peak(problem, choice)


def _peak(problem: Problem, choice: Sequence[int]) -> float:
    change: dict[int, float] = {}
    for node, x in zip(problem.nodes, choice, strict=True):
        for held in node.held:
            lo, hi = held.interval
            if lo < hi:
                usage = float(held.usages[x])
                change[lo] = change.get(lo, 0.0) + usage
                change[hi] = change.get(hi, 0.0) - usage
    peak = live = 0.0
    for time in sorted(change):
        live += change[time]
        peak = max(peak, live)
    return peak


def _check_node(index: int, node: Node) -> None:
    name = f"node {index} ({node.name})"
    costs = _numbers(name, "costs", node.costs, 1)
    if costs.size == 0:
        raise ProblemError(f"{name}: got no choices, expected at least one")
    if not isinstance(node.held, tuple):
        raise ProblemError(f"{name}: got held {type(node.held).__name__}, expected a tuple of Held")
    for held in node.held:
        _check_held(name, held, len(costs))


def _check_held(name: str, held: Held, choices: int) -> None:
    if not isinstance(held, Held):
        raise ProblemError(f"{name}: got {type(held).__name__} in held, expected Held")
    usages = _numbers(name, "usages", held.usages, 1)
    if usages.size != choices:
        raise ProblemError(f"{name}: got {usages.size} usages for {choices} costs")
    if usages.min() < 0 or not np.isfinite(usages.max()):
        raise ProblemError(f"{name}: got usages {usages}, expected finite numbers >= 0")
    if len(held.interval) != 2:
        raise ProblemError(f"{name}: got interval {held.interval}, expected (lo, hi)")
    lo, hi = held.interval
    if not 0 <= lo <= hi <= _LAST_TIME:
        raise ProblemError(f"{name}: got interval [{lo}, {hi}), expected 0 <= lo <= hi < 2^62")


def _check_edge(index: int, edge: Edge, nodes: tuple[Node, ...]) -> None:
    name = f"edge {index} ({edge.u}-{edge.v})"
    for end in (edge.u, edge.v):
        if not 0 <= end < len(nodes):
            raise ProblemError(f"{name}: got node {end}, expected 0 to {len(nodes) - 1}")
    if edge.u == edge.v:
        raise ProblemError(f"{name}: got the same node twice, expected two different nodes")
    costs = _numbers(name, "costs", edge.costs, 2)
    ends = ((edge.u, edge.u_class, costs.shape[0]), (edge.v, edge.v_class, costs.shape[1]))
    for end, of_choice, classes in ends:
        choices = len(nodes[end].costs)
        if of_choice.shape != (choices,):
            raise ProblemError(
                f"{name}: got classes of shape {of_choice.shape} for node {end} "
                f"({nodes[end].name}), expected ({choices},)"
            )
        if of_choice.dtype.kind not in "iu" or of_choice.min() < 0 or of_choice.max() >= classes:
            raise ProblemError(
                f"{name}: got classes {of_choice} for node {end} ({nodes[end].name}), "
                f"expected integers from 0 to {classes - 1}"
            )


def _numbers(name: str, what: str, values: np.ndarray, dimensions: int) -> np.ndarray:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise ProblemError(f"{name}: got {what} {type(values).__name__}, expected a numeric array")
    if values.ndim != dimensions:
        raise ProblemError(f"{name}: got {what} of {values.ndim} dimensions, expected {dimensions}")
    if values.size and not values.min() > -np.inf:  # false for nan as well
        raise ProblemError(f"{name}: got {what} with nan or -inf, expected numbers or inf")
    return values
