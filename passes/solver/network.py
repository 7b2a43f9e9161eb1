"""The mutable cost network that reductions work on.

Nodes keep a cost vector over their remaining options and remember which choices of the
problem these options are. At most one link joins two nodes; it is stored once per direction,
over layout classes, so that products stay small where many options share a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Problem, identical_rows


@dataclass(frozen=True, eq=False, slots=True)
class Link:
    """One direction of an edge: ``costs`` [own classes, other classes] and class of each option."""

    costs: np.ndarray
    own: np.ndarray
    other: np.ndarray

    def reverse(self) -> Link:
        return Link(self.costs.T, self.other, self.own)

    def row(self, option: int) -> np.ndarray:
        """Costs against every option of the other node when this node takes ``option``."""
        return self.costs[self.own[option]][self.other]


@dataclass(eq=False)
class Network:
    """Cost vectors, links and the constant that reductions have paid so far.

    Attributes:
        unary: per node, float64 [k]; None once the node is eliminated.
        options: per node, the problem's choice behind each option.
        links: per node, neighbour -> Link seen from the node.
    """

    unary: list[np.ndarray | None]
    options: list[np.ndarray]
    links: list[dict[int, Link]]
    constant: float = 0.0

    @staticmethod
    def of(problem: Problem) -> Network:
        unary: list[np.ndarray | None] = [
            np.array(node.costs, dtype=np.float64) for node in problem.nodes
        ]
        network = Network(
            unary,
            [np.arange(len(node.costs)) for node in problem.nodes],
            [{} for _ in problem.nodes],
        )
        for edge in problem.edges:
            costs = np.asarray(edge.costs, dtype=np.float64)
            link = Link(costs, edge.u_class.astype(np.intp), edge.v_class.astype(np.intp))
            network.add_link(edge.u, edge.v, compact(link))
        return network

    def copy(self) -> Network:
        """A network that can be changed by itself; the arrays, never changed, are shared."""
        links = [dict(links) for links in self.links]
        return Network(list(self.unary), list(self.options), links, self.constant)

    def costs(self, node: int) -> np.ndarray:
        unary = self.unary[node]
        assert unary is not None, f"node {node} is eliminated"
        return unary

    def cost(self, options: Sequence[int]) -> float:
        """What an assignment costs, an option per node, where no node is eliminated."""
        total = self.constant + sum(float(self.costs(u)[x]) for u, x in enumerate(options))
        for u, links in enumerate(self.links):
            for v, link in links.items():
                if u < v:
                    total += float(link.costs[link.own[options[u]], link.other[options[v]]])
        return total

    def alive(self) -> list[int]:
        return [node for node, unary in enumerate(self.unary) if unary is not None]

    def add_link(self, u: int, v: int, link: Link) -> None:
        """Adds a link, summing it with the one that is there already."""
        present = self.links[u].get(v)
        if present is not None:
            link = _sum(present, link)
        self.links[u][v] = link
        self.links[v][u] = link.reverse()

    def drop_link(self, u: int, v: int) -> None:
        del self.links[u][v]
        del self.links[v][u]

    def keep(self, node: int, kept: np.ndarray) -> None:
        """Leaves the node only the options in ``kept`` (indices, ascending)."""
        self.unary[node] = self.costs(node)[kept]
        self.options[node] = self.options[node][kept]
        for neighbour, link in list(self.links[node].items()):
            self.set_link(node, neighbour, compact(Link(link.costs, link.own[kept], link.other)))

    def set_link(self, u: int, v: int, link: Link) -> None:
        self.links[u][v] = link
        self.links[v][u] = link.reverse()


def _sum(first: Link, second: Link) -> Link:
    rows, own = _joint(first.own, second.own, second.costs.shape[0])
    columns, other = _joint(first.other, second.other, second.costs.shape[1])
    costs = (
        first.costs[first.own[rows][:, None], first.other[columns]]
        + second.costs[second.own[rows][:, None], second.other[columns]]
    )
    return merged(costs, own, other)


def _joint(first: np.ndarray, second: np.ndarray, seconds: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes of pairs of classes: (an option of each, the class of every option)."""
    _, representative, joint = np.unique(
        first * seconds + second, return_index=True, return_inverse=True
    )
    return representative, joint.reshape(-1)


def merged(costs: np.ndarray, own: np.ndarray, other: np.ndarray) -> Link:
    """A link whose equal rows and equal columns are one class each."""
    first_rows, row_class = identical_rows(np.ascontiguousarray(costs))
    if len(first_rows) < len(costs):
        costs, own = costs[first_rows], row_class[own]
    first_columns, column_class = identical_rows(np.ascontiguousarray(costs.T))
    if len(first_columns) < costs.shape[1]:
        costs, other = costs[:, first_columns], column_class[other]
    return Link(costs, own, other)


def compact(link: Link) -> Link:
    """The link without classes that no option uses any more."""
    costs, own, other = link.costs, link.own, link.other
    used = np.bincount(own, minlength=costs.shape[0]) > 0
    if not used.all():
        costs, own = costs[used], (np.cumsum(used) - 1)[own]
    used = np.bincount(other, minlength=costs.shape[1]) > 0
    if not used.all():
        costs, other = costs[:, used], (np.cumsum(used) - 1)[other]
    return Link(costs, own, other)
