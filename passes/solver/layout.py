"""A network as flat arrays: what message passing, the integer program and scoring work on.

Options of all nodes stand in one array, node after node; classes of all edge ends are *slots*
in another; the costs of all links in a third. Nodes are sorted by level: a node's level is the
length of the longest chain of neighbours before it, so nodes of one level are not adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .holdings import Holdings
from .memory import LiveSets
from .network import Network


@dataclass(frozen=True, eq=False, slots=True)
class EndArrays:
    """Edge ends flattened, one entry per option of the end's node, ordered by class.

    Attributes:
        option: flat index of each option.
        slot: the slots, one per class, in order.
        start: per slot, its first entry in ``option``.
        of_entry: per entry, the index into ``slot`` of its class.
    """

    option: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    of_entry: np.ndarray


class Layout:
    """Flat arrays of the given nodes of a network and the links among them.

    Attributes:
        nodes: the nodes, sorted by level.
        level: int [nodes], the level of each.
        offset: int [nodes + 1], where each node's options begin.
        owner: int [options], position of the node of every option.
        costs: float64 [options].
        memory: what the options hold in the live sets; None without a limit.
        ends: int [edges, 2], positions of the earlier and the later node.
        shape: int [edges, 2], classes of each end.
        slots: int [edges, 2], the first slot of each end.
        slot_count: how many slots there are.
        pair_costs: float64, the costs of all links, row-major, edge after edge.
        pair_offset: int [edges + 1], where each edge's costs begin.
    """

    def __init__(self, network: Network, nodes: list[int], live: LiveSets | None) -> None:
        self.network = network
        level = _levels(network, nodes)
        self.nodes = sorted(nodes, key=lambda node: (level[node], node))
        self.level = np.array([level[node] for node in self.nodes], dtype=np.intp)
        sizes = np.array([len(network.costs(node)) for node in self.nodes], dtype=np.intp)
        self.offset = offsets(sizes)
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self.costs = np.concatenate([np.zeros(0), *map(network.costs, self.nodes)])
        self.memory = (
            None if live is None else Holdings(live, self.nodes, network.options, self.offset)
        )
        position_of = {node: position for position, node in enumerate(self.nodes)}
        found = [
            (position, position_of[other], link)
            for position, node in enumerate(self.nodes)
            for other, link in sorted(network.links[node].items())
            if position_of.get(other, -1) > position
        ]
        self.ends = np.array([(u, v) for u, v, _ in found], dtype=np.intp).reshape(-1, 2)
        self.links = [link for _, _, link in found]
        self.shape = np.array([link.costs.shape for link in self.links], dtype=np.intp)
        self.shape = self.shape.reshape(-1, 2)
        first = offsets(self.shape.reshape(-1))
        self.slots = first[:-1].reshape(-1, 2)
        self.slot_count = int(first[-1])
        self.pair_costs = np.concatenate(
            [np.zeros(0), *(link.costs.reshape(-1) for link in self.links)]
        )
        self.pair_offset = offsets(self.shape.prod(axis=1))
        self._classes = [
            np.concatenate([np.zeros(0, dtype=np.intp), *arrays])
            for arrays in (
                [link.own for link in self.links],
                [link.other for link in self.links],
            )
        ]
        ks = sizes[self.ends]
        self._class_offset = [offsets(ks[:, side]) for side in (0, 1)]
        self._sorted: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        everything = np.arange(len(self.links))
        self.all_ends = (self.end_arrays(everything, 0), self.end_arrays(everything, 1))

    def end_arrays(self, edges: np.ndarray, side: int) -> EndArrays:
        """The flattened ends of ``edges`` on side 0 (the earlier node) or 1 (the later)."""
        empty = np.zeros(0, dtype=np.intp)
        parts = [
            self._by_class(self.links[e].own if side == 0 else self.links[e].other)
            for e in edges.tolist()
        ]
        ks = np.array([len(order) for order, _, _ in parts], dtype=np.intp)
        classes = self.shape[edges, side]
        positions = self.ends[edges, side]
        option = np.concatenate([empty, *(order for order, _, _ in parts)])
        start = np.concatenate([empty, *(first for _, first, _ in parts)])
        of_entry = np.concatenate([empty, *(of for _, _, of in parts)])
        return EndArrays(
            option + np.repeat(self.offset[positions], ks),
            ragged(self.slots[edges, side], classes),
            start + np.repeat(offsets(ks)[:-1], classes),
            of_entry + np.repeat(offsets(classes)[:-1], ks),
        )

    def _by_class(self, own: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(options ordered by class, first entry of every class, class of every entry)."""
        key = own.tobytes()
        found = self._sorted.get(key)
        if found is None:
            order = np.argsort(own, kind="stable")
            of_entry = own[order]
            first = np.searchsorted(of_entry, np.arange(int(of_entry[-1]) + 1))
            found = self._sorted[key] = (order, first, of_entry)
        return found

    def classes(self, edges: np.ndarray, side: int, choice: np.ndarray) -> np.ndarray:
        """The class of the chosen option at one side of every given edge, int [edges]."""
        return self._classes[side][self._class_offset[side][edges] + choice[self.ends[edges, side]]]

    def pairs_of(self, choice: np.ndarray) -> np.ndarray:
        """Indices into ``pair_costs`` of the pairs an assignment takes, int [edges]."""
        everything = np.arange(len(self.links))
        rows = self.classes(everything, 0, choice)
        columns = self.classes(everything, 1, choice)
        return self.pair_offset[:-1] + rows * self.shape[:, 1] + columns

    def cost(self, choice: np.ndarray) -> float:
        """The total cost of an assignment (options per node), with the network's constant."""
        total = self.costs[self.offset[:-1] + choice].sum()
        total += self.pair_costs[self.pairs_of(choice)].sum()
        return float(total) + self.network.constant

    def held(self, choice: np.ndarray) -> np.ndarray:
        """Memory above the least in every live set, float64 [T]; there must be a limit."""
        assert self.memory is not None
        return self.memory.profile(self.memory.parts_of(choice))

    def over(self, choice: np.ndarray) -> float:
        """By how much an assignment exceeds the memory limit; 0 or less if it fits."""
        if self.memory is None:
            return -np.inf
        return float((self.held(choice) - self.memory.live.room).max())

    def options_of(self, choices: Sequence[int] | Mapping[int, int] | None) -> np.ndarray | None:
        """The reverse of ``choices``; None where a node no longer has the choice."""
        if choices is None:
            return None
        found = np.empty(len(self.nodes), dtype=np.intp)
        for position, node in enumerate(self.nodes):
            options = self.network.options[node]
            at = int(np.searchsorted(options, choices[node]))
            if at == len(options) or options[at] != choices[node]:
                return None
            found[position] = at
        return found

    def choices(self, choice: np.ndarray) -> dict[int, int]:
        """An assignment in terms of the problem: node -> choice."""
        options = self.network.options
        return {
            node: int(options[node][option])
            for node, option in zip(self.nodes, choice.tolist(), strict=True)
        }


def offsets(sizes: np.ndarray) -> np.ndarray:
    """Where blocks of these sizes begin when laid end to end, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.intp), np.cumsum(sizes, dtype=np.intp)])


def ragged(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """``first[i], first[i] + 1, ...`` (``count[i]`` numbers) for every i, end to end."""
    start = offsets(count)
    return np.arange(start[-1]) + np.repeat(first - start[:-1], count)


def _levels(network: Network, nodes: list[int]) -> dict[int, int]:
    """Levels when nodes with many neighbours come first: few of them, so large ones."""
    level: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: (-len(network.links[node]), node)):
        earlier = [level[other] for other in network.links[node] if other in level]
        level[node] = 1 + max(earlier, default=-1)
    return level
