"""Exact elimination of nodes with at most two neighbours, by (min,+) products.

A node without neighbours takes its cheapest option; one with a single neighbour becomes a cost
vector on it; one with two becomes a link between them (R0, R1 and R2 of the partitioned boolean
quadratic problem). Nothing is lost: whatever the rest is decided to be, the eliminated nodes'
best options follow by walking back.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .network import Link, Network, merged

# Elements of a temporary in a (min,+) product: 32 Ki float64 stay in the second-level cache.
_CHUNK = 1 << 15


@dataclass(frozen=True, eq=False, slots=True)
class _Eliminated:
    """What is needed to choose for the node once its neighbours are decided.

    ``options`` and the arrays beside the links are the problem's choices behind the options of
    the node and of its neighbours, as they were then.
    """

    node: int
    unary: np.ndarray
    options: np.ndarray
    links: tuple[tuple[int, Link, np.ndarray], ...]


class Reduction:
    """Eliminates what it can from ``network`` in place; ``expand`` walks back.

    Ties go to the lowest option, and the order of elimination is fixed by degree, size and
    index, so the result is deterministic.
    """

    def __init__(
        self, network: Network, may_eliminate: Callable[[int], bool] = lambda node: True
    ) -> None:
        self.network = network
        self._may_eliminate = may_eliminate
        self._trail: list[_Eliminated] = []
        self._products: dict[bytes, tuple[np.ndarray, float]] = {}
        self._queue: list[tuple[int, int, int]] = []

    @property
    def eliminated(self) -> int:
        return len(self._trail)

    def run(self) -> Reduction:
        """Eliminates until every remaining node has three neighbours or more."""
        network = self.network
        for node in network.alive():
            self._offer(node)
        while self._queue:
            degree, size, node = heapq.heappop(self._queue)
            if network.unary[node] is None or (degree, size) != self._rank(node):
                continue
            self._eliminate(node)
        return self

    def _rank(self, node: int) -> tuple[int, int]:
        """(degree, elements of the product); a node with one option counts as degree 0."""
        links = self.network.links[node]
        if len(self.network.costs(node)) == 1:
            return 0, 0
        if len(links) > 2:
            return len(links), 0
        size = 1
        for link in links.values():
            size *= link.costs.size
        return len(links), size

    def _offer(self, node: int) -> None:
        degree, size = self._rank(node)
        if degree <= 2 and self._may_eliminate(node):
            heapq.heappush(self._queue, (degree, size, node))

    def _eliminate(self, node: int) -> None:
        network = self.network
        unary = network.costs(node)
        neighbours = tuple(sorted(network.links[node].items()))
        behind = tuple((other, link, network.options[other]) for other, link in neighbours)
        self._trail.append(_Eliminated(node, unary, network.options[node], behind))
        for neighbour, _ in neighbours:
            network.drop_link(node, neighbour)
        network.unary[node] = None
        if not neighbours:
            network.constant += float(unary.min())
        elif len(unary) == 1:
            network.constant += float(unary[0])
            for neighbour, link in neighbours:
                network.unary[neighbour] = network.costs(neighbour) + link.row(0)
        elif len(neighbours) == 1:
            neighbour, link = neighbours[0]
            message = (group_min(unary, link.own, len(link.costs))[:, None] + link.costs).min(0)
            network.unary[neighbour] = network.costs(neighbour) + message[link.other]
        else:
            (a, to_a), (b, to_b) = neighbours
            costs, lowest = self._product(unary, to_a, to_b)
            network.constant += lowest
            if costs.any():  # a zero matrix ties nothing
                network.add_link(a, b, merged(costs, to_a.other, to_b.other))
        for neighbour, _ in neighbours:
            self._offer(neighbour)

    def _product(self, unary: np.ndarray, to_a: Link, to_b: Link) -> tuple[np.ndarray, float]:
        """(costs between the classes of a and b, the minimum taken out), cached by contents."""
        joint = to_a.own * len(to_b.costs) + to_b.own
        pairs, group = np.unique(joint, return_inverse=True)
        weight = group_min(unary, group.reshape(-1), len(pairs))
        left = to_a.costs[pairs // len(to_b.costs)] + weight[:, None]
        right = to_b.costs[pairs % len(to_b.costs)]
        digest = hashlib.blake2b(left.tobytes(), digest_size=16)
        digest.update(right.tobytes())
        digest.update(repr((left.shape, right.shape)).encode())
        key = digest.digest()
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = _take_lowest(min_plus(left, right))
        return found

    def expand(self, choice: dict[int, int]) -> dict[int, int]:
        """The problem's choices of all nodes from those of the remaining ones."""
        choice = dict(choice)
        for step in reversed(self._trail):
            costs = step.unary
            for neighbour, link, options in step.links:
                option = int(np.searchsorted(options, choice[neighbour]))
                costs = costs + link.costs[:, link.other[option]][link.own]
            choice[step.node] = int(step.options[costs.argmin()])
        return choice


def group_min(values: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """The minimum of ``values`` [k] in each group, float64 [groups]; ``inf`` where empty."""
    lowest = np.full(groups, np.inf)
    np.minimum.at(lowest, group, values)
    return lowest


def min_plus(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``out[i, j] = min_g left[g, i] + right[g, j]`` for [g, n] and [g, m]."""
    rows = left.shape[1]
    out = np.empty((rows, right.shape[1]))
    step = max(1, _CHUNK // max(1, right.size))
    left = np.ascontiguousarray(left.T)
    for start in range(0, rows, step):
        block = left[start : start + step, :, None] + right
        block.min(axis=1, out=out[start : start + step])
    return out


def _take_lowest(costs: np.ndarray) -> tuple[np.ndarray, float]:
    lowest = float(costs.min())
    if not np.isfinite(lowest):
        return costs, 0.0
    return costs - lowest, lowest
