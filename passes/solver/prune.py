"""Removes options that no best assignment needs, before anything is searched.

Two reasons, both exact. *Support*: an option that is forbidden against every option of some
neighbour can not be chosen. *Dominance*: an option can go when another one of the same node
costs no more whatever the neighbours choose, and holds no more memory. Mostly a few promising
options of a node dominate all that any of them does; comparing all pairs finds the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from .errors import InfeasibleError
from .memory import LiveSets
from .network import Link, Network, merged

# Comparing options costs [classes, classes, other classes]; beyond this many it is not worth it.
_COMPARISONS = 1 << 18
# How many promising options of a node the others are compared with.
_PROMISING = 8
# Pairs of spans that are compared, and links that may be added for it.
_MOST_COMPARED, _MOST_CONFLICTS = 1_000_000, 5000


def prune_unsupported(
    network: Network, names: Sequence[str], nodes: Iterable[int] | None = None
) -> int:
    """Removes options without support until every one left has some; returns how many went.

    Args:
        network: changed in place.
        names: per node, for messages.
        nodes: the nodes that may have lost support; None for all.

    Raises:
        InfeasibleError: some node has no option left; the message names it.
    """
    removed = 0
    queue = deque(network.alive() if nodes is None else nodes)
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        costs = network.costs(node)
        possible = costs < np.inf
        for link in network.links[node].values():
            cheapest = link.costs.min(axis=1)
            if cheapest.max() == np.inf:
                possible &= (cheapest < np.inf)[link.own]
        kept = np.flatnonzero(possible)
        if len(kept) == len(costs):
            continue
        if len(kept) == 0:
            raise InfeasibleError(
                f"{names[node]}: every choice is forbidden or has no allowed partner, so no "
                "assignment has a finite cost; allow more choices or pairs"
            )
        removed += len(costs) - len(kept)
        network.keep(node, kept)
        lost = [other for other in network.links[node] if other not in waiting]
        queue.extend(lost)
        waiting.update(lost)
    return removed


def prune_oversized(
    network: Network, live: LiveSets, names: Sequence[str]
) -> tuple[int, list[int]]:
    """Removes options that exceed the limit even if all other nodes hold their least.

    Returns how many went, and the neighbours of the nodes that lost some.

    Raises:
        InfeasibleError: some node has no option left; the message names it.
    """
    removed = 0
    affected: dict[int, None] = {}
    least = live.least_room(live.first, live.last)
    for node in sorted(live.varying() & set(network.alive())):
        spans = live.spans_of(node)
        options = network.options[node]
        over = np.max([live.usages[span][options] - least[span] for span in spans], axis=0)
        kept = np.flatnonzero(over <= 0)
        if len(kept) == 0:
            peak = live.limit + float(over.min())
            raise InfeasibleError(
                f"memory: no assignment is within the limit of {live.limit:.12g}: every choice "
                f"of {names[node]} exceeds it, by {over.min():.12g} at least; raise the limit or "
                "allow choices that hold less",
                peak_bound=peak,
            )
        if len(kept) < len(options):
            removed += len(options) - len(kept)
            network.keep(node, kept)
            affected.update(dict.fromkeys(network.links[node]))
    return removed, list(affected)


def tighten(
    network: Network, live: LiveSets, names: Sequence[str]
) -> tuple[LiveSets | None, np.ndarray, int]:
    """Removes options that hold too much or have no support until every one left is possible.

    Returns (the live sets that can still be exceeded, their numbers in ``live``, how many
    options went).

    Raises:
        InfeasibleError: no assignment is left.
    """
    removed = 0
    sets = np.arange(len(live.room))
    while True:
        narrowed, kept = live.narrowed(network.options)
        sets = sets[kept]
        if narrowed is None:
            return None, sets, removed
        live = narrowed
        oversized, affected = prune_oversized(network, live, names)
        if not oversized:
            return live, sets, removed
        removed += oversized + prune_unsupported(network, names, affected)


def forbid_conflicts(network: Network, live: LiveSets) -> int:
    """Forbids pairs of options that exceed the limit together; returns how many links it took.

    The memory rows say so too, but only pairs tell it to messages and relaxations. Left out
    where there are too many nodes to compare them all.
    """
    alive = np.array([unary is not None for unary in network.unary])
    spans = np.flatnonzero(alive[live.node])
    amounts = {}
    most = np.zeros(len(live.node))
    for span in spans.tolist():
        held = live.usages[span][network.options[live.node[span]]]
        amounts[span] = np.unique(held, return_inverse=True)
        most[span] = amounts[span][0][-1]
    # One of two that are too large together takes more than half of the room.
    large = spans[most[spans] > live.least_room(live.first[spans], live.last[spans]) / 2]
    if len(large) * len(spans) > _MOST_COMPARED:
        return 0
    u, v = (axis.reshape(-1) for axis in np.meshgrid(large, spans, indexing="ij"))
    is_large = np.isin(v, large)
    different = (live.node[u] != live.node[v]) & (~is_large | (u < v))
    u, v = u[different], v[different]
    first = np.maximum(live.first[u], live.first[v])
    room = live.least_room(first, np.minimum(live.last[u], live.last[v]))
    conflicts = np.flatnonzero(most[u] + most[v] > room)
    if len(conflicts) > _MOST_CONFLICTS:
        return 0
    for index in conflicts.tolist():
        (at_a, own), (at_b, other) = amounts[int(u[index])], amounts[int(v[index])]
        costs = np.where(at_a[:, None] + at_b > room[index], np.inf, 0.0)
        a, b = live.node[[u[index], v[index]]].tolist()
        network.add_link(a, b, merged(costs, own.reshape(-1), other.reshape(-1)))
    return len(conflicts)


def prune_dominated(network: Network, live: LiveSets | None, start: list[int] | None = None) -> int:
    """Removes dominated options of every node once; returns how many went.

    Where ``start`` (a choice of the problem for every node) takes an option that goes, it is
    given one that dominates it.
    """
    removed = 0
    for node in network.alive():
        costs, options = network.costs(node), network.options[node]
        if len(costs) == 1:
            continue
        held = _held(live, node, options)
        beats = _dominance(network, node, costs, held)
        if beats is None:
            continue
        kept = np.flatnonzero(~beats.any(axis=0))
        if len(kept) < len(costs):
            if start is not None:
                better = kept[beats[kept, np.searchsorted(options, start[node])]]
                if len(better):
                    start[node] = int(options[better[0]])
            removed += len(costs) - len(kept)
            network.keep(node, kept)
    return removed


def _held(live: LiveSets | None, node: int, options: np.ndarray) -> list[np.ndarray]:
    """What each option of a node holds over each of its spans; nothing without a limit."""
    return [] if live is None else [live.usages[span][options] for span in live.spans_of(node)]


def prune_beside_promising(
    network: Network, live: LiveSets | None, start: list[int] | None = None
) -> int:
    """Removes what the most promising options of each node dominate; returns how many went.

    Promising is what costs least where every neighbour chooses as suits it. ``start`` is changed
    as in `prune_dominated`.
    """
    removed = 0
    for node in network.alive():
        costs, options = network.costs(node), network.options[node]
        if len(costs) <= _PROMISING:
            continue
        links = list(network.links[node].values())
        least = costs + sum(link.costs.min(axis=1)[link.own] for link in links)
        held = _held(live, node, options)
        by = np.full(len(costs), -1)  # the option in whose favour each goes
        for best in np.argsort(least, kind="stable")[:_PROMISING].tolist():
            if by[best] >= 0:
                continue
            worse, better = _compared(costs, links, best)
            beaten, equal = worse <= 0, better[:best] <= 0
            for usage in held:
                beaten &= usage[best] <= usage
                equal &= usage[:best] <= usage[best]
            # Of equal options the lowest stays.
            beaten[:best] &= ~equal
            beaten[best] = False
            by[beaten] = best
        kept = np.flatnonzero(by < 0)
        if len(kept) == len(costs):
            continue
        if start is not None:
            mine = int(np.searchsorted(options, start[node]))
            while by[mine] >= 0:
                mine = int(by[mine])
            start[node] = int(options[mine])
        removed += len(costs) - len(kept)
        network.keep(node, kept)
    return removed


def _compared(
    costs: np.ndarray, links: Iterable[Link], option: int
) -> tuple[np.ndarray, np.ndarray]:
    """How much more an option costs than each other one at most, whatever the neighbours choose,
    and how much more each other one than it."""
    worse = costs[option] - costs
    better = -worse
    for link in links:
        with np.errstate(invalid="ignore"):
            difference = link.costs[link.own[option]] - link.costs
        # What is forbidden can not be better; inf - inf is nan.
        most = np.fmax.reduce(difference, axis=1, initial=-np.inf)
        least = np.fmin.reduce(difference, axis=1, initial=np.inf)
        worse, better = worse + most[link.own], better - least[link.own]
    return worse, better


def _dominance(
    network: Network, node: int, costs: np.ndarray, held: Sequence[np.ndarray]
) -> np.ndarray | None:
    """Bool [a, b]: whether option a makes b needless; of equal ones the lowest stays."""
    count = len(costs)
    worst = costs[:, None] - costs[None, :]  # [a, b]: how much worse a can be than b
    for link in network.links[node].values():
        classes, others = link.costs.shape
        if classes * classes * others > _COMPARISONS:
            return None
        with np.errstate(invalid="ignore"):
            difference = link.costs[:, None, :] - link.costs[None, :, :]
        # Where b is forbidden a can not be worse; inf - inf is nan there as well.
        difference[:, ~np.isfinite(link.costs)] = -np.inf
        by_class = difference.max(axis=2, initial=-np.inf)
        np.fill_diagonal(by_class, 0.0)
        with np.errstate(invalid="ignore"):
            worst = worst + by_class[link.own[:, None], link.own]
    beats = ~(worst > 0)  # nan: -inf somewhere, inf elsewhere
    beats &= ~np.isnan(worst)
    for usage in held:
        beats &= usage[:, None] <= usage
    # Of options that beat each other only the lowest may remove the others.
    mutual = beats & beats.T
    beats &= ~mutual | (np.arange(count)[:, None] < np.arange(count))
    return beats
