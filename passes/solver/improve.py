"""Local improvement: frees a neighbourhood of an assignment and solves it exactly.

Everything outside keeps its choice, so links to it become node costs and its memory comes off
the room. Most live sets can then no longer be exceeded, which lets elimination take most of the
neighbourhood, and the integer program gets the small rest. The assignment stays within the
limit all the time.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from . import ilp
from .clock import Clock, same_cost
from .errors import InfeasibleError
from .lagrange import Best
from .layout import Layout
from .memory import LiveSets
from .network import Link, Network
from .prune import prune_oversized, prune_unsupported
from .reduction import Reduction

# Pairs among the nodes of a neighbourhood: of the first one, and of the largest.
_FIRST_PAIRS, _MOST_PAIRS = 4_000, 200_000
# Neighbourhoods change in size by this factor, aiming at this many seconds for each.
_GROW, _SHRINK, _SECONDS = 1.25, 0.8, 2.0
# Give up after so many neighbourhoods in a row, of no less than the first size, gave nothing.
_PATIENCE = 60


class Neighbourhoods:
    """A seeded stream of neighbourhoods of one layout."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self._layout = layout
        self._random = np.random.default_rng(seed)
        self._neighbours: list[list[int]] = [[] for _ in layout.nodes]
        self._pairs = np.zeros(len(layout.nodes))
        sizes = layout.shape.prod(axis=1)
        for (u, v), size in zip(layout.ends.tolist(), sizes.tolist(), strict=True):
            self._neighbours[u].append(v)
            self._neighbours[v].append(u)
            self._pairs[u] += size / 2
            self._pairs[v] += size / 2
        self._budget = float(_FIRST_PAIRS)

    def search(self, best: Best, bound: float, clock: Clock, seconds: float) -> None:
        """Improves ``best`` until nothing more is found, it meets the bound, or time is up."""
        until = clock.elapsed() + seconds
        fruitless = 0
        while clock.elapsed() < until and fruitless < _PATIENCE:
            assert best.choice is not None
            began = clock.elapsed()
            region = self._region(best.choice)
            choice = self._solve(region, best.choice, clock, min(2 * _SECONDS, until - began))
            if choice is not None and best.offer(self._layout, choice):
                fruitless = 0
                clock.report("improve", best.cost, bound)
                if same_cost(best.cost, bound):
                    return
            else:
                fruitless += 1
            fast = clock.elapsed() - began < _SECONDS
            self._budget *= _GROW if fast and fruitless else 1.0 if fast else _SHRINK
            self._budget = min(max(self._budget, _FIRST_PAIRS / 4), _MOST_PAIRS)

    def _region(self, choice: np.ndarray) -> list[int]:
        """Nodes around some seeds, nearest first, until their pairs use up the budget."""
        random, layout = self._random, self._layout
        seeds = [int(random.integers(len(layout.nodes)))]
        live = layout.live
        if live is not None and random.random() < 0.5:
            seeds = self._holders(live, choice)
        queue, region, used = deque(seeds), dict.fromkeys(seeds), 0.0
        while queue and used < self._budget:
            node = queue.popleft()
            used += self._pairs[node]
            for other in random.permutation(self._neighbours[node]).tolist():
                if other not in region:
                    region[other] = None
                    queue.append(other)
        return sorted(region)

    def _holders(self, live: LiveSets, choice: np.ndarray) -> list[int]:
        """Some nodes of one live set, the fuller the set the likelier, large ones first."""
        random, layout = self._random, self._layout
        fill = layout.held(choice) / np.maximum(live.room, 1e-9)
        weight = np.maximum(fill, 1e-3) ** 4
        index = int(random.choice(len(fill), p=weight / weight.sum()))
        nodes = np.array(layout.nodes)
        most = np.maximum.reduceat(layout.usage, layout.offset[:-1])
        inside = (live.first[nodes] <= index) & (index < live.last[nodes]) & (most > 0)
        members = np.flatnonzero(inside)
        if not len(members):
            return [int(random.integers(len(nodes)))]
        chance = most[members] / most[members].sum()
        count = min(int((chance > 0).sum()), int(random.integers(2, 9)))
        return random.choice(members, count, replace=False, p=chance).tolist()

    def _solve(
        self, region: list[int], choice: np.ndarray, clock: Clock, seconds: float
    ) -> np.ndarray | None:
        """The best choice in the region, all else as in ``choice``; None if it fails."""
        network = self._restricted(region, choice)
        live = self._room_for(region, choice)
        try:
            names = [str(position) for position in region]
            prune_unsupported(network, names)
            if live is not None:
                prune_unsupported(network, names, prune_oversized(network, live)[1])
        except InfeasibleError:  # rounding at the limit: leave the region as it is
            return None
        keep = set() if live is None else live.varying()
        reduction = Reduction(network, lambda node: node not in keep).run()
        rest: dict[int, int] = {}
        if network.alive():
            layout = Layout(network, network.alive(), live)
            allowed = np.isfinite(layout.pair_costs)
            answer = ilp.solve(layout, allowed, set(), clock, seconds)
            if answer.choice is None:
                return None
            rest = layout.choices(answer.choice)
        found = reduction.expand(rest)
        result = choice.copy()
        for index, position in enumerate(region):
            result[position] = found[index]
        return result

    def _restricted(self, region: list[int], choice: np.ndarray) -> Network:
        layout = self._layout
        index_of = {position: index for index, position in enumerate(region)}
        options = [
            np.arange(layout.offset[position + 1] - layout.offset[position]) for position in region
        ]
        unary: list[np.ndarray | None] = [
            layout.network.costs(layout.nodes[position]).copy() for position in region
        ]
        network = Network(unary, options, [{} for _ in region])
        for index, position in enumerate(region):
            links = layout.network.links[layout.nodes[position]]
            for other in self._neighbours[position]:
                link = links[layout.nodes[other]]
                inside = index_of.get(other)
                if inside is None:
                    at = link.other[choice[other]]
                    network.unary[index] = network.costs(index) + link.costs[:, at][link.own]
                elif index < inside:
                    network.set_link(index, inside, Link(link.costs, link.own, link.other))
        return network

    def _room_for(self, region: list[int], choice: np.ndarray) -> LiveSets | None:
        """The live sets that the region can exceed, with what is left for it."""
        layout, live = self._layout, self._layout.live
        if live is None:
            return None
        outside = np.zeros(len(live.usages))
        outside[layout.nodes] = layout.usage[layout.offset[:-1] + choice]
        nodes = np.array([layout.nodes[position] for position in region])
        outside[nodes] = 0.0
        usages: list[np.ndarray | None] = [
            layout.usage[layout.offset[position] : layout.offset[position + 1]]
            for position in region
        ]
        return live.within(nodes, outside, usages)
