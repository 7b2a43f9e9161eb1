"""Putting memory carriers on the nodes of an assignment problem, which have one live range each.

What does not fit on a node goes on nodes of its own that follow it. They cost nothing and have one
or two neighbours, so the solver eliminates them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.memory_usage import Carrier, Copy
from autopar.passes.solver import Edge, Held, Node


@dataclass(frozen=True, eq=False)
class Tie:
    """A problem node that only carries memory and follows others.

    node:
        its index
    owners:
        the indices of the nodes it follows, one or two
    follows:
        its choice for each choice of the owners, int [choices, ...]
    """

    node: int
    owners: tuple[int, ...]
    follows: np.ndarray

    def choice(self, chosen: Sequence[int]) -> int:
        """Its choice, given those of the owners (indexed as the problem's nodes are)."""
        return int(self.follows[tuple(chosen[owner] for owner in self.owners)])


@dataclass(frozen=True)
class Added:
    """What carrying memory adds to a problem; the nodes are numbered from where it was said."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()
    ties: tuple[Tie, ...] = ()


def hold(
    node: Node, index: int, carriers: Sequence[Carrier], next_index: int
) -> tuple[Node, Added]:
    """The problem node `index` with the carrier that holds most for longest, and the others.

    Each other carrier gets a node with one choice per distinct usage, tied to `index` by an edge
    that forbids what does not belong together.
    """
    if not carriers:
        return node, Added()
    order = sorted(range(len(carriers)), key=lambda k: -_weight(carriers[k]))
    main = carriers[order[0]]
    nodes: list[Node] = []
    edges: list[Edge] = []
    ties: list[Tie] = []
    for k in sorted(order[1:]):
        usages, follows = np.unique(carriers[k].usages, return_inverse=True)
        follows = follows.reshape(-1).astype(np.intp)
        name = f"memory of {node.name}, {carriers[k].what}"
        own = next_index + len(nodes)
        nodes.append(Node(name, np.zeros(len(usages)), (Held(usages, carriers[k].interval),)))
        same = _allowed(np.eye(len(usages), dtype=bool))
        edges.append(Edge(index, own, same, follows, np.arange(len(usages), dtype=np.intp)))
        ties.append(Tie(own, (index,), follows))
    held = Node(node.name, node.costs, (Held(main.usages, main.interval),))
    return held, Added(tuple(nodes), tuple(edges), tuple(ties))


def hold_copy(name: str, copy: Copy, maker: int, use: int, next_index: int) -> Added:
    """The node that carries the copy of a value between the problem nodes `maker` and `use`.

    Its choices are pairs of the layout asked for and whether it is a copy. The edge to `use`
    fixes the first; the edge to `maker` admits "no copy" only where the layouts are equal.
    """
    if not copy.carriers:
        return Added()
    count = len(copy.classes)
    number = {dims: k for k, dims in enumerate(copy.classes)}
    asked = np.array([number[dims] for dims in copy.asked], dtype=np.intp)
    # Layouts that nobody asks for are one more class of the maker's.
    made = np.array([number.get(dims, count) for dims in copy.made], dtype=np.intp)
    choices = np.arange(2 * count, dtype=np.intp)
    wanted = np.tile(np.eye(count, dtype=bool), 2)
    equal = np.vstack([np.eye(count, dtype=bool), np.zeros((1, count), dtype=bool)])
    possible = np.hstack([equal, np.ones_like(equal)])
    follows = asked[None, :] + count * (made[:, None] != asked[None, :])
    node, added = hold(Node(name, np.zeros(2 * count)), next_index, copy.carriers, next_index + 1)
    between = (
        Edge(maker, next_index, _allowed(possible), made, choices),
        Edge(use, next_index, _allowed(wanted), asked, choices),
    )
    own = Tie(next_index, (maker, use), follows)
    return Added((node, *added.nodes), (*between, *added.edges), (own, *added.ties))


def _weight(carrier: Carrier) -> float:
    lo, hi = carrier.interval
    return float(carrier.usages.max()) * (hi - lo)


def _allowed(pairs: np.ndarray) -> np.ndarray:
    """Edge costs: nothing where a pair is allowed."""
    return np.where(pairs, 0.0, np.inf)
