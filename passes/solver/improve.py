"""Local improvement: frees a neighbourhood of an assignment and solves it exactly.

Everything outside keeps its choice, so links to it become node costs and its memory comes off
the room. Most live sets can then no longer be exceeded, which lets elimination take most of the
neighbourhood. Messages at the known memory prices bound the rest: often they prove that nothing
better is there, and where they do not, few pairs can still matter and an integer program decides
among them. The assignment stays within the limit all the time.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from . import ilp, lagrange
from .clock import Clock, same_cost
from .dual import Dual
from .errors import InfeasibleError
from .holdings import Holdings
from .lagrange import Best
from .layout import Layout
from .memory import LiveSets
from .network import Link, Network, compact
from .prune import prune_dominated, prune_unsupported, tighten
from .reduction import Reduction

# Pairs among the nodes of a neighbourhood: of the first one, and of the largest.
_FIRST_PAIRS, _MOST_PAIRS = 10_000, 1_000_000
# Neighbourhoods change in size by this factor, aiming at this many seconds for each.
_GROW, _SHRINK, _SECONDS = 1.25, 0.8, 2.0
# Give up after so many neighbourhoods in a row, of no less than the first size, gave nothing.
_PATIENCE = 60
# Sweeps to bound a neighbourhood, and pairs below which that is not worth it.
_SWEEPS, _FEW_PAIRS = 80, 1_000
# How many nodes may change their memory where the others in a neighbourhood may not, and how
# often it is so.
_FREE_HOLDERS, _AMOUNTS_CHANCE = 8, 0.4


class Neighbourhoods:
    """A seeded stream of neighbourhoods of one layout."""

    def __init__(self, layout: Layout, seed: int, multipliers: np.ndarray) -> None:
        self._layout = layout
        self._multipliers = multipliers
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
            options = self._options(region, best.choice)
            seconds = min(2 * _SECONDS, until - began)
            choice = self._solve(region, options, best.choice, clock, seconds)
            if choice is not None and best.offer(self._layout, choice):
                fruitless = 0
                clock.report("improve", best.cost, bound)
                if clock.enough(best.cost, bound):
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
        if layout.memory is not None and random.random() < 0.5:
            seeds = self._holders(layout.memory, choice)
        queue, region, used = deque(seeds), dict.fromkeys(seeds), 0.0
        while queue and used < self._budget:
            node = queue.popleft()
            used += self._pairs[node]
            for other in random.permutation(self._neighbours[node]).tolist():
                if other not in region:
                    region[other] = None
                    queue.append(other)
        return sorted(region)

    def _holders(self, memory: Holdings, choice: np.ndarray) -> list[int]:
        """Some nodes of one live set, the fuller the set the likelier, large ones first."""
        random = self._random
        fill = self._layout.held(choice) / np.maximum(memory.live.room, 1e-9)
        weight = np.maximum(fill, 1e-3) ** 4
        spans = memory.in_set(int(random.choice(len(fill), p=weight / weight.sum())))
        if not len(spans):
            return [int(random.integers(len(self._layout.nodes)))]
        chance = memory.scale[spans] / memory.scale[spans].sum()
        count = min(len(spans), int(random.integers(2, 9)))
        chosen = random.choice(spans, count, replace=False, p=chance)
        return memory.owner[memory.shape[chosen]].tolist()

    def _options(self, region: list[int], choice: np.ndarray) -> list[np.ndarray]:
        """The options that each node of the region may take.

        From time to time all nodes but a few must hold what they hold: then many more nodes can
        be free, because their memory is no longer in doubt.
        """
        layout, memory, random = self._layout, self._layout.memory, self._random
        options = [np.arange(k) for k in np.diff(layout.offset)[region].tolist()]
        if memory is None or random.random() >= _AMOUNTS_CHANCE:
            return options
        prices = memory.price(self._multipliers)
        paid = [prices[layout.offset[p] : layout.offset[p + 1]] for p in region]
        in_doubt = np.array([float(np.ptp(one)) for one in paid])
        holders = np.flatnonzero(in_doubt > 0)
        if len(holders) <= _FREE_HOLDERS:
            return options
        chance = in_doubt[holders] / in_doubt[holders].sum()
        free = random.choice(holders, min(_FREE_HOLDERS, len(holders)), replace=False, p=chance)
        for index in np.setdiff1d(holders, free).tolist():
            kind = memory.amounts(region[index])
            options[index] = np.flatnonzero(kind == kind[choice[region[index]]])
        return options

    def _solve(
        self,
        region: list[int],
        options: list[np.ndarray],
        choice: np.ndarray,
        clock: Clock,
        seconds: float,
    ) -> np.ndarray | None:
        """A better choice in the region, all else as in ``choice``; None if there is none."""
        until = clock.elapsed() + seconds
        network = self._restricted(region, options, choice)
        live, multipliers = self._room_for(region, choice)
        now = [int(np.searchsorted(o, choice[p])) for p, o in zip(region, options, strict=True)]
        cost = network.cost(now)
        names = [str(position) for position in region]
        try:
            prune_unsupported(network, names)
            if live is not None:
                live, sets, _ = tighten(network, live, names)
                multipliers = multipliers[sets]
        except InfeasibleError:  # rounding at the limit: leave the region as it is
            return None
        keep = set() if live is None else live.varying()
        reduction = Reduction(network, lambda node: node not in keep).run()
        if prune_dominated(network, live):
            reduction.run()
        rest: dict[int, int] = {}
        if network.alive():
            layout = Layout(network, network.alive(), live)
            best = Best(None, cost)
            self._decide(layout, best, multipliers, clock, until)
            if best.choice is None:
                return None
            rest = layout.choices(best.choice)
        found = reduction.expand(rest)
        result = choice.copy()
        for index, position in enumerate(region):
            result[position] = found[index]
        return result

    def _decide(
        self, layout: Layout, best: Best, multipliers: np.ndarray, clock: Clock, until: float
    ) -> None:
        """Looks for an assignment of a layout that is cheaper than ``best``."""
        allowed = np.isfinite(layout.pair_costs)
        if allowed.sum() > _FEW_PAIRS:
            dual = Dual(layout)
            if layout.memory is not None:
                dual.price(multipliers)
            bound = lagrange.search(
                dual,
                best,
                clock,
                whole=False,
                seconds=until - clock.elapsed(),
                persistent=False,
                sweeps=_SWEEPS,
                stage=None,
            )
            if bound >= best.cost or same_cost(best.cost, bound):
                return
            allowed &= dual.reduced_costs()[1] <= best.cost - bound
        answer = ilp.solve(layout, allowed, set(), clock, until - clock.elapsed())
        if answer.choice is not None:
            best.offer(layout, answer.choice)

    def _restricted(
        self, region: list[int], options: list[np.ndarray], choice: np.ndarray
    ) -> Network:
        layout = self._layout
        index_of = {position: index for index, position in enumerate(region)}
        unary: list[np.ndarray | None] = [
            layout.network.costs(layout.nodes[position])[kept]
            for position, kept in zip(region, options, strict=True)
        ]
        network = Network(unary, list(options), [{} for _ in region])
        for index, position in enumerate(region):
            links = layout.network.links[layout.nodes[position]]
            own = options[index]
            for other in self._neighbours[position]:
                link = links[layout.nodes[other]]
                inside = index_of.get(other)
                if inside is None:
                    at = link.other[choice[other]]
                    network.unary[index] = network.costs(index) + link.costs[:, at][link.own[own]]
                elif index < inside:
                    their = link.other[options[inside]]
                    network.set_link(index, inside, compact(Link(link.costs, link.own[own], their)))
        return network

    def _room_for(
        self, region: list[int], choice: np.ndarray
    ) -> tuple[LiveSets | None, np.ndarray]:
        """The live sets with what is left for the region, and their prices."""
        layout, memory = self._layout, self._layout.memory
        if memory is None:
            return None, self._multipliers
        index_of = np.full(len(layout.nodes), -1)
        index_of[region] = np.arange(len(region))
        node = index_of[memory.owner[memory.shape]]
        # Spans are in the order of positions, and so is the region.
        spans = np.flatnonzero(node >= 0)
        if not len(spans):
            return None, self._multipliers
        outside = memory.parts_of(choice)
        outside[index_of[memory.owner] >= 0] = 0.0
        usages = [memory.usages(span) for span in spans.tolist()]
        others = memory.profile(outside)
        live = memory.live.within(memory.span[spans], node[spans], usages, others)
        return live, self._multipliers
