"""Find the repeated blocks of a graph: the layers of a transformer, the cells of a ResNet stage.

Purely structural, no names are read. A *run* is a stretch of the execution order that repeats
with a period::

    %1 = linear(%x, %w0)    %2 = relu(%1)    %3 = linear(%2, %v0)    %4 = add(%x, %3)
    %5 = linear(%4, %w1)    %6 = relu(%5)    %7 = linear(%6, %v1)    %8 = add(%4, %7)

Here the second line is a copy of the first: the calls have equal signatures, and each operand is
made at the same distance before its use, or is the same value in both (masks, rotary tables), or
is a source of the same type that each copy brings itself (parameters). Only the first copy may
read what it is handed from just any place: the embedding instead of the block before.

What makes a stretch a block that is worth planning once:

- each copy reads something the one before it made (q, k and v are three equal stretches too, but
  none reads another), and
- it holds at least two products. A stack of equal layers with one product each wants its weights
  split by columns and rows in turn, so there two layers make a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import SOURCES, Graph
from autopar.ir.rule import Rule
from autopar.passes.compute_cost import is_contraction
from autopar.passes.signature import signature, type_of

#: Products in the smallest block: one split by columns, one by rows.
MIN_PRODUCTS = 2


@dataclass(frozen=True)
class Run:
    """Copies of one block, one behind the other.

    copies:
        for each copy the names of its calls in execution order, then of the sources that only it
        brings; equal positions correspond
    period:
        the number of calls in a copy
    """

    copies: tuple[tuple[str, ...], ...]
    period: int


@dataclass(frozen=True)
class Blocks:
    """The runs of a graph in execution order; no node is in two of them."""

    runs: tuple[Run, ...] = ()

    def representatives(self, decided: Mapping[str, Hashable] | None = None) -> dict[str, str]:
        """Node name -> the corresponding node of the first copy of its block, for all copies.

        decided:
            node name -> what is fixed about it beforehand. Copies with other decisions are other
            blocks: a hint binds its own node only, and a block with a hint of its own is planned
            around it, apart from the copies without.
        """
        decided = decided or {}
        found: dict[str, str] = {}
        for run in self.runs:
            first: dict[tuple[Hashable, ...], tuple[str, ...]] = {}
            for copy in run.copies:
                model = first.setdefault(tuple(map(decided.get, copy)), copy)
                found.update(zip(copy, model, strict=True))
        return found


NO_BLOCKS = Blocks()


def find_blocks(graph: Graph, rules: Mapping[str, Rule]) -> Blocks:
    """The repeated blocks of a graph.

    Of all runs the one that covers most calls is taken, of several periods that cover as many
    the shortest, then the runs left and right of it. `rules` tells which calls are products.
    """
    return Blocks(tuple(_Finder(graph, rules).runs()))


@dataclass(frozen=True)
class _Repeat:
    """`copies` copies of `period` calls each from position `start`, and `spare` calls behind."""

    start: int
    period: int
    copies: int
    spare: int

    @property
    def end(self) -> int:
        return self.start + self.copies * self.period

    @property
    def rank(self) -> tuple[int, int]:
        return self.copies * self.period, -self.period


class _Finder:
    """The calls of a graph as arrays, by position in the execution order; slots are operands.

    kinds:
        the signature of each call, as a number
    first_slot:
        where the operands of each call begin in the arrays below, [call + 1]
    owner, value, made:
        the call that reads a slot, the value read, and the position that made it (-1: a source)
    distance:
        how far before its use the value was made; for a source how far before it was last used,
        -1 for its first use
    role:
        which result of the call that made it, or which type of source
    """

    def __init__(self, graph: Graph, rules: Mapping[str, Rule]) -> None:
        calls = tuple(graph.calls)
        numbers: dict[Hashable, int] = {}
        self.names = [node.name for node in calls]
        self.source_names: dict[int, str] = {}
        kinds = [numbers.setdefault(signature(node), len(numbers)) for node in calls]
        products = [is_contraction(rules[node.name]) for node in calls]
        position = {node.name: i for i, node in enumerate(calls)}
        used_at: dict[str, int] = {}
        slots: list[tuple[int, int, int, int, int]] = []
        first_slot = [0]
        for i, node in enumerate(calls):
            for operand in node.operands:
                value = numbers.setdefault(operand.name, len(numbers))
                maker, result = graph.producers[operand.name]
                made = position.get(maker.name, -1)
                if maker.op in SOURCES:
                    kind = maker.op, type_of(operand)
                    role = numbers.setdefault(kind, len(numbers))
                    distance = i - used_at[operand.name] if operand.name in used_at else -1
                    used_at[operand.name] = i
                    self.source_names[value] = maker.name
                else:
                    role, distance = -1 - result, i - made
                slots.append((i, value, made, distance, role))
            first_slot.append(len(slots))
        self.kinds = np.array(kinds, dtype=np.intp)
        self.products = np.concatenate([[0], np.cumsum(products)]).astype(np.intp)
        self.first_slot = np.array(first_slot, dtype=np.intp)
        columns = np.array(slots, dtype=np.intp).reshape(len(slots), 5).T
        self.owner, self.value, self.made, self.distance, self.role = columns

    def runs(self) -> Iterator[Run]:
        """The runs in execution order."""
        waiting = [(0, len(self.names))]
        found: list[_Repeat] = []
        while waiting:
            low, high = waiting.pop()
            best = max(self._repeats(low, high), key=lambda r: r.rank, default=None)
            if best is not None:
                aligned = self._aligned(best)
                found.append(aligned)
                waiting += [(low, aligned.start), (aligned.end, high)]
        for repeat in sorted(found, key=lambda r: r.start):
            yield self._run(repeat)

    def _repeats(self, low: int, high: int) -> Iterator[_Repeat]:
        """Everything between two positions that repeats and is worth sharing.

        Every period is tried; comparing the signatures at a distance is one sweep over an array
        of numbers, so that this takes milliseconds for thousands of calls.
        """
        kinds = self.kinds[low:high]
        for period in range(1, len(kinds) // 2 + 1):
            equal = kinds[:-period] == kinds[period:]
            if np.count_nonzero(equal) < period:
                continue
            for start, end in _stretches(equal, period):
                for repeat in self._linked(low + start, low + end, period):
                    if self._is_block(repeat):
                        yield repeat

    def _linked(self, start: int, end: int, period: int) -> Iterator[_Repeat]:
        """The repeats in [start, end + period), whose signatures repeat, by their operands."""
        here = slice(self.first_slot[start], self.first_slot[end])
        there = slice(self.first_slot[start + period], self.first_slot[end + period])
        same = self.value[here] == self.value[there]
        same |= (self.distance[here] == self.distance[there]) & (
            self.role[here] == self.role[there]
        )
        odd = np.flatnonzero(~same)
        position = self.owner[here][odd]
        # What the next copy reads from this one, this one may read from before the run.
        entry = self.made[there][odd] >= position
        entries: dict[int, int] = {}
        for at, made, is_entry in zip(position, self.made[here][odd], entry, strict=True):
            # A call that may not be entered counts as made where it stands.
            entries[int(at)] = max(entries.get(int(at), -1), int(made) if is_entry else int(at))
        bounds = [start - 1, *sorted(entries), end]
        for before, after in itertools.pairwise(bounds):
            first = self._first_copy(before + 1, start, period, entries)
            copies, spare = divmod(after - first + period, period)
            if copies >= 2:
                yield _Repeat(first, period, copies, spare)

    def _first_copy(self, first: int, low: int, period: int, entries: Mapping[int, int]) -> int:
        """How far back the first copy goes, given that from `first` on operands correspond."""
        lowest, made_before = max(low, first - period), -1
        while first > lowest:
            made_before = max(made_before, entries.get(first - 1, -1))
            if made_before >= first - 1:
                break
            first -= 1
        return first

    def _is_block(self, repeat: _Repeat) -> bool:
        start, period = repeat.start, repeat.period
        if self.products[start + period] - self.products[start] < MIN_PRODUCTS:
            return False
        return bool(self._handed_over(start + period, period).size)

    def _handed_over(self, boundary: int, period: int) -> np.ndarray:
        """The values that the copy before a boundary hands to the one behind it."""
        slots = slice(self.first_slot[boundary], self.first_slot[boundary + period])
        made = self.made[slots]
        return np.unique(self.value[slots][(made >= boundary - period) & (made < boundary)])

    def _aligned(self, repeat: _Repeat) -> _Repeat:
        """The same copies begun later, where the fewest values go from one to the next.

        What follows the last copy often looks like the beginning of another (the final norm), or
        what precedes the first like the end of one; of equally good beginnings the last is taken.
        """
        shifts = range(repeat.spare + 1)
        shift = min(
            shifts,
            key=lambda s: (
                self._handed_over(repeat.start + s + repeat.period, repeat.period).size,
                -s,
            ),
        )
        return _Repeat(repeat.start + shift, repeat.period, repeat.copies, repeat.spare - shift)

    def _run(self, repeat: _Repeat) -> Run:
        edges = range(repeat.start, repeat.end + 1, repeat.period)
        slots = [
            slice(self.first_slot[a], self.first_slot[b]) for a, b in itertools.pairwise(edges)
        ]
        first = slots[0]
        own = (self.made[first] < 0) & (self.distance[first] < 0)
        for copy in slots[1:]:
            own &= (self.distance[copy] < 0) & (self.role[copy] == self.role[first])
        return Run(
            tuple(
                (
                    *self.names[start : start + repeat.period],
                    *(self.source_names[v] for v in self.value[copy][own].tolist()),
                )
                for start, copy in zip(edges, slots, strict=False)
            ),
            repeat.period,
        )


def _stretches(equal: np.ndarray, least: int) -> list[tuple[int, int]]:
    """The stretches [start, end) of at least `least` True in a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    long = ends - starts >= least
    return list(zip(starts[long].tolist(), ends[long].tolist(), strict=True))
