"""How long the tensors of an unpartitioned graph live, and which problem node carries them.

See `autopar.passes.memory_usage` for the scheme. Positions are those of `autopar.passes.memory`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Node, Value
from autopar.passes.memory import memory_timeline
from autopar.passes.node_effects import Effects
from autopar.passes.saved import Resolve

Interval = tuple[int, int]
NOTHING: Interval = (0, 0)


@dataclass(frozen=True)
class Moment:
    """Memory in use for a while that goes by the layout of one result of the node.

    nbytes:
        of the whole tensor
    """

    result: int
    nbytes: int
    interval: Interval


@dataclass
class OfCall:
    """What a call carries: saved operands and results (by index), and what is on its way."""

    interval: Interval
    operands: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


@dataclass
class OfRelay:
    """What a relay carries: the value over the interval, and gradients on their way."""

    interval: Interval = NOTHING
    moments: list[Moment] = field(default_factory=list)


@dataclass
class _Storage:
    """One piece of memory: the value it was made for, who uses and who saves what is in it.

    uses:
        positions of the calls that read it
    savers:
        (position, operand index or None for the producer itself, the value saved)
    returned:
        the outputs that show it
    """

    root: Value
    made: int
    uses: list[int] = field(default_factory=list)
    savers: list[tuple[int, int | None, Value]] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)


class Lifetimes:
    """Who carries what, for every node of the problem of a graph without layouts."""

    def __init__(self, graph: Graph, resolve: Resolve) -> None:
        self.graph = graph
        self.count = len(graph.nodes)
        self.position = {v.name: i for i, n in enumerate(graph.nodes) for v in n.results}
        self.effects = Effects(graph, resolve)
        # View -> the value it is a view of.
        self.base: dict[str, Value] = {}
        self.storages: dict[str, _Storage] = {}
        self.relayed = _shared(graph)
        self.calls: dict[str, OfCall] = {}
        self.relays: dict[str, OfRelay] = {}
        self.outputs: dict[str, Interval] = {}
        self._read()
        for storage in self.storages.values():
            if not graph.producers[storage.root.name][0].is_source:
                self._carry(storage)
        self._moments(resolve)

    def of_call(self, node: Node) -> OfCall:
        return self.calls[node.name]

    def of_relay(self, value: Value) -> OfRelay:
        return self.relays.get(value.name, OfRelay())

    def of_output(self, value: Value) -> Interval:
        return self.outputs.get(value.name, NOTHING)

    def of_parameter(self, value: Value) -> tuple[Interval, Interval]:
        """When a parameter is in use, and when its gradient is being summed."""
        storage = self.storages[value.name]
        first, last = min(storage.uses, default=0), max(storage.uses, default=0)
        ends = [last + 1, *(2 * self.count - saver[0] for saver in storage.savers)]
        return (first, max(ends)), (2 * self.count - 1 - last, 2 * self.count - first)

    def of_copy(self, value: Value, use: Node | None) -> tuple[Interval, Interval, Interval]:
        """When the copy of a value that one use asks for is kept, read, and gets a gradient.

        A use that is a view of a parameter hands the copy on, to all that read or save the value.
        What the use itself carries, or hands on as a view, is not kept here.
        """
        storage = self._root(value)
        source = self.graph.producers[storage.root.name][0].is_source
        view = use is not None and any(v.name in self.base for v in use.results)
        if use is None or view:
            kept, back = self.of_parameter(storage.root)
            return (kept, NOTHING, back) if source else (NOTHING, NOTHING, NOTHING)
        at = self.position[use.name]
        back = (2 * self.count - 1 - at, 2 * self.count - at)
        carried = {use.operands[k].name for k in self.calls[use.name].operands}
        saved = any(saver[0] == at and saver[2].name == value.name for saver in storage.savers)
        if saved and value.name not in carried:
            return (at, 2 * self.count - at), NOTHING, back
        return NOTHING, (at, at + 1), back

    def stored_dims(self, value: Value) -> tuple[int, ...]:
        """The dimensions along which a value has memory of its own (not the expanded ones)."""
        spec = self.effects.spec(value)
        return tuple(
            d for d, (n, step) in enumerate(zip(spec.shape, spec.stride, strict=True))
            if step or n == 1
        )  # fmt: skip

    # -- reading the graph --------------------------------------------------------------------

    def _root(self, value: Value) -> _Storage:
        while value.name in self.base:
            value = self.base[value.name]
        return self.storages[value.name]

    def _read(self) -> None:
        for i, node in enumerate(self.graph.nodes):
            if node.is_source:
                self.storages[node.name] = _Storage(node.results[0], i)
                continue
            effect = self.effects.forward(node)
            self.calls[node.name] = OfCall((i, 2 * self.count - i))
            operands = node.operands
            for operand in operands:
                self._root(operand).uses.append(i)
            made: dict[int, Value] = {}
            for value, home in zip(node.results, effect.homes, strict=True):
                if home < len(operands):
                    self.base[value.name] = operands[home]
                elif home in made:
                    self.base[value.name] = made[home]
                else:
                    made[home] = value
                    self.storages[value.name] = _Storage(value, i)
            for k in sorted(effect.saved):
                if k < len(operands):
                    self._root(operands[k]).savers.append((i, k, operands[k]))
                elif k in made:
                    self.storages[made[k].name].savers.append((i, None, made[k]))
        for output in self.graph.outputs:
            if isinstance(output, Value):
                self._root(output).returned.append(output)

    # -- who carries --------------------------------------------------------------------------

    def _carry(self, storage: _Storage) -> None:
        """Hand the storage of a call's result to the nodes that carry it."""
        root, made = storage.root, storage.made
        producer, result = self.graph.producers[root.name]
        own = [saver for saver in storage.savers if saver[1] is None]
        taken: list[int] = []
        if own and root.name not in self.relayed:
            self.calls[producer.name].results.append(result)
            taken.append(made)
        else:
            for at, index, value in storage.savers:
                top = self._top_relay(value)
                if top is not None:
                    taken.append(self._extend(top, made, 2 * self.count - at))
                elif index is not None:
                    self.calls[self.graph.nodes[at].name].operands.append(index)
                    taken.append(at)
        for value in storage.returned:
            top = self._top_relay(value)
            if top is not None:
                taken.append(self._extend(top, made, 2 * self.count + 1))
            else:
                self.outputs[value.name] = (made, 2 * self.count + 1)
                taken.append(made)
        last = max(storage.uses, default=made)
        if root.name in self.relayed:
            self._extend(root, made, last + 1)
            return
        until = min(taken, default=last + 1)
        if until > made:
            self.calls[producer.name].moments.append(Moment(result, root.nbytes, (made, until)))

    def _top_relay(self, value: Value) -> Value | None:
        """Of the values that a view goes back to, itself included, the first that is relayed."""
        found = value if value.name in self.relayed else None
        while value.name in self.base:
            value = self.base[value.name]
            found = value if value.name in self.relayed else found
        return found

    def _extend(self, relay: Value, made: int, end: int) -> int:
        """Let a relay carry its value at least until `end`; from when on it does."""
        known = self.relays.setdefault(relay.name, OfRelay())
        start = made if relay.name not in self.base else self.position[relay.name]
        known.interval = (start, max(known.interval[1], end))
        return start

    # -- gradients ----------------------------------------------------------------------------

    def _moments(self, resolve: Resolve) -> None:
        """The gradients on their way, from the simulation of the whole graph."""
        timeline = memory_timeline(self.graph, resolve, optimizer="none")
        for item in timeline.held:
            if item.kind != "transients" or item.name not in self.graph.producers:
                continue
            producer, result = self.graph.producers[item.name]
            moment = Moment(result, item.nbytes, (item.start, item.end))
            if producer.is_source:
                continue
            if item.name in self.relayed:
                self.relays.setdefault(item.name, OfRelay()).moments.append(moment)
            else:
                self.calls[producer.name].moments.append(moment)


def _shared(graph: Graph) -> set[str]:
    """The values with several uses, which get a relay; returning and updating are uses."""
    names = [v.name for node in graph.nodes for v in node.operands]
    names += [v.name for v in graph.outputs if isinstance(v, Value)]
    names += [v.name for _, v in graph.updates]
    return {name for name, uses in Counter(names).items() if uses > 1}
