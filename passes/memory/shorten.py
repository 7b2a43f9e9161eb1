"""A graph with fewer copies of its repeated blocks, for looking at one step's memory.

Of the copies that share their decisions the first two and the last two stay; each node says for how
many of the whole graph it stands. What copies in the middle hold at any time outside of them is the
same for all, so the second stands for those that are gone::

    x ─ 1 ─ 2 ─ 3 ─ 4 ─ … ─ 95 ─ 96 ─ y     becomes     x ─ 1 ─ 2 (93 times) ─ 95 ─ 96 ─ y
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.graph import Graph, Value, map_values
from autopar.passes.blocks import Blocks

#: The fewest copies of which some are taken out.
_FEWEST = 5


@dataclass(frozen=True)
class Shortened:
    """A shorter graph.

    weights:
        node name -> for how many nodes of the whole graph it stands, where that is not one
    passed_over:
        the calls of copies between two equal ones: at no time there is more in use than at the
        corresponding times of the copies around them, the first and the last
    """

    graph: Graph
    weights: Mapping[str, int]
    passed_over: frozenset[str]


def shorten(graph: Graph, blocks: Blocks, models: Mapping[str, Hashable]) -> Shortened:
    """Take out copies of the blocks of a graph.

    models:
        call -> what decides about it; copies are equal where all their calls have equal models
    """
    weights: dict[str, int] = {}
    passed_over: set[str] = set()
    gone: dict[str, str] = {}
    for copies in _stretches(blocks, models):
        passed_over.update(name for copy in copies[1:-1] for name in copy if name in models)
        if len(copies) < _FEWEST or not _closed(graph, copies):
            continue
        second = copies[1]
        weights.update(dict.fromkeys(second, len(copies) - 3))
        for copy in copies[2:-2]:
            gone.update(zip(copy, second, strict=True))
    if not gone:
        return Shortened(graph, weights, frozenset(passed_over))
    nodes = {node.name: node for node in graph.nodes}
    values: dict[str, Value] = {}
    for name, model in gone.items():
        pairs = zip(nodes[name].results, nodes[model].results, strict=True)
        values.update((mine.name, other) for mine, other in pairs)

    def renamed(tree: Any) -> Any:
        return map_values(tree, lambda value: values.get(value.name, value))

    kept = []
    for node in graph.nodes:
        if node.name in gone:
            continue
        if any(value.name in values for value in node.operands):
            node = replace(node, args=renamed(node.args), kwargs=renamed(node.kwargs))
        kept.append(node)
    shorter = Graph(tuple(kept), graph.outputs, graph.updates, graph.mesh)
    return Shortened(shorter, weights, frozenset(passed_over))


def _stretches(
    blocks: Blocks, models: Mapping[str, Hashable]
) -> Iterator[Sequence[tuple[str, ...]]]:
    """Copies behind one another that share all their decisions, at least three."""
    for run in blocks.runs:
        kinds = [tuple(models[name] for name in copy[: run.period]) for copy in run.copies]
        start = 0
        for k in range(1, len(kinds) + 1):
            if k == len(kinds) or kinds[k] != kinds[start]:
                if k - start >= 3:
                    yield run.copies[start:k]
                start = k


def _closed(graph: Graph, copies: Sequence[tuple[str, ...]]) -> bool:
    """Whether what each copy but the last makes goes no further than to the next one."""
    number = {name: k for k, copy in enumerate(copies) for name in copy}
    made = {
        value.name: k
        for k, copy in enumerate(copies[:-1])
        for name in copy
        for value in graph.producers[name][0].results
    }
    if not graph.leaving.isdisjoint(made):
        return False
    for node in graph.nodes:
        for value in node.operands:
            k = made.get(value.name)
            if k is not None and number.get(node.name, -1) not in (k, k + 1):
                return False
    return True
