"""What the simulated step keeps for backward where policies say something else (`autopar.ir.keep`).

A region keeps what it reads from outside. When backward comes to it, all of it is made again: what
autograd saves of it is held from there, the rest for a moment. A gather that is made again is held
from the first call that needs it in the backward pass to the last; a bucket is sent for when the
one after it in the forward pass has arrived. What a call keeps in another
form is there in its own form while the backward of that call runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node
from autopar.ir.keep import KEEP, OFFLOAD, REGATHER, regions, resident
from autopar.ir.packed import INDICES, packed_bytes, packing_bytes
from autopar.passes.memory.effects import local_shape
from autopar.passes.memory.saved import Forward
from autopar.passes.memory.storage import Storage

#: Makes a storage: name, kind, bytes, position, module.
New = Callable[[str, str, int, int, str], Storage]
#: Notes what is used for a moment: position, call, bytes.
Moment = Callable[[int, Node, int], None]


@dataclass(eq=False)
class _Gather:
    """The results of a gather that is made again.

    nbytes, workspace:
        of each result that something keeps, and what gathering them uses for a moment
    opened:
        the calls (by position) that ask for results in the backward pass and have not run there;
        until they have, all results are held
    used:
        for each result the calls that use it
    before:
        the bucket that is sent for when this one has arrived
    """

    node: Node
    before: _Gather | None = None
    nbytes: dict[int, int] = field(default_factory=dict)
    workspace: int = 0
    opened: set[int] = field(default_factory=set)
    used: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    made: dict[int, Storage] = field(default_factory=dict)
    arrived: bool = False

    @property
    def is_awaited(self) -> bool:
        return bool(self.nbytes and self.opened and not self.made and not self.arrived)


@dataclass(eq=False)
class _Region:
    """A region that is computed again.

    held:
        what it keeps: all that it reads from outside
    effects:
        for each of its calls what it did, and the storages that the effect numbers
    """

    first: int
    last: int
    held: list[Storage] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    effects: dict[int, tuple[Forward, list[Storage]]] = field(default_factory=dict)


class Keeping:
    """The policies of one graph, during one simulation of its step.

    host:
        call -> bytes that are kept in the host's memory for it, and for none before it
    """

    def __init__(self, graph: Graph, new: New, moment: Moment, separate_memory: bool) -> None:
        self.graph, self.new, self.moment = graph, new, moment
        self.separate_memory = separate_memory
        self.resident = resident(graph)
        self.host: dict[str, int] = defaultdict(int)
        #: What was copied to the host -> the copy, where it takes of the device's memory.
        self._on_host: dict[int, Storage | None] = {}
        self._gathers: dict[int, _Gather] = {}
        self._last_bucket: _Gather | None = None
        self._opens: dict[int, list[_Gather]] = defaultdict(list)
        self._region_of: dict[int, _Region] = {}
        self._remade: dict[int, list[Storage]] = {}
        self._moments: dict[int, int] = defaultdict(int)
        position = {node.name: i for i, node in enumerate(graph.nodes)}
        for name, nodes in regions(tuple(graph.calls)):
            if name:
                region = _Region(position[nodes[0].name], position[nodes[-1].name])
                self._region_of.update((position[node.name], region) for node in nodes)

    def _back(self, i: int) -> int:
        return 2 * len(self.graph.nodes) - 1 - i

    # -- forward ------------------------------------------------------------------------------

    def saved(self, i: int, node: Node, effect: Forward, storages: list[Storage]) -> list[Storage]:
        """What is held from the forward of a call to its backward.

        storages:
            those that the effect numbers
        """
        if REGATHER in node.attrs:
            self._gather(node, effect, storages)
        region = self._region_of.get(i)
        if region is not None:
            region.effects[i] = effect, storages
            self._inside(i, node, region, storages)
            return []
        form = node.attrs.get(KEEP, "")
        held = []
        packing = 0
        for k in sorted(effect.saved):
            storage = storages[k]
            if id(storage) in self._gathers:
                self._need(storage, i)
            elif not form or self._stays(k, node, storages):
                held.append(storage.hold())
            else:
                held += self._packed(i, node, form, k, effect, storage)
                dtype = _dtype(node, k, effect)
                packing = max(packing, packing_bytes(node, form, dtype, storage.nbytes))
        self.moment(i, node, packing)
        return held

    def _gather(self, node: Node, effect: Forward, storages: Sequence[Storage]) -> None:
        gather = _Gather(node)
        if node.op == FUSED:
            gather.before, self._last_bucket = self._last_bucket, gather
        for k in node.attrs[REGATHER]:
            storage = storages[effect.homes[k]]
            if id(storage) not in self._gathers:
                self._gathers[id(storage)] = gather
                gather.nbytes[id(storage)] = storage.nbytes
        share = sum(gather.nbytes.values()) / max(sum(effect.fresh), 1)
        gather.workspace = int(effect.workspace * min(share, 1.0))

    def _need(self, storage: Storage, i: int, opened: bool = True) -> None:
        gather = self._gathers[id(storage)]
        if gather not in self._opens[i]:
            self._opens[i].append(gather)
        gather.used[id(storage)].add(i)
        if opened:
            gather.opened.add(i)

    def _inside(self, i: int, node: Node, region: _Region, storages: Sequence[Storage]) -> None:
        """A call of a region: the region keeps what it reads from outside."""
        effect, _ = region.effects[i]
        for k in effect.saved:
            if id(storages[k]) in self._gathers:
                self._need(storages[k], i, opened=False)
        form = node.attrs.get(KEEP, "")
        for value, storage in zip(node.operands, storages, strict=False):
            if id(storage) in region.known:
                continue
            region.known.add(id(storage))
            if id(storage) in self._gathers:
                self._need(storage, region.last)
            elif form == OFFLOAD and value.name not in self.resident:
                region.held += self._offload(i, node, storage, region.last)
            else:
                region.held.append(storage.hold())
        region.known.update(id(storage) for storage in storages[len(node.operands) :])

    def _stays(self, k: int, node: Node, storages: Sequence[Storage]) -> bool:
        """Whether a storage holds an operand that is there in any case."""
        return any(
            value.name in self.resident and storage is storages[k]
            for value, storage in zip(node.operands, storages, strict=False)
        )

    def _packed(
        self, i: int, node: Node, form: str, k: int, effect: Forward, storage: Storage
    ) -> list[Storage]:
        """What a call keeps on the device in place of a storage."""
        if form == OFFLOAD:
            return self._offload(i, node, storage, i)
        dims = INDICES.get(node.op, 0)
        is_input = k == 0 and bool(dims)
        plane = math.prod(local_shape(self.graph, node.operands[0])[-dims:]) if dims else 0
        dtype = _dtype(node, k, effect)
        nbytes = packed_bytes(node, form, dtype, storage.nbytes, plane, is_input)
        if nbytes == storage.nbytes:
            return [storage.hold()]
        if not is_input:
            self._moments[self._back(i)] += storage.nbytes
        name = f"{node.name} (kept in {form} form)"
        made = self.new(name, "activations", nbytes, i, node.origin.module)
        return [made.hold()] if nbytes else []

    def _offload(self, i: int, node: Node, storage: Storage, reader: int) -> list[Storage]:
        """Copy a storage to the host, for the backward of a call; what the device holds of it."""
        key, nbytes = id(storage), storage.nbytes
        if key not in self._on_host:
            self.host[node.name] += nbytes
            name, module = f"{node.name} (copied to the host)", node.origin.module
            apart = self.separate_memory
            self._on_host[key] = None if apart else self.new(name, "activations", nbytes, i, module)
        copy = self._on_host[key]
        if copy is None:
            self._moments[self._back(reader)] += nbytes
            return []
        return [copy.hold()]

    # -- backward -----------------------------------------------------------------------------

    def before(self, i: int, node: Node) -> int:
        """Backward comes to a call: make what it needs. Returns what that takes beyond it."""
        position = self._back(i)
        most = live = 0  # of one gather after the other, and then of the region
        for gather in self._opens[i]:
            if not gather.nbytes or gather.arrived:
                continue
            live += 0 if gather.made else self._send_for(gather, position)
            gather.arrived = True
            most = max(most, live + gather.workspace)
            if gather.before is not None and gather.before.is_awaited:
                live += self._send_for(gather.before, position)
                most = max(most, live)
        region = self._region_of.get(i)
        if region is not None and i == region.last:
            more, made = self._again(position, region)
            most, live = max(most, live + more), live + made
        self.moment(position, node, self._moments[position])
        return most - live

    def _send_for(self, gather: _Gather, position: int) -> int:
        """Hold what a gather makes; returns how much that is."""
        module = gather.node.origin.module
        gather.made = {
            key: self.new(gather.node.name, "gathered", nbytes, position, module).hold()
            for key, nbytes in gather.nbytes.items()
        }
        return sum(gather.nbytes.values())

    def after(self, i: int) -> None:
        """The backward of a call has run: let go of what nothing needs any longer."""
        position = self._back(i)
        for gather in self._opens[i]:
            gather.opened.discard(i)
            for used in gather.used.values():
                used.discard(i)
            done = [] if gather.opened else [k for k in gather.made if not gather.used[k]]
            for key in done:
                gather.made.pop(key).release(position)
        for storage in self._remade.pop(i, []):
            storage.release(position)
        region = self._region_of.get(i)
        if region is not None and i == region.first:
            for storage in region.held:
                storage.release(position)

    def _again(self, position: int, region: _Region) -> tuple[int, int]:
        """Make a region again: hold what is saved of it, the rest for a moment.

        Returns the most bytes that are there on the way, and how many are in the end.
        """
        last_use: dict[int, int] = {}
        saved: set[int] = set()
        for i, (effect, storages) in region.effects.items():
            last_use.update((id(storage), i) for storage in storages)
            saved.update(id(storages[k]) for k in effect.saved)
        made: dict[int, Storage] = {}
        passing: dict[int, int] = {}
        live = most = 0
        for i, (effect, storages) in region.effects.items():
            node = self.graph.nodes[i]
            for storage in storages[len(node.operands) :]:
                if id(storage) in saved:
                    name = f"{node.name} (computed again)"
                    made[id(storage)] = self.new(
                        name, "activations", storage.nbytes, position, node.origin.module
                    )
                    live += storage.nbytes
                elif i != region.last:  # running again stops when all that is saved is there
                    passing[id(storage)] = storage.nbytes
                    live += storage.nbytes
            most = max(most, live + effect.workspace)
            for key in [key for key in passing if last_use[key] == i]:
                live -= passing.pop(key)
            keys = {id(storages[k]) for k in effect.saved}
            self._remade[i] = [made[key].hold() for key in keys if key in made]
        return max(most, live), live


def _dtype(node: Node, k: int, effect: Forward) -> torch.dtype:
    """The dtype of what lies in a storage that a call keeps."""
    if k < len(node.operands):
        return node.operands[k].dtype
    for value, home in zip(node.results, effect.homes, strict=True):
        if home == k:
            return value.dtype
    return torch.int64 if node.op in INDICES else node.results[0].dtype
