"""All-target shortest paths over edge arrays, for many sources at once.

Whole-array Bellman-Ford: reshard graphs are dense and their paths a few edges long, so a handful
of sweeps over all edges finds every path. Integer weights make sums exact and ties real ties.
"""

from __future__ import annotations

import numpy as np

#: Above any path length, and far enough from overflow to add one edge to it.
_FAR = np.int64(2**61)
#: Entries of a temporary array (edges x sources): 1 MB of int64, so that it stays in cache.
_CHUNK = 2**17


def shortest_paths(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray, nodes: int, roots: np.ndarray
) -> np.ndarray:
    """The last edge of the shortest path from each root to each node, int [root, node].

    source, target, weight:
        the edges [edge], sorted by target; weights are positive int64
    roots:
        the nodes to start from

    -1 stands for no edge: the root itself, or a node out of reach. Of several shortest paths the
    one whose last edge comes first is taken, so the answer does not depend on the other roots.
    """
    if not len(source):
        return np.full((len(roots), nodes), -1, dtype=np.intp)
    step = max(1, _CHUNK // len(source))
    parts = [
        _last_edges(source, target, weight, nodes, roots[i : i + step])
        for i in range(0, len(roots), step)
    ]
    return np.concatenate(parts).reshape(len(roots), nodes)


def _last_edges(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray, nodes: int, roots: np.ndarray
) -> np.ndarray:
    distance = np.full((nodes, len(roots)), _FAR)
    distance[roots, np.arange(len(roots))] = 0
    # Only edges from nodes that came nearer, for any root, can bring another node nearer.
    nearer = np.zeros(nodes, dtype=bool)
    nearer[roots] = True
    while (edges := np.flatnonzero(nearer[source])).size:
        heads, starts = np.unique(target[edges], return_index=True)
        arrival = distance[source[edges]] + weight[edges, None]
        best = np.minimum.reduceat(arrival, starts, axis=0)
        known = distance[heads]
        nearer[:] = False
        nearer[heads] = (best < known).any(axis=1)
        distance[heads] = np.minimum(known, best)
    arrival = distance[source] + weight[:, None]
    heads, starts = np.unique(target, return_index=True)
    edges = np.arange(len(source))[:, None]
    tight = np.where(arrival == distance[target], edges, len(source))
    last = np.full((nodes, len(roots)), -1, dtype=np.intp)
    last[heads] = np.minimum.reduceat(tight, starts, axis=0)
    last[last == len(source)] = -1
    return last.T


def accumulate(source: np.ndarray, last: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The sums of edge costs [edge, k] along the paths of `shortest_paths`, [k, root, node]."""
    if not len(source):
        return np.zeros((costs.shape[1], *last.shape))
    reached = last >= 0
    # Pointer doubling: `totals` is the cost of the way back from a node to its `jump`.
    jump = np.where(reached, source[last], np.arange(last.shape[1]))
    totals = np.where(reached, costs.T[:, last], 0.0)
    while True:
        further = np.take_along_axis(jump, jump, axis=1)
        if np.array_equal(further, jump):
            return totals
        totals = totals + np.take_along_axis(totals, jump[None], axis=2)
        jump = further
