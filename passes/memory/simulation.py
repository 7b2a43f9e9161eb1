"""The memory timeline of a graph: its step is run through, on sizes alone.

Forward, each call is observed on the shapes and strides its operands have (`saved`), so that views
are told from copies. Backward, gradients flow from the outputs and are added up as
autograd does it: into the first term where nothing else holds it, else into a new tensor. The
gradients of a bucket are under way until the next bucket is sent, or to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.keep import OFFLOAD, STATE, STEP_BYTES
from autopar.ir.steps import STEPS
from autopar.passes.memory.effects import Effects
from autopar.passes.memory.keeping import Keeping
from autopar.passes.memory.saved import Backward, Resolve, Spec
from autopar.passes.memory.storage import Storage
from autopar.passes.memory.timeline import OPTIMIZER_WORKSPACE, Held, Timeline, optimizer_states


def memory_timeline(
    graph: Graph, resolve: Resolve, *, optimizer: str = "adam", separate_memory: bool = True
) -> Timeline:
    """What one rank holds during one training step.

    graph:
        a partitioned graph, or one without layouts: the step of one device then
    resolve:
        operator name -> what one rank runs for it, collectives included, able to run on fake
        tensors (`stand_ins.callable_of` serves for a graph without layouts)
    optimizer:
        a key of `timeline.OPTIMIZER_STATES`; states have the dtype of their parameter, as
        `torch.optim` keeps them
    separate_memory:
        whether the host's memory is another than the device's

    Counted are the parameters that the graph uses, and outputs until the step ends (a training
    loop holds them). Gradients start from the scalar outputs, or from all outputs where there is
    no scalar. Raises PlanError for an unknown optimizer.
    """
    return _Simulation(graph, Effects(graph, resolve), optimizer, separate_memory).run()


@dataclass
class _Gradient:
    """The gradient of a value as far as it has been summed."""

    spec: Spec
    storage: Storage


class _Simulation:
    def __init__(
        self, graph: Graph, effects: Effects, optimizer: str, separate_memory: bool
    ) -> None:
        self.graph, self.effects, self.optimizer = graph, effects, optimizer
        self.separate_memory = separate_memory
        self.states = optimizer_states(optimizer)
        self.count = len(graph.nodes)
        self.storages: list[Storage] = []
        self.momentary: list[Held] = []
        self.home: dict[str, Storage] = {}
        self.saved: list[list[Storage]] = [[] for _ in graph.nodes]
        self.pending: dict[str, _Gradient] = {}
        self.last_use = self._last_uses()
        self.parameters = {n.name: n for n in graph.sources("param")}
        self.keeping = Keeping(graph, self._new, self._moment, separate_memory)
        self.host: dict[str, int] = {}
        #: A bucket that was sent at a position of the backward pass and has not arrived yet.
        self.under_way: tuple[Node, int, Backward] | None = None

    @property
    def end(self) -> int:
        return 2 * self.count

    def run(self) -> Timeline:
        dying: dict[int, list[str]] = {}
        for name, last in self.last_use.items():
            dying.setdefault(last, []).append(name)
        for i, node in enumerate(self.graph.nodes):
            if node.is_source:
                self._source(node)
            else:
                self._forward(i, node)
            for name in dying.get(i, []):
                self.home[name].release(i)
        self._seed()
        for i in reversed(range(self.count)):
            if not self.graph.nodes[i].is_source:
                self._backward(i, self.graph.nodes[i])
        self._moment(self.end - 1, self.graph.nodes[0], self._arrive(self.end - 1))
        assumed = tuple(sorted(self.effects.assumed))
        held = (*self._held(), *self._state_in_parts())
        return Timeline(held, self.count, assumed, dict(self.keeping.host), self.host)

    def _last_uses(self) -> dict[str, int]:
        """Value -> the forward position after which no name refers to it any more.

        Outputs and sources are held by the caller, new values of buffers until forward ends.
        """
        last = {v.name: i for i, node in enumerate(self.graph.nodes) for v in node.results}
        for i, node in enumerate(self.graph.nodes):
            last.update((v.name, i) for v in node.operands)
        last.update((value.name, self.count - 1) for _, value in self.graph.updates)
        kept = {v.name for v in self.graph.outputs if isinstance(v, Value)}
        kept |= {node.name for node in self.graph.nodes if node.is_source}
        return {name: position for name, position in last.items() if name not in kept}

    # -- forward ------------------------------------------------------------------------------

    def _new(self, name: str, kind: str, nbytes: int, start: int, module: str) -> Storage:
        storage = Storage(name, kind, nbytes, start, module)
        self.storages.append(storage)
        return storage

    def _source(self, node: Node) -> None:
        (value,) = node.results
        spec = self.effects.spec(value)
        kind = "parameters" if node.op == "param" else "inputs"
        storage = self._new(node.target or node.name, kind, spec.nbytes, 0, node.origin.module)
        self.home[value.name] = storage.hold()
        if node.op == "param" and value.grad and self.states:
            nbytes = self.states * spec.nbytes
            if node.attrs.get(STATE) == OFFLOAD:
                self.host[node.target] = nbytes
                if self.separate_memory:
                    return
            self._new(node.target, "optimizer", nbytes, 0, node.origin.module).hold()

    def _forward(self, i: int, node: Node) -> None:
        effect = self.effects.forward(node)
        storages = [self.home[v.name] for v in node.operands]
        kind = "gathered" if node.op in STEPS or node.op == FUSED else "activations"
        named = {home: v.name for v, home in zip(node.results, effect.homes, strict=True)}
        for k, nbytes in enumerate(effect.fresh, len(storages)):
            name = named.get(k, f"{node.name} (kept by {node.op})")
            storages.append(self._new(name, kind, nbytes, i, node.origin.module))
        made = [storage.hold() for storage in storages[len(node.operands) :]]
        for value, home in zip(node.results, effect.homes, strict=True):
            self.home[value.name] = storages[home].hold()
        self.saved[i] = self.keeping.saved(i, node, effect, storages)
        for storage in made:
            storage.release(i)
        self._moment(i, node, effect.workspace)

    def _moment(self, position: int, node: Node, nbytes: int) -> None:
        """What a call uses while it runs."""
        if nbytes:
            self.momentary.append(
                Held(node.name, "workspace", nbytes, position, position + 1, node.origin.module)
            )

    # -- backward -----------------------------------------------------------------------------

    def _seed(self) -> None:
        """The gradients that the training loop hands in."""
        values = [v for v in self.graph.outputs if isinstance(v, Value) and v.grad]
        scalars = [v for v in values if v.numel == 1]
        for value in scalars or values:
            spec = self.effects.spec(value)
            spec = Spec.contiguous(spec.shape, spec.dtype)
            module = self.graph.producers[value.name][0].origin.module
            storage = self._new(value.name, "transients", spec.nbytes, self.count, module)
            self._add(self.count, value, spec, storage)

    def _backward(self, i: int, node: Node) -> None:
        position = 2 * self.count - 1 - i
        incoming = [self.pending.pop(v.name, None) for v in node.results]
        remaking = self.keeping.before(i, node)
        if any(incoming):
            self._flow(position, node, incoming, remaking)
        else:
            self._moment(position, node, remaking)
        for gradient in incoming:
            if gradient is not None:
                gradient.storage.release(position)
        for value in node.operands:
            if value.name in self.parameters:
                self._settle(position, value)
        for storage in self.saved[i]:
            storage.release(position)
        self.keeping.after(i)

    def _flow(
        self, position: int, node: Node, incoming: Sequence[_Gradient | None], remaking: int
    ) -> None:
        """Run the backward of a call and hand its operands their terms.

        remaking:
            bytes that are in use before it runs, and no longer then
        """
        effect = self.effects.backward(node, tuple(g.spec if g else None for g in incoming))
        module = node.origin.module
        flowing = [g.storage if g else None for g in incoming]
        workspace = effect.workspace
        if node.op == FUSED and effect.sending is not None:
            # It only starts here, while the gradients that came are there.
            arriving = self._arrive(position)
            self.under_way = node, position, effect
            workspace = max(effect.sending - sum(effect.fresh), arriving, 0)
        storages = [*flowing, *(self.home[v.name] for v in node.operands)]
        named = {home: v.name for v, home in zip(node.operands, effect.homes, strict=True)}
        for k, nbytes in enumerate(effect.fresh, len(storages)):
            flowing.append(self._new(named[k], "transients", nbytes, position, module))
            storages.append(flowing[-1])
        busy = [storage.hold() for storage in flowing if storage is not None]
        for value, spec, home in zip(node.operands, effect.grads, effect.homes, strict=True):
            target = storages[home] if home >= 0 else None
            if spec is not None and target is not None:
                self._add(position, value, spec, target)
        for storage in busy:
            storage.release(position)
        self._moment(position, node, max(workspace, remaking - sum(effect.fresh)))

    def _arrive(self, position: int) -> int:
        """The bucket under way goes the rest of its way; what that needs besides its results.

        The gradients that came to it have gone long since.
        """
        if self.under_way is None:
            return 0
        node, start, effect = self.under_way
        self.under_way = None
        sent = effect.sent - sum(effect.fresh)
        if sent > 0 and start + 1 < position:
            module = node.origin.module
            self.momentary.append(Held(node.name, "workspace", sent, start + 1, position, module))
        return effect.workspace

    def _add(self, position: int, value: Value, spec: Spec, storage: Storage) -> None:
        """One more term of a value's gradient."""
        known = self.pending.get(value.name)
        if known is None:
            self.pending[value.name] = _Gradient(spec, storage.hold())
            return
        if known.storage.holders == 1 and known.spec.nbytes == known.storage.nbytes:
            return  # Added in place; the term itself goes when its backward is done.
        module = self.graph.producers[value.name][0].origin.module
        total = Spec.contiguous(spec.shape, spec.dtype)
        summed = self._new(value.name, "transients", total.nbytes, position, module)
        known.storage.release(position)
        self.pending[value.name] = _Gradient(total, summed.hold())

    def _settle(self, position: int, value: Value) -> None:
        """The gradient of a parameter is kept; one that others hold as well is copied.

        A part of a larger buffer, of which others hold other parts, is kept as it is.
        """
        known = self.pending.get(value.name)
        if known is None:
            return
        own = self.effects.spec(value)
        full = own.nbytes
        target = self.parameters[value.name].target
        if known.storage.kind == "gradients":
            return
        alone = known.storage.holders == 1 and known.storage.nbytes == full
        part = known.storage.nbytes > full and known.spec.stride == own.stride
        if alone or part:
            known.storage.kind, known.storage.name = "gradients", target
            return
        copied = self._new(target, "gradients", full, position, known.storage.module)
        known.storage.release(position)
        self.pending[value.name] = _Gradient(own, copied.hold())

    # -- result -------------------------------------------------------------------------------

    def _state_in_parts(self) -> list[Held]:
        """State that is on the host but for the part of the step that it is needed in."""
        if not self.host or not self.separate_memory:
            return []
        part = max(STEP_BYTES * self.states, *self.host.values())
        nbytes = min(sum(self.host.values()), part)
        return [Held("state of one part of the step", "optimizer", nbytes, self.end, self.end + 1)]

    def _held(self) -> tuple[Held, ...]:
        held = [
            Held(s.name, s.kind, s.nbytes, s.start, self.end + 1 if s.end is None else s.end,
                 s.module)
            for s in self.storages
        ]  # fmt: skip
        shards = [
            self.effects.spec(node.results[0]).nbytes
            for node in self.parameters.values()
            if node.results[0].grad
        ]
        workspace = OPTIMIZER_WORKSPACE[self.optimizer] * max(shards, default=0)
        if workspace:
            held.append(Held("optimizer step", "workspace", workspace, self.end, self.end + 1))
        return (*held, *self.momentary)
