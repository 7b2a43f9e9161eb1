"""The memory limit as prices: a bound, and assignments along the way (Lagrangian relaxation).

With a price on memory instead of a limit, what every tensor and reshard holds is a cost like any
other, and the problem is one without memory, which elimination mostly decides at once. So the
dual function of the limit is known price by price::

    bound(p) = min over x of cost(x) + p . held(x)   -   p . limit

with a price and an amount held for every time of a step. Every such x is a *column*. The best
mixture of columns within the limit is a small linear program, whose duals are the prices to ask
next (Dantzig and Wolfe 1960); they are taken part of the way from the best prices so far
(Wentges 1997).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.passes.memory.step import Link, Part, StepMemory
from autopar.passes.solver import Edge, MatrixModel, Problem, Solution, evaluate, solve

#: How far the prices asked for are from the best ones towards the duals.
_TOWARDS = 0.6
#: The price of memory above the limit: for all that the unlimited optimum holds above it, this
#: part of what it costs. It grows by this factor where it turns out too low.
_FIRST, _DEARER, _MOST_RAISES = 1 / 16, 8.0, 12
#: How near the bound at one price is to the cost of its column, as a fraction.
_SOLVED = 1e-3


@dataclass(frozen=True, eq=False)
class Column:
    """An assignment.

    choice:
        of every node of the problem
    cost:
        without memory
    held:
        bytes in use at every time, float64 [end]
    """

    choice: tuple[int, ...]
    cost: float
    held: np.ndarray


@dataclass(eq=False)
class Relaxation:
    """What is known of a problem under a limit.

    problem:
        without memory
    memory:
        what its choices hold
    bound:
        no assignment within the limit is cheaper
    prices:
        of a byte at every time, where that bound was found, float64 [end]; to begin with, the
        first to ask for
    found:
        the columns so far
    above:
        the price of a byte above the limit
    cheapest:
        the solution of the problem, where it is known already
    tolerance:
        how near the mixture gets to the bound before no more prices are asked for, as a fraction
    priced_best:
        the column of the bound: the cheapest assignment at `prices`
    weights:
        how much of each column is in the last mixture
    """

    problem: Problem
    memory: StepMemory
    limit: float
    bound: float = -np.inf
    prices: np.ndarray = field(default_factory=lambda: np.zeros(0))
    found: list[Column] = field(default_factory=list)
    above: float = 0.0
    cheapest: Solution | None = None
    tolerance: float = 1e-3
    priced_best: Column | None = None
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def columns(self, seconds: float) -> Iterator[Column]:
        """Assignments at better and better prices, until the bound can't rise or time is up.

        They need not be within the limit.
        """
        until = time.perf_counter() + seconds
        if self.priced_best is None:
            column = self._first()
            yield column
            self.found.append(column)
            if not self.above:  # nothing has had a price yet
                excess = float(column.held.max(initial=0.0)) - self.limit
                if excess <= 0:
                    return
                self.above = _FIRST * max(abs(column.cost), 1e-300) / excess
        towards, raises = _TOWARDS, 0
        while time.perf_counter() < until:
            duals, cost, over = self.mixture()
            if cost - self.bound > self.tolerance * abs(cost):
                column = self.at(self.prices + towards * (duals - self.prices))
                again = any(column.choice == other.choice for other in self.found)
                if not again:
                    self.found.append(column)
                yield column
                if not again or towards < 1.0:
                    # Where the way to the duals held nothing new, they themselves may.
                    towards = 1.0 if again else _TOWARDS
                    continue
            if over <= 1e-9 * self.limit or raises == _MOST_RAISES:
                return
            self.above, raises, towards = self.above * _DEARER, raises + 1, _TOWARDS

    def _first(self) -> Column:
        if len(self.prices):
            return self.at(self.prices)
        free = np.zeros(self.memory.end)
        return self.at(free) if self.cheapest is None else self._column(free, self.cheapest)

    def at(self, prices: np.ndarray) -> Column:
        """The cheapest assignment where a byte costs `prices` at every time."""
        return self._column(prices, solve(self.priced(prices), gap=_SOLVED))

    def _column(self, prices: np.ndarray, solution: Solution) -> Column:
        cost, _ = evaluate(self.problem, solution.choice)
        column = Column(solution.choice, cost, self.memory.profile(solution.choice))
        bound = solution.bound - float(prices.sum()) * self.limit
        if bound > self.bound:
            self.bound, self.prices, self.priced_best = bound, prices, column
        return column

    def halves(self) -> tuple[Relaxation, ...]:
        """The same with one node's choices split in two: those that hold less, and the others.

        It is the node about whose memory the columns of the mixture disagree most. Nothing where
        they agree. The half in which the prices so far say something new comes first.
        """
        mixed = [(w, c) for w, c in zip(self.weights, self.found, strict=False) if w > 1e-6]
        weights = np.array([weight for weight, _ in mixed])
        widest, split = 0.0, None
        for node, paid in enumerate(self._paid()):
            mine = np.array([paid[column.choice[node]] for _, column in mixed])
            low, high = mine.min(initial=np.inf), mine.max(initial=-np.inf)
            if high - low <= 1e-9 * abs(high):
                continue
            mean = min(max(float(mine @ weights / weights.sum()), low), np.nextafter(high, low))
            spread = float(((mine - mean) ** 2) @ weights)
            if spread > widest * (1 + 1e-9):
                widest, split = spread, (node, paid <= mean)
        if split is None:
            return ()
        node, less = split
        halves = [self._only(node, half) for half in (less, ~less)]
        return tuple(sorted(halves, key=lambda half: half.priced_best is not None))

    def _paid(self) -> list[np.ndarray]:
        """About what each choice of each node pays for memory: reshards at their mean."""
        paid = [np.zeros(len(node.costs)) for node in self.problem.nodes]
        for node, nbytes in _node_prices(self.memory, self.prices):
            paid[node] = paid[node] + nbytes
        for link, part, price in _part_prices(self.memory, self.prices):
            if link.source != link.target:
                paid[link.source] += price * part.nbytes.mean(axis=1)[part.sources]
                paid[link.target] += price * part.nbytes.mean(axis=0)[part.targets]
        return paid

    def _only(self, node: int, kept: np.ndarray) -> Relaxation:
        one = self.problem.nodes[node]
        nodes = list(self.problem.nodes)
        nodes[node] = replace(one, costs=np.where(kept, one.costs, np.inf))
        best = self.priced_best
        same = best is not None and bool(kept[best.choice[node]])
        return Relaxation(
            replace(self.problem, nodes=tuple(nodes)),
            self.memory,
            self.limit,
            # What is cheapest of all is cheapest of its half: both start where this one ended.
            bound=self.bound if same else -np.inf,
            prices=self.prices,
            found=[column for column in self.found if kept[column.choice[node]]],
            above=self.above,
            tolerance=self.tolerance,
            priced_best=best if same else None,
        )

    def priced(self, prices: np.ndarray) -> Problem:
        """The problem in which whatever is held is paid for."""
        costs = [node.costs for node in self.problem.nodes]
        edges = list(self.problem.edges)
        for node, paid in _node_prices(self.memory, prices):
            costs[node] = costs[node] + paid
        for link, part, price in _part_prices(self.memory, prices):
            paid = price * part.nbytes
            if link.source == link.target:
                costs[link.source] = costs[link.source] + paid[part.sources, part.targets]
            else:
                edges.append(Edge(link.source, link.target, paid, part.sources, part.targets))
        nodes = tuple(
            node if priced is node.costs else replace(node, costs=priced)
            for node, priced in zip(self.problem.nodes, costs, strict=True)
        )
        return replace(self.problem, nodes=nodes, edges=tuple(edges))

    def mixture(self) -> tuple[np.ndarray, float, float]:
        """(prices, cost, bytes above the limit) of the best mixture of columns."""
        held = np.array([column.held for column in self.found])
        rows = np.flatnonzero((held > self.limit).any(axis=0))
        count, unit = len(self.found), self.limit
        model = MatrixModel()
        model.add_columns(np.array([column.cost for column in self.found]), 1.0)
        over = model.add_columns(np.array([self.above * unit]), np.inf)
        one = model.add_rows(np.ones(1), np.ones(1))
        model.add_entries(np.full(count, one), np.arange(count), 1.0)
        first = model.add_rows(np.full(len(rows), -np.inf), np.ones(len(rows)))
        at, column = np.divmod(np.arange(len(rows) * count), count)
        model.add_entries(first + at, column, held[column, rows[at]] / unit)
        model.add_entries(first + np.arange(len(rows)), np.full(len(rows), over), -1.0)
        outcome = model.solve(np.inf, np.zeros(model.columns, dtype=bool))
        assert outcome.values is not None and outcome.duals is not None
        self.weights = outcome.values[:count]
        prices = np.zeros(self.memory.end)
        prices[rows] = np.maximum(0.0, -outcome.duals[first:]) / unit
        return prices, outcome.bound, float(outcome.values[over]) * unit


def _node_prices(memory: StepMemory, prices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(node, what each of its choices pays) for all that nodes hold and that has a price."""
    total = _summed(prices)
    for node, held in enumerate(memory.held):
        for (lo, hi), usages in held:
            if total[hi] > total[lo]:
                yield node, (total[hi] - total[lo]) * usages


def _part_prices(memory: StepMemory, prices: np.ndarray) -> Iterator[tuple[Link, Part, float]]:
    """What reshards hold and that has a price, with the price of a byte of it."""
    total = _summed(prices)
    for link in memory.links:
        for part in link.parts:
            price = sum(n * (total[hi] - total[lo]) for (lo, hi), n in part.times.items())
            if price > 0:
                yield link, part, float(price)


def _summed(prices: np.ndarray) -> np.ndarray:
    """The prices of all times before each, float64 [end + 1]."""
    return np.concatenate([[0.0], np.cumsum(prices)])
