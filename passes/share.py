"""An assignment problem in which copies of one decision are one variable.

Costs of copies add up. Where every copy of an edge joins the same two variables, its matrix is
counted once per copy; where both of its ends are the same variable, the pair of choices is always
(x, x) and the matrix' diagonal becomes a cost of the variable. So a solution costs exactly what
the problem without sharing charges for the same choice in all copies::

    a0 -- b0    a1 -- b1    b0 -- a1        with a0 = a1 and b0 = b1:    a =2= b,  a -- b
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.passes.overlap import Parts
from autopar.passes.solver import Edge, Node, Problem


@dataclass(frozen=True, eq=False)
class Price:
    """What a pair of choices costs, as in `solver.Edge`; one object serves all equal edges.

    sent:
        how much of the costs brings gradients to parameters, None for nothing (`overlap.Parts`)
    """

    costs: np.ndarray
    u_class: np.ndarray
    v_class: np.ndarray
    sent: np.ndarray | None = None


class SharedProblem:
    """Collects variables and edges, each with the number of its copies."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._costs: list[np.ndarray] = []
        self._copies: list[int] = []
        self._covering: dict[int, np.ndarray] = {}
        self._edges: dict[tuple[int, int, Price], int] = {}
        self._last: dict[tuple[int, int, Price], int] = {}

    def add(
        self, name: str, costs: np.ndarray, copies: int = 1, covering: np.ndarray | None = None
    ) -> int:
        """A new variable; `costs` [choice] are those of one copy, and so is what it can cover of
        gradients on their way (`overlap.Parts`). Returns its index."""
        if covering is not None:
            self._covering[len(self._names)] = covering
        self._names.append(name)
        self._costs.append(np.asarray(costs, dtype=np.float64))
        self._copies.append(copies)
        return len(self._names) - 1

    def add_copy(self, index: int) -> None:
        """One more copy of a variable."""
        self._copies[index] += 1

    def connect(self, u: int, v: int, price: Price, copies: int = 1, last: int = 0) -> None:
        """An edge of which there are `copies` between two variables, or within one.

        Of `last` of them the gradients come last, and nothing hides them.
        """
        key = u, v, price
        self._edges[key] = self._edges.get(key, 0) + copies
        self._last[key] = self._last.get(key, 0) + last

    def problem(self) -> Problem:
        """The problem with all copies added up."""
        # A single copy keeps the array it was given: equal edges of a graph share theirs.
        costs = [c * n if n > 1 else c for c, n in zip(self._costs, self._copies, strict=True)]
        edges: list[Edge] = []
        for (u, v, price), copies in self._edges.items():
            if u == v:
                costs[u] = costs[u] + copies * price.costs[price.u_class, price.v_class]
            else:
                matrix = copies * price.costs if copies > 1 else price.costs
                edges.append(Edge(u, v, matrix, price.u_class, price.v_class))
        nodes = (Node(name, cost) for name, cost in zip(self._names, costs, strict=True))
        return Problem(tuple(nodes), tuple(edges))

    def parts(self) -> Parts:
        """What of the costs of `problem` runs beside what."""
        sent: dict[int, np.ndarray] = {}
        edges: list[np.ndarray | None] = []
        for (u, v, price), copies in self._edges.items():
            count = copies - self._last[u, v, price]
            part = None if price.sent is None or not count else count * price.sent
            if u != v:
                edges.append(part)
            elif part is not None:
                mine = part[price.u_class, price.v_class]
                sent[u] = sent[u] + mine if u in sent else mine
        covering = {i: self._copies[i] * part for i, part in self._covering.items()}
        return Parts(sent, tuple(edges), covering)
