"""The assignment problem with the memory of one training step on it, under a limit.

A node of the problem holds what `StepMemory` says of it. What a reshard holds depends on the
choices of two nodes. So an edge that may hold much is taken apart by a node in the middle, whose
choice says what one of them asks for and how much the reshard holds::

    u ──costs── v      becomes      u ──costs or inf── (choice of v, bytes) ──0 or inf── v

It has about as many pairs of choices of finite cost as the edge had. Choices that do not fit
whatever the others do are forbidden first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.memory.lifetimes import Interval
from autopar.passes.memory.step import Part, StepMemory
from autopar.passes.solver import Edge, Held, InfeasibleError, Node, Problem

#: Links that hold less than this share of the limit under every choice are left out.
IGNORED_SHARE = 1 / 1000


@dataclass(frozen=True, eq=False)
class Middle:
    """A node between two others, and how its choice follows from theirs.

    node, source, target:
        indices in the problem
    follows:
        its choice, int [class of the source's choice, class of the target's]; -1 where none
    """

    node: int
    source: int
    target: int
    follows: np.ndarray
    source_class: np.ndarray
    target_class: np.ndarray

    def choice(self, chosen: Sequence[int]) -> int:
        """Its choice, given those of the others; -1 where their pair is forbidden."""
        row = self.source_class[chosen[self.source]]
        return int(self.follows[row, self.target_class[chosen[self.target]]])


@dataclass(frozen=True, eq=False)
class MemoryProblem:
    """The problem with memory on it.

    problem:
        its first nodes are those of the problem without memory, in their order
    nodes:
        how many these are
    """

    problem: Problem
    nodes: int
    middles: tuple[Middle, ...]

    def extended(self, choice: Sequence[int]) -> tuple[int, ...] | None:
        """A solution of the problem without memory as one of this one; None if forbidden."""
        chosen = [*choice[: self.nodes], *[0] * len(self.middles)]
        for middle in self.middles:
            chosen[middle.node] = middle.choice(chosen)
            if chosen[middle.node] < 0:
                return None
        return tuple(chosen)


def with_memory(
    problem: Problem,
    memory: StepMemory,
    limit: float | None = None,
    *,
    followed: Collection[int] | None = None,
) -> MemoryProblem:
    """The problem of a `Built` with what everything holds.

    followed:
        the links (by number) whose reshards count with what they use while they run; of others
        only copies that stay count. None: all links

    Raises InfeasibleError where no choices fit the limit.
    """
    holds = [dict(held) for held in memory.held]
    counted: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for number, link in enumerate(memory.links):
        every = followed is None or number in followed
        parts = [part for part in link.parts if part.copy or every]
        if link.source == link.target:
            for part in link.parts:
                own = part.nbytes[part.sources, part.targets]
                for interval, count in part.times.items():
                    holds[link.source][interval] = (
                        holds[link.source].get(interval, 0.0) + count * own
                    )
        elif parts:
            counted[link.source, link.target] += parts
    allowed = [np.isfinite(node.costs) for node in problem.nodes]
    room = None
    if limit is not None:
        room = _fit(holds, allowed, memory.end, limit)
    nodes = [
        replace(
            node,
            costs=np.where(fits, node.costs, np.inf),
            held=tuple(Held(usages, interval) for interval, usages in hold.items()),
        )
        for node, fits, hold in zip(problem.nodes, allowed, holds, strict=True)
    ]
    least = 0.0 if limit is None else limit * IGNORED_SHARE
    return _take_apart(nodes, problem, allowed, counted, room, least)


def _fit(
    holds: Sequence[dict[Interval, np.ndarray]], allowed: list[np.ndarray], end: int, limit: float
) -> np.ndarray:
    """Forbid the choices that cannot be had; the room that is left at every time, [end]."""
    profiles = []
    for hold, fits in zip(holds, allowed, strict=True):
        change = np.zeros((end + 1, len(fits)))
        for (lo, hi), usages in hold.items():
            change[lo] += usages
            change[hi] -= usages
        profiles.append(np.cumsum(change, axis=0)[:-1])
    while True:
        least = [
            profile[:, fits].min(axis=1) for profile, fits in zip(profiles, allowed, strict=True)
        ]
        room: np.ndarray = limit - np.sum(least, axis=0)
        if room.min() < 0:
            floor = limit - float(room.min())
            raise InfeasibleError(
                f"memory: whatever is chosen, {floor:.12g} is in use at some time",
                peak_bound=floor,
            )
        shrunk = False
        for profile, fits, low in zip(profiles, allowed, least, strict=True):
            over = ((profile - low[:, None]) > room[:, None] * (1 + 1e-9) + 1e-6).any(axis=0)
            if (fits & over).any():
                # The choice that holds least at the fullest time is never over there alone, but
                # another time may rule it out.
                if not (fits & ~over).any():
                    raise InfeasibleError("memory: some decision fits under none of its choices")
                fits &= ~over
                shrunk = True
        if not shrunk:
            return room


def _take_apart(
    nodes: list[Node],
    problem: Problem,
    allowed: Sequence[np.ndarray],
    counted: dict[tuple[int, int], list[Part]],
    room: np.ndarray | None,
    least: float,
) -> MemoryProblem:
    between: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in problem.edges:
        between[edge.u, edge.v].append(edge)
    middles: list[Middle] = []
    edges: list[Edge] = []
    for (u, v), parts in counted.items():
        # What memory is on the way from v to u has a node of its own.
        own = between.pop((u, v), [])
        made = _between(u, v, len(nodes), problem, allowed, own, parts, room, least)
        if made is None:
            edges += own
            continue
        node, new, middle = made
        nodes.append(node)
        edges += new
        middles.append(middle)
    edges += (edge for rest in between.values() for edge in rest)
    return MemoryProblem(Problem(tuple(nodes), tuple(edges)), len(problem.nodes), tuple(middles))


def _between(
    u: int,
    v: int,
    index: int,
    problem: Problem,
    allowed: Sequence[np.ndarray],
    own: Sequence[Edge],
    parts: Sequence[Part],
    room: np.ndarray | None,
    least: float,
) -> tuple[Node, list[Edge], Middle] | None:
    """The node that takes apart the edges between two others; None where little is held."""
    rows = [edge.u_class for edge in own] + [part.sources for part in parts]
    columns = [edge.v_class for edge in own] + [part.targets for part in parts]
    first_row, row_of = _classes(rows)
    first_column, column_of = _classes(columns)
    costs = np.zeros((len(first_row), len(first_column)))
    for edge in own:
        costs = costs + edge.costs[np.ix_(edge.u_class[first_row], edge.v_class[first_column])]
    costs[~_used(row_of, allowed[u], len(first_row))] = np.inf
    costs[:, ~_used(column_of, allowed[v], len(first_column))] = np.inf
    amounts: dict[Interval, np.ndarray] = {}
    for part in parts:
        nbytes = part.nbytes[np.ix_(part.sources[first_row], part.targets[first_column])]
        for interval, count in part.times.items():
            known = amounts.get(interval)
            amounts[interval] = count * nbytes if known is None else known + count * nbytes
    if room is not None:
        for (lo, hi), nbytes in amounts.items():
            costs = np.where(nbytes > room[lo:hi].min(), np.inf, costs)
    finite = np.isfinite(costs)
    amounts = {
        interval: nbytes
        for interval, nbytes in amounts.items()
        if finite.any() and nbytes[finite].max() > least
    }
    if not amounts:
        return None
    codes = _codes(list(amounts.values()))
    follows, of_choice, at = _numbered(codes, finite)
    count = len(of_choice)
    own_class = np.arange(count, dtype=np.intp)
    enter = np.full((len(first_row), count), np.inf)
    r, c = np.nonzero(finite)
    enter[r, follows[r, c]] = costs[r, c]
    leave = np.where(of_choice[:, None] == np.arange(len(first_column))[None, :], 0.0, np.inf)
    held = tuple(Held(nbytes.reshape(-1)[at], t) for t, nbytes in amounts.items())
    name = f"between {problem.nodes[u].name} and {problem.nodes[v].name}"
    return (
        Node(name, np.zeros(count), held),
        [Edge(u, index, enter, row_of, own_class), Edge(index, v, leave, own_class, column_of)],
        Middle(index, u, v, np.where(finite, follows, -1), row_of, column_of),
    )


def _codes(amounts: Sequence[np.ndarray]) -> np.ndarray:
    """Equal numbers where all amounts are equal, int of their shape."""
    code = np.zeros(amounts[0].shape, dtype=np.int64)
    for nbytes in amounts:
        _, level = np.unique(nbytes, return_inverse=True)
        level = level.reshape(code.shape)
        _, code = np.unique(code * (int(level.max()) + 1) + level, return_inverse=True)
        code = code.reshape(nbytes.shape)
    return code


def _numbered(codes: np.ndarray, finite: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs (column, code) that occur: (number of each entry, column, an entry)."""
    kinds = int(codes.max()) + 1
    keys = np.arange(codes.shape[1])[None, :] * kinds + codes
    flat = np.flatnonzero(finite)
    found, first, number = np.unique(keys.reshape(-1)[flat], return_index=True, return_inverse=True)
    follows = np.zeros(codes.size, dtype=np.intp)
    follows[flat] = number.reshape(-1)
    return follows.reshape(codes.shape), found // kinds, flat[first]


def _classes(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Choices that are alike in every respect: (the first of each class, class of each)."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, code = np.unique(code * (int(column.max()) + 1) + column, return_inverse=True)
        code = code.reshape(-1)
    _, first, of_choice = np.unique(code, return_index=True, return_inverse=True)
    return first, of_choice.reshape(-1).astype(np.intp)


def _used(of_choice: np.ndarray, allowed: np.ndarray, classes: int) -> np.ndarray:
    """The classes that an allowed choice is in."""
    used = np.zeros(classes, dtype=bool)
    used[of_choice[allowed]] = True
    return used
