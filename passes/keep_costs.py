"""What memory policies save on one rank, and what they cost, place by place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node
from autopar.ir.keep import KEEP, RECOMPUTE, REGATHER
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.ir.steps import STEPS
from autopar.passes.assignment import Assignment
from autopar.passes.collective_cost import collective_time
from autopar.passes.communication import (
    Collective,
    assisted_collectives,
    collectives_again,
    moving_collectives,
)
from autopar.passes.memory.saved import Resolve
from autopar.passes.memory.simulation import memory_timeline
from autopar.passes.memory.timeline import Held, Timeline
from autopar.passes.policies import block_of
from autopar.passes.prices import DevicePrices

#: Bytes per second between a device and the host's pinned memory: PCIe 4.0 x16, as measured by
#: `bandwidthTest` on an A100. Where the device has no memory of its own it copies within it.
HOST_BANDWIDTH = 25e9
#: How often the bytes of a tensor pass through memory to be packed and unpacked: read, written
#: as flags, and written again.
PACKING_PASSES = 4

#: (policy, place)
Place = tuple[str, str]


@dataclass
class Effect:
    """What one policy does in one place; as `autopar.kept_rows.KeptRow`, in bytes and seconds."""

    saves: int = 0
    host: int = 0
    seconds: float = 0.0
    collectives: list[Collective] = field(default_factory=list)


def policy_effects(
    traced: Graph,
    plain: Graph,
    lowered: Graph,
    rules: Mapping[str, Rule],
    assignment: Assignment,
    prices: DevicePrices,
    resolve: Callable[[Mesh], Resolve],
) -> dict[Place, Effect]:
    """What the policies of a lowered graph do, by policy and place.

    traced:
        the graph before it was partitioned; its calls have prices
    plain:
        the lowered graph without policies
    resolve:
        as in `memory_timeline`, for a mesh

    What is saved is what is not held between forward and backward. Gradients and what backward
    holds for a moment are not looked at: `plan.memory()` tells the peak.
    """
    places = _Places(lowered)
    if not places.of_node:
        return {}
    found: dict[Place, Effect] = defaultdict(Effect)
    assert lowered.mesh is not None
    operators, apart = resolve(lowered.mesh), prices.device.separate_memory
    before = memory_timeline(plain, operators, optimizer="none", separate_memory=apart)
    after = memory_timeline(lowered, operators, optimizer="none", separate_memory=apart)
    for held in _between(before):
        place = places.of(held)
        if place is not None:
            found[place].saves += held.nbytes
    for held in _between(after):
        place = places.of(held)
        if place is not None:
            found[place].saves -= held.nbytes
    for node in lowered.calls:
        place = places.of_node.get(node.name)
        if place is not None:
            _charge(node, found[place], traced, rules, assignment, prices)
    rate = HOST_BANDWIDTH if apart else prices.device.memory_bandwidth
    for name, nbytes in after.host.items():
        effect = found[places.of_node[name]]
        effect.host += nbytes
        effect.seconds += 2 * nbytes / rate
    for (policy, _), effect in found.items():
        if policy.startswith("compress"):
            packed = max(effect.saves, 0)
            effect.seconds += PACKING_PASSES * packed / prices.device.memory_bandwidth
    nothing = Effect()
    return {place: effect for place, effect in found.items() if effect != nothing}


class _Places:
    """Where the policies of a graph hold."""

    def __init__(self, graph: Graph) -> None:
        self.of_node: dict[str, Place] = {}
        self._gathered: dict[str, Place] = {}
        self._modules: dict[str, Place] = {}
        for node in graph.calls:
            place = self._place(node)
            if place is None:
                continue
            self.of_node[node.name] = place
            if REGATHER in node.attrs:
                self._gathered.update((node.results[k].name, place) for k in node.attrs[REGATHER])
            else:
                self._modules[node.origin.module] = place

    def of(self, held: Held) -> Place | None:
        """The policy that something held comes under."""
        if held.name in self._gathered:
            return self._gathered[held.name]
        if held.kind in ("activations", "gathered"):
            return self._modules.get(held.module)
        return None

    def _place(self, node: Node) -> Place | None:
        if REGATHER in node.attrs:
            module = node.origin.module
            return "regather", block_of(module) or module or "model"
        form = node.attrs.get(KEEP, "")
        if RECOMPUTE in node.attrs:
            return "+".join(["recompute", *([form] if form else [])]), node.attrs[RECOMPUTE]
        module = node.origin.module
        return (form, block_of(module) or module or "model") if form else None


def _between(timeline: Timeline) -> Iterator[Held]:
    """What is held from the forward pass to the backward pass."""
    return (h for h in timeline.held if h.start < timeline.nodes < h.end)


def _charge(
    node: Node,
    effect: Effect,
    traced: Graph,
    rules: Mapping[str, Rule],
    assignment: Assignment,
    prices: DevicePrices,
) -> None:
    """Add what running a call again costs."""
    mesh = assignment.mesh
    runs: list[Collective] = []
    if node.op == FUSED or node.op in STEPS:
        runs = moving_collectives(node, mesh, "")
    elif RECOMPUTE in node.attrs and node.name in rules:
        rule, strategy = rules[node.name], assignment.strategies[node.name]
        runs = assisted_collectives(node, rule, strategy, mesh)
        original = traced.producers[node.name][0]
        effect.seconds += float(prices.call(original, rule, [strategy]).forward[0])
    for run in collectives_again(node, runs, mesh):
        whole = mesh.axis_size(*run.axes) if run.kind == "all_to_all" else 1
        effect.collectives.append(run)
        effect.seconds += collective_time(
            prices.device, mesh, run.kind, run.axes, whole * run.nbytes
        )
