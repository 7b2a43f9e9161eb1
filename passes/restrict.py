"""A part of an assignment problem: the same nodes and prices with fewer choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.passes.build import Built
from autopar.passes.overlap import Parts
from autopar.passes.solver import Edge
from autopar.passes.solver import Node as ProblemNode


def restrict(built: Built, keep: Mapping[int, Sequence[int]]) -> Built:
    """The problem in which some nodes may only take some of their choices.

    keep:
        index of a problem node -> the positions of the choices that stay, at least one

    Every assignment of the result is one of `built`, at the same cost.
    """
    kept = {i: np.asarray(positions, dtype=np.intp) for i, positions in keep.items()}

    def node_of(index: int, node: ProblemNode) -> ProblemNode:
        if index not in kept:
            return node
        held = tuple(replace(held, usages=held.usages[kept[index]]) for held in node.held)
        return replace(node, costs=node.costs[kept[index]], held=held)

    def edge_of(edge: Edge) -> Edge:
        if edge.u not in kept and edge.v not in kept:
            return edge
        rows, u_class = _used(edge.u_class, kept.get(edge.u))
        columns, v_class = _used(edge.v_class, kept.get(edge.v))
        return replace(
            edge, costs=edge.costs[np.ix_(rows, columns)], u_class=u_class, v_class=v_class
        )

    def options(named: tuple[int, tuple[Any, ...]]) -> tuple[int, tuple[Any, ...]]:
        index, choices = named
        return index, tuple(choices[k] for k in kept[index]) if index in kept else choices

    def kept_of(parts: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        return {i: part[kept[i]] if i in kept else part for i, part in parts.items()}

    def sent_of(edge: Edge, sent: np.ndarray | None) -> np.ndarray | None:
        if sent is None or (edge.u not in kept and edge.v not in kept):
            return sent
        rows, _ = _used(edge.u_class, kept.get(edge.u))
        columns, _ = _used(edge.v_class, kept.get(edge.v))
        return sent[np.ix_(rows, columns)]

    parts = Parts(
        kept_of(built.parts.sent),
        tuple(map(sent_of, built.problem.edges, built.parts.edges)),
        kept_of(built.parts.covering),
    )
    problem = replace(
        built.problem,
        nodes=tuple(node_of(i, node) for i, node in enumerate(built.problem.nodes)),
        edges=tuple(map(edge_of, built.problem.edges)),
    )
    return replace(
        built,
        problem=problem,
        parts=parts,
        strategies={name: options(found) for name, found in built.strategies.items()},
        sources={name: options(found) for name, found in built.sources.items()},
        relays={name: options(found) for name, found in built.relays.items()},
        outputs=[None if found is None else options(found) for found in built.outputs],
    )


def _used(classes: np.ndarray, kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The classes that still occur, and the new class of each choice that stays."""
    found, of_choice = np.unique(classes if kept is None else classes[kept], return_inverse=True)
    return found, of_choice
