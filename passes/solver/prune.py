"""Removes options that no best assignment needs, before anything is searched.

Two reasons, both exact. *Support*: an option that is forbidden against every option of some
neighbour can not be chosen. *Dominance*: an option can go when another one of the same node
costs no more whatever the neighbours choose, and holds no more memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from .errors import InfeasibleError
from .memory import LiveSets
from .network import Network, merged

# Comparing options costs [classes, classes, other classes]; beyond this many it is not worth it.
_COMPARISONS = 1 << 18
# Nodes whose memory is compared pairwise, and links that may be added for it.
_MOST_COMPARED, _MOST_CONFLICTS = 1000, 5000


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


def prune_oversized(network: Network, live: LiveSets) -> tuple[int, list[int]]:
    """Removes options that exceed the limit even if all other nodes hold their least.

    At least the option that holds the least stays. Returns how many went, and the neighbours
    of the nodes that lost some.
    """
    removed = 0
    affected: dict[int, None] = {}
    room = live.least_room(live.first, live.last)
    for node in network.alive():
        usages = live.usages[node]
        if usages is None:
            continue
        held = usages[network.options[node]]
        if held.max() > room[node]:
            kept = np.flatnonzero(held <= max(room[node], held.min()))
            removed += len(held) - len(kept)
            network.keep(node, kept)
            affected.update(dict.fromkeys(network.links[node]))
    return removed, list(affected)


def forbid_conflicts(network: Network, live: LiveSets) -> int:
    """Forbids pairs of options that exceed the limit together; returns how many links it took.

    The memory rows say so too, but only pairs tell it to messages and relaxations. Left out
    where there are too many nodes to compare them all.
    """
    nodes = np.array(sorted(live.varying() & set(network.alive())), dtype=np.intp)
    if len(nodes) > _MOST_COMPARED:
        return 0
    u, v = np.triu_indices(len(nodes), 1)
    u, v = nodes[u], nodes[v]
    room = live.least_room(
        np.maximum(live.first[u], live.first[v]), np.minimum(live.last[u], live.last[v])
    )
    amounts = {}
    most = np.zeros(len(live.usages))
    for node in nodes.tolist():
        usages = live.usages[node]
        assert usages is not None
        amounts[node] = np.unique(usages[network.options[node]], return_inverse=True)
        most[node] = amounts[node][0][-1]
    conflicts = np.flatnonzero(most[u] + most[v] > room)
    if len(conflicts) > _MOST_CONFLICTS:
        return 0
    for index in conflicts.tolist():
        a, b = int(u[index]), int(v[index])
        (at_a, own), (at_b, other) = amounts[a], amounts[b]
        costs = np.where(at_a[:, None] + at_b > room[index], np.inf, 0.0)
        network.add_link(a, b, merged(costs, own.reshape(-1), other.reshape(-1)))
    return len(conflicts)


def prune_dominated(network: Network, usages: Sequence[np.ndarray | None] | None) -> int:
    """Removes dominated options of every node once; returns how many went.

    Args:
        usages: per node, the memory of each choice of the problem; None where none differs.
    """
    removed = 0
    for node in network.alive():
        costs = network.costs(node)
        if len(costs) == 1:
            continue
        usage = None if usages is None else usages[node]
        held = None if usage is None else usage[network.options[node]]
        kept = _undominated(network, node, costs, held)
        if len(kept) < len(costs):
            removed += len(costs) - len(kept)
            network.keep(node, kept)
    return removed


def _undominated(
    network: Network, node: int, costs: np.ndarray, held: np.ndarray | None
) -> np.ndarray:
    """Indices of the options to keep; of equal ones the lowest stays."""
    count = len(costs)
    worst = costs[:, None] - costs[None, :]  # [a, b]: how much worse a can be than b
    for link in network.links[node].values():
        classes, others = link.costs.shape
        if classes * classes * others > _COMPARISONS:
            return np.arange(count)
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
    if held is not None:
        beats &= held[:, None] <= held
    # Of options that beat each other only the lowest may remove the others.
    mutual = beats & beats.T
    beats &= ~mutual | (np.arange(count)[:, None] < np.arange(count))
    return np.flatnonzero(~beats.any(axis=0))
