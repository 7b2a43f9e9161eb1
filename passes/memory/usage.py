"""Memory as the assignment problem counts it: bytes per choice, and when they are held.

One choice of a problem node says which layouts it gives and asks. From `lifetimes` follows what is
held for it: a storage carried by a slot counts in the layout that the slot's node chose for it.
Added are what autograd keeps besides operands and results and what operators use for a moment
(`kept`), and the optimizer's state and workspace. What a reshard leaves and uses depends on the two
nodes that it lies between (`reshards`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.cut import largest
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import is_fetched
from autopar.ir.rule import Rule
from autopar.passes.blocks import NO_BLOCKS, Blocks
from autopar.passes.build import Built
from autopar.passes.choices import Choices
from autopar.passes.device import Device
from autopar.passes.memory.kept import Kept, Piece, Probe, kept_by
from autopar.passes.memory.lifetimes import Carried, Interval, Lifetimes, Slot
from autopar.passes.memory.reshards import ReshardMemories, ReshardMemory
from autopar.passes.memory.saved import Resolve, Spec
from autopar.passes.memory.shorten import shorten
from autopar.passes.memory.timeline import OPTIMIZER_WORKSPACE, optimizer_states
from autopar.passes.signature import signature
from autopar.passes.stand_ins import callable_of


@dataclass(frozen=True, eq=False)
class Usage:
    """Bytes that a problem node holds under each of its choices, over one interval.

    kind:
        equal for usages that hold the same at other times: those of the copies of a block
    times:
        how many nodes hold so much at the same time
    """

    node: int
    kind: Hashable
    usages: np.ndarray
    interval: Interval
    times: int


@dataclass(frozen=True, eq=False)
class Move:
    """A reshard between two problem nodes.

    memory, nbytes:
        what it needs, as parts of a tensor of so many bytes, over distinct layouts
    sources, targets:
        the layout of each choice of either node
    at, back:
        when it runs, and when a gradient comes back (None where none does)
    alone, back_alone:
        whether nothing else needs what it starts from
    """

    source: int
    target: int
    kind: Hashable
    memory: ReshardMemory
    nbytes: int
    sources: np.ndarray
    targets: np.ndarray
    at: int
    back: int | None
    alone: bool
    back_alone: bool
    times: int


class ProblemUsages:
    """What every node of the assignment problem of one graph holds.

    built:
        the problem; copies of a block may share their nodes
    blocks:
        the graph's blocks; copies that share their decisions are not looked at one by one

    Raises PlanError for an unknown optimizer.
    """

    def __init__(
        self,
        built: Built,
        graph: Graph,
        rules: Mapping[str, Rule],
        mesh: Mesh,
        device: Device,
        *,
        blocks: Blocks = NO_BLOCKS,
        optimizer: str = "adam",
        resolve: Resolve = callable_of,
        probe: Probe | None = None,
    ) -> None:
        models = {name: index for name, (index, _) in built.strategies.items()}
        short = shorten(graph, blocks, models)
        self.built, self.graph, self.rules, self.mesh = built, short.graph, rules, mesh
        self.passed_over, self._weights = short.passed_over, short.weights
        self.resolve, self.probe = resolve, probe
        self._memories = ReshardMemories(mesh, device)
        self.states = optimizer_states(optimizer)
        self.workspace = OPTIMIZER_WORKSPACE[optimizer]
        self._kept: dict[Hashable, Kept] = {}
        self.lives = Lifetimes(self.graph, resolve, built.relays, self._also_saved)
        self._shares: dict[Hashable, tuple[Sequence[Layout], np.ndarray]] = {}
        self._usages: dict[Hashable, np.ndarray] = {}
        self._reshards: dict[Hashable, tuple[ReshardMemory, np.ndarray, np.ndarray]] = {}
        self._of_call: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def _times(self, slot: Slot) -> int:
        """For how many slots of the whole graph one stands."""
        name = slot.name
        if slot.kind == "handed":
            name = self.graph.producers[name][0].name
        return self._weights.get(name, 1)

    # -- what nodes hold ----------------------------------------------------------------------

    def usages(self) -> Iterator[Usage]:
        """What single nodes hold, in no particular order."""
        for carried in self.lives.carried:
            yield from self._carried(carried)
        for node in self.graph.calls:
            yield from self._kept_for(node)

    def optimizer_step(self) -> dict[int, np.ndarray]:
        """Problem node of a trained parameter -> bytes in use while it is updated."""
        found = {}
        for node in self.graph.sources("param"):
            (value,) = node.results
            index, layouts = self.built.sources[node.name]
            if value.grad and self.workspace and index not in found:
                share = self._share(layouts, value.shape, tuple(range(len(value.shape))))
                found[index] = self.workspace * value.nbytes * share
        return found

    def _carried(self, carried: Carried) -> Iterator[Usage]:
        slot = carried.slot
        index, layouts, value = self.place(slot)
        kind = (index, slot.kind, slot.number, carried.nbytes, carried.dims, carried.grad)
        if kind not in self._usages:
            usages = carried.nbytes * self._share(layouts, value.shape, carried.dims)
            node = self.graph.producers[value.name][0]
            if slot.kind == "made" and node.op == "param" and value.grad and not carried.grad:
                usages = usages * (1 + self.states)
            self._usages[kind] = usages
        usages, times = self._usages[kind], self._times(slot)
        if slot.kind != "read" or carried.grad:
            yield Usage(index, kind, usages, carried.interval, times)
            return
        (lo, hi), until = carried.interval, self.lives.calls[slot.name] + 1
        if lo < until:
            yield Usage(index, kind, usages, (lo, min(until, hi)), times)
        if until < hi:
            kept = self._saved(slot, index)
            held = np.where(kept, usages, 0.0)
            yield Usage(index, (*kind, "saved"), held, (max(lo, until), hi), times)

    def saved(self, slot: Slot) -> np.ndarray | None:
        """Whether a copy read by a call is kept for backward, under each of its strategies.

        None where that does not depend on them.
        """
        if slot.kind != "read" or not self._kept_by(self._node(slot)).assisted:
            return None
        return self._saved(slot, self.built.strategies[slot.name][0])

    def _node(self, slot: Slot) -> Node:
        return self.graph.producers[slot.name][0]

    def _saved(self, slot: Slot, index: int) -> np.ndarray:
        """Whether an operand is kept for backward, under each strategy of its call."""
        node = self._node(slot)
        choices = self.built.choices[index]
        usually = slot.number in self.lives.saved[slot.name]
        saved = np.full(len(choices.strategies), usually)
        for factor, assisted in self._kept_by(node).assisted.items():
            split = self._pieces(node, choices, factor) > 1
            saved = np.where(split, slot.number in assisted.operands, saved)
        return saved

    def _kept_for(self, node: Node) -> Iterator[Usage]:
        """What autograd keeps for a call besides, and what is used while it runs."""
        index, _ = self.built.strategies[node.name]
        if index not in self._of_call:
            self._of_call[index] = self._observed(node, self.built.choices[index])
        internals, forward, backward = self._of_call[index]
        at = self.lives.calls[node.name]
        back = self.lives.mirrored(at)
        times = self._weights.get(node.name, 1)
        yield Usage(index, (index, "internals"), internals, (at, back + 1), times)
        yield Usage(index, (index, "forward"), forward, (at, at + 1), times)
        yield Usage(index, (index, "backward"), backward, (back, back + 1), times)

    # -- what reshards hold -------------------------------------------------------------------

    def moves(self) -> Iterator[tuple[Slot, Move]]:
        """Every reshard between two choices, by the slot it goes to."""
        for slot, (origin, at) in self.lives.reshards.items():
            source, made, value = self.place(origin)
            target, asked, _ = self.place(slot)
            grad = value.grad and self._flows(slot)
            kind = (source, origin.kind, origin.number, target, slot.kind, slot.number, grad)
            if kind not in self._reshards:
                fetched = origin.kind == "made" and is_fetched(self._node(origin))
                self._reshards[kind] = self._reshard(made, asked, value, grad, fetched)
            memory, sources, targets = self._reshards[kind]
            yield (
                slot,
                Move(
                    source,
                    target,
                    kind,
                    memory,
                    value.nbytes,
                    sources,
                    targets,
                    at,
                    self.lives.mirrored(at) if slot in self.lives.returning else None,
                    (slot, False) in self.lives.alone,
                    (slot, True) in self.lives.alone,
                    self._times(slot),
                ),
            )

    def _flows(self, slot: Slot) -> bool:
        """Whether the problem prices a gradient that goes back through a reshard."""
        if slot.kind == "read":
            return self.graph.producers[slot.name][0].operand_grad(slot.number)
        if slot.kind == "handed":
            name = slot.name
            returned = any(v.name == name for v in self.graph.outputs if isinstance(v, Value))
            uses = self.graph.consumers[name]
            return returned or any(node.operand_grad(k) for node, k in uses)
        return slot.kind == "returned"

    def _reshard(
        self,
        made: Sequence[Layout],
        asked: Sequence[Layout],
        value: Value,
        grad: bool,
        fetched: bool,
    ) -> tuple[ReshardMemory, np.ndarray, np.ndarray]:
        rows, columns = list(dict.fromkeys(made)), list(dict.fromkeys(asked))
        memory = self._memories.between(rows, columns, value.shape, grad=grad, fetched=fetched)
        row = {layout: k for k, layout in enumerate(rows)}
        column = {layout: k for k, layout in enumerate(columns)}
        return (
            memory,
            np.array([row[layout] for layout in made], dtype=np.intp),
            np.array([column[layout] for layout in asked], dtype=np.intp),
        )

    def place(self, slot: Slot) -> tuple[int, Sequence[Layout], Value]:
        """The problem node that decides the layout of a slot, its layouts, and the value."""
        graph, built = self.graph, self.built
        match slot.kind:
            case "handed":
                index, layouts = built.relays[slot.name]
                return index, layouts, graph.value(slot.name)
            case "read":
                index, _ = built.strategies[slot.name]
                node = graph.producers[slot.name][0]
                return index, built.choices[index].operands[slot.number], node.operands[slot.number]
            case "returned":
                returned = built.outputs[slot.number]
                assert returned is not None
                return *returned, graph.outputs[slot.number]
            case "updated":
                value = next(value for name, value in graph.updates if name == slot.name)
                return built.updates[slot.name], (Layout.whole(len(value.shape)),), value
        node = graph.producers[slot.name][0]
        value = node.results[slot.number]
        if node.is_source:
            return *built.sources[slot.name], value
        index, _ = built.strategies[slot.name]
        return index, built.choices[index].results[slot.number], value

    # -- sizes --------------------------------------------------------------------------------

    def _share(
        self, layouts: Sequence[Layout], shape: tuple[int, ...], dims: tuple[int, ...]
    ) -> np.ndarray:
        """The part of a tensor, as far as some dimensions go, that a rank holds."""
        key = id(layouts), shape, dims
        if key not in self._shares:
            part = {
                layout: 1 / layout.pieces(shape, self.mesh, dims)
                for layout in dict.fromkeys(layouts)
            }
            # The layouts are kept so that their identity stays.
            self._shares[key] = layouts, np.array([part[layout] for layout in layouts])
        return self._shares[key][1]

    def _pieces(self, node: Node, choices: Choices, name: str) -> np.ndarray:
        """How often the largest part of a factor goes into it, under every strategy."""
        factor = self.rules[node.name].by_name[name]
        parts = {
            axes: factor.size / largest(factor.size, self.mesh.sizes_of(axes)) if axes else 1.0
            for axes in {s.axes_of(name) for s in choices.strategies}
        }
        return np.array([parts[s.axes_of(name)] for s in choices.strategies])

    # -- what autograd keeps besides ----------------------------------------------------------

    def _also_saved(self, node: Node, operands: Sequence[Spec]) -> Iterator[int]:
        for assisted in self._kept_on(node, tuple(operands)).assisted.values():
            yield from assisted.operands

    def _kept_by(self, node: Node) -> Kept:
        return self._kept_on(node, tuple(self.lives.effects.spec(v) for v in node.operands))

    def _kept_on(self, node: Node, operands: tuple[Spec, ...]) -> Kept:
        key = signature(node), operands
        if key not in self._kept:
            rule = self.rules[node.name]
            self._kept[key] = kept_by(node, rule, operands, self.resolve, self.probe)
        return self._kept[key]

    def _observed(self, node: Node, choices: Choices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Internals, forward and backward workspace under every strategy."""
        kept = self._kept_by(node)
        count = len(choices.strategies)
        split = {
            factor.name: self._pieces(node, choices, factor.name)
            for factor in self.rules[node.name].factors
        }
        found = [
            sum((_shrunk(piece, split, count) for piece in kept.internals), np.zeros(count)),
            _shrunk(kept.forward, split, count),
            _shrunk(kept.backward, split, count),
        ]
        for factor, assisted in kept.assisted.items():
            if not node.operands:
                continue
            value, layouts = node.operands[0], choices.operands[0]
            share = self._share(layouts, value.shape, tuple(range(len(value.shape))))
            with_it = (
                assisted.internals * share,
                assisted.forward * share,
                assisted.backward * share,
            )
            found = [
                np.where(split[factor] > 1, nbytes, usual)
                for nbytes, usual in zip(with_it, found, strict=True)
            ]
        internals, forward, backward = found
        return internals, forward, backward


def _shrunk(piece: Piece, split: dict[str, np.ndarray], strategies: int) -> np.ndarray:
    usages = np.full(strategies, float(piece.nbytes))
    for factor in piece.factors:
        usages /= split[factor]
    return usages
