"""Lower bounds by message passing: tree-reweighted sweeps, a level at a time.

Every node and edge keeps its share of the total cost. Moving cost between them changes no
assignment's total, and the sum of everyone's least share is a lower bound. A sweep visits the
nodes in order; each takes what its edges can spare and hands its costs on along the monotone
chains of the order, which never lowers the bound. Nodes of a level are not adjacent, so one
level is a handful of array operations on blocks of equally shaped edges.

Memory is priced into the node costs by one multiplier per live set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import EndArrays, Layout

# A share this close to the node's least, relative to the costs that were moved, is the least.
_TIE = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class _Block:
    """Equally shaped edges into one level.

    Attributes:
        costs: [source classes, target classes, m].
        source: slots of the source ends, int [source classes, m].
        target: slots of the target ends, int [target classes, m].
        edges: which edges these are, int [m].
    """

    costs: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class _Level:
    """One level in one direction: the blocks to pull from and the ends to push to.

    Attributes:
        lo, hi: the span of the level's options.
        shapes, entries: the spans of the level's shapes of memory and of their entries.
        starts: where each node's options begin, relative to ``lo``.
        sizes: how many options each node has.
        share: per pushed slot, the part of the node's costs that is handed to the edge.
    """

    lo: int
    hi: int
    shapes: slice
    entries: slice
    starts: np.ndarray
    sizes: np.ndarray
    blocks: list[_Block]
    pull: EndArrays
    push: EndArrays
    share: np.ndarray


class Dual:
    """A reparametrisation of a layout's costs and the lower bound it proves.

    Attributes:
        multipliers: price of memory per live set, float64 [T].
        message: what every edge end has handed to its node, float64 [slots].
        share: what is left at the nodes, float64 [options].
        expected: memory of the option(s) each node preferred when last visited, as the part of
            every shape [F].
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        memory = layout.memory
        self.multipliers = np.zeros(0 if memory is None else len(memory.live.room))
        self.message = np.zeros(layout.slot_count)
        self.share = layout.costs.copy()
        self.expected = np.zeros(0 if memory is None else len(memory.owner))
        self._forward = self._direction(0)
        self._backward = self._direction(1)

    def inherit(self, other: Dual, multipliers: np.ndarray) -> None:
        """Starts from the messages of a dual whose nodes have these options and others."""
        layout, theirs = self.layout, other.layout
        options, their_options = layout.network.options, theirs.network.options
        edge_of = {
            (theirs.nodes[u], theirs.nodes[v]): edge
            for edge, (u, v) in enumerate(theirs.ends.tolist())
        }
        for edge, ends in enumerate(layout.ends.tolist()):
            nodes = [layout.nodes[end] for end in ends]
            found, sides = edge_of.get((nodes[0], nodes[1])), (0, 1)
            if found is None:
                found, sides = edge_of.get((nodes[1], nodes[0])), (1, 0)
            if found is None:
                continue
            classes = (layout.links[edge].own, layout.links[edge].other)
            their_classes = (theirs.links[found].own, theirs.links[found].other)
            for side, node in enumerate(nodes):
                at = np.searchsorted(their_options[node], options[node])
                slot = theirs.slots[found, sides[side]] + their_classes[sides[side]][at]
                self.message[layout.slots[edge, side] + classes[side]] = other.message[slot]
        self.multipliers = multipliers.copy()
        self.share = self.shares()

    def _direction(self, source: int) -> list[_Level]:
        layout, target = self.layout, 1 - source
        level, offset, ends = layout.level, layout.offset, layout.ends
        count = len(layout.nodes)
        levels = int(level[-1]) + 1 if count else 0
        degree = [np.bincount(ends[:, side], minlength=count) for side in (0, 1)]
        weight = 1.0 / np.maximum(np.maximum(*degree), 1)
        bounds = np.searchsorted(level, np.arange(levels + 1))
        memory = layout.memory
        result = []
        for index in range(levels) if source == 0 else reversed(range(levels)):
            first, last = int(bounds[index]), int(bounds[index + 1])
            incoming = np.flatnonzero(level[ends[:, target]] == index)
            outgoing = np.flatnonzero(level[ends[:, source]] == index)
            shapes = entries = slice(0, 0)
            if memory is not None:
                shapes = slice(*np.searchsorted(memory.owner, [first, last]).tolist())
                entries = slice(int(memory.offset[shapes.start]), int(memory.offset[shapes.stop]))
            result.append(
                _Level(
                    int(offset[first]),
                    int(offset[last]),
                    shapes,
                    entries,
                    offset[first:last] - offset[first],
                    np.diff(offset[first : last + 1]),
                    self._blocks(incoming, source),
                    layout.end_arrays(incoming, target),
                    layout.end_arrays(outgoing, source),
                    np.repeat(weight[ends[outgoing, source]], layout.shape[outgoing, source]),
                )
            )
        return result

    def _blocks(self, edges: np.ndarray, source: int) -> list[_Block]:
        layout = self.layout
        by_shape: dict[tuple[int, int], list[int]] = {}
        for edge in edges.tolist():
            by_shape.setdefault(layout.links[edge].costs.shape, []).append(edge)
        blocks = []
        for shape, members in sorted(by_shape.items()):
            costs = np.stack([layout.links[edge].costs for edge in members], axis=-1)
            group = np.array(members)
            slots = [layout.slots[group, side] + np.arange(shape[side])[:, None] for side in (0, 1)]
            if source == 1:
                costs = np.ascontiguousarray(costs.transpose(1, 0, 2))
            blocks.append(_Block(costs, slots[source], slots[1 - source], group))
        return blocks

    def sweep(self) -> None:
        """One pass forward and one back."""
        for level in self._forward:
            self._visit(level)
        for level in self._backward:
            self._visit(level)

    def _visit(self, level: _Level) -> None:
        message, share = self.message, self.share
        here = share[level.lo : level.hi]
        pull, push = level.pull, level.push
        if level.blocks:
            before = message[pull.slot]
            for block in level.blocks:
                spare = (block.costs - message[block.source][:, None, :]).min(axis=0)
                message[block.target] = spare
            gained = message[pull.slot] - before
            here += np.bincount(pull.option - level.lo, gained[pull.of_entry], len(here))
        if level.shapes.start < level.shapes.stop:
            self._prefer(level, here)
        if len(push.slot):
            handed = np.minimum.reduceat(share[push.option], push.start) * level.share
            message[push.slot] -= handed
            here -= np.bincount(push.option - level.lo, handed[push.of_entry], len(here))

    def _prefer(self, level: _Level, here: np.ndarray) -> None:
        least = np.repeat(np.minimum.reduceat(here, level.starts), level.sizes)
        best = (here - least <= _TIE * (1 + np.abs(least))).astype(np.float64)
        memory = self.layout.memory
        assert memory is not None
        weights = best[memory.option[level.entries] - level.lo]
        starts = memory.offset[level.shapes] - level.entries.start
        self.expected[level.shapes] = np.add.reduceat(
            memory.part[level.entries] * weights, starts
        ) / np.add.reduceat(weights, starts)

    def price(self, multipliers: np.ndarray) -> None:
        """Replaces the multipliers of the live sets, float64 [T], all >= 0."""
        self.share += self._priced(multipliers - self.multipliers)
        self.multipliers = multipliers

    def _priced(self, multipliers: np.ndarray) -> np.ndarray:
        memory = self.layout.memory
        if memory is None:
            return np.zeros(len(self.layout.costs))
        return memory.price(multipliers)

    def shares(self) -> np.ndarray:
        """``share``, computed anew from costs, multipliers and messages."""
        total = self.layout.costs + self._priced(self.multipliers)
        for ends in self.layout.all_ends:
            moved = self.message[ends.slot][ends.of_entry]
            total += np.bincount(ends.option, moved, len(total))
        return total

    def restore(self, multipliers: np.ndarray, message: np.ndarray) -> None:
        """Goes back to an earlier state."""
        self.multipliers, self.message = multipliers.copy(), message.copy()
        self.share = self.shares()

    def bound(self) -> float:
        """The lower bound, computed anew from the costs and the messages."""
        layout = self.layout
        total = layout.network.constant
        for level in self._forward:
            for block in level.blocks:
                rest = block.costs - self.message[block.source][:, None, :]
                total += float((rest - self.message[block.target]).min(axis=(0, 1)).sum())
        if layout.nodes:
            total += float(np.minimum.reduceat(self.shares(), layout.offset[:-1]).sum())
        if layout.memory is not None:
            total -= float(self.multipliers @ layout.memory.live.room)
        return total

    def reduced_costs(self) -> tuple[np.ndarray, np.ndarray]:
        """How much above the bound an assignment is at least that takes an option or a pair.

        Returns (float64 [options], float64 [pairs]), pairs as in ``Layout.pair_costs``.
        """
        layout = self.layout
        share = self.shares()
        least = np.minimum.reduceat(share, layout.offset[:-1])
        option = share - least[layout.owner]
        slot = np.zeros(layout.slot_count)
        for ends in layout.all_ends:
            if len(ends.slot):
                slot[ends.slot] = np.minimum.reduceat(option[ends.option], ends.start)
        pair = np.empty(len(layout.pair_costs))
        for edge, link in enumerate(layout.links):
            (rows, columns), (u, v) = link.costs.shape, layout.slots[edge]
            in_u, in_v = slice(u, u + rows), slice(v, v + columns)
            rest = link.costs - self.message[in_u, None] - self.message[in_v]
            rest += (slot[in_u, None] + slot[in_v]) - rest.min()
            pair[layout.pair_offset[edge] : layout.pair_offset[edge + 1]] = rest.reshape(-1)
        return option, pair

    def decode(self, forbidden: float) -> np.ndarray:
        """Options chosen one level after another given the earlier ones, int [nodes].

        Best after a whole sweep. A forbidden pair counts as the cost ``forbidden``, so the
        assignment may hold some.
        """
        layout, message = self.layout, self.message
        choice = np.zeros(len(layout.nodes), dtype=np.intp)
        moved = np.zeros(layout.slot_count)
        for level in self._forward:
            costs = self.share[level.lo : level.hi].copy()
            for block in level.blocks:
                column = np.arange(len(block.edges))
                chosen = layout.classes(block.edges, 0, choice)
                moved[block.target] = (
                    np.minimum(block.costs[chosen, :, column].T, forbidden)
                    - message[block.source[chosen, column]]
                    - message[block.target]
                )
            pull = level.pull
            if len(pull.slot):
                costs += np.bincount(
                    pull.option - level.lo, moved[pull.slot][pull.of_entry], len(costs)
                )
            least = np.repeat(np.minimum.reduceat(costs, level.starts), level.sizes)
            hits = np.flatnonzero(costs <= least)
            positions, lowest = np.unique(layout.owner[level.lo + hits], return_index=True)
            choice[positions] = level.lo + hits[lowest] - layout.offset[positions]
        return choice
