"""What a searched plan holds under policies, and what they add to its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Graph
from autopar.ir.keep import REGATHER
from autopar.ir.rule import Rule
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.device import Device
from autopar.passes.keep_costs import Effect, Place, policy_effects
from autopar.passes.memory.kept import Probe
from autopar.passes.memory.limit import MemoryLimit, timeline_of
from autopar.passes.policies import NO_POLICIES, Given, Policies
from autopar.passes.prices import DevicePrices
from autopar.passes.search import Searched


def effects_on(
    graph: Graph,
    made: Graph,
    rules: Mapping[str, Rule],
    assignment: Assignment,
    prices: DevicePrices,
    policies: Policies,
    probe: Probe,
) -> tuple[Graph, dict[Place, Effect]]:
    """The graph that ranks run under policies, and what these do in it (`policy_effects`).

    graph, made:
        the traced graph, and the partitioned one before buckets
    """
    plain, lowered = (
        pipeline.in_buckets(made, prices.device, each) for each in (NO_POLICIES, policies)
    )
    return lowered, policy_effects(graph, plain, lowered, rules, assignment, prices, probe)


@dataclass(frozen=True)
class PlanCosts:
    """The costs that `policy_search.choose_policies` asks for, of one traced graph.

    resolver:
        the policies of the graph for what a user gives, at a level of ZeRO
    search:
        the search under the limit with given policies. Raises MemoryLimitError
    """

    graph: Graph
    rules: Mapping[str, Rule]
    device: Device
    limit: MemoryLimit
    resolver: Callable[[Given, int], Policies]
    search: Callable[[Policies], Searched]
    _made: dict[int, tuple[Searched, Graph]] = field(default_factory=dict, repr=False)

    def _partitioned(self, searched: Searched) -> Graph:
        """The graph of a plan before buckets, which all policies start from."""
        if id(searched) not in self._made:
            made = pipeline.partitioned(self.graph, searched.assignment, self.device)
            self._made[id(searched)] = searched, made
        return self._made[id(searched)][1]

    def resolve(self, given: Given, zero: int) -> Policies:
        return self.resolver(given, zero)

    def within(self, policies: Policies) -> Searched:
        return self.search(policies)

    def peak(self, searched: Searched, policies: Policies) -> int:
        """Bytes at the peak of a step, simulated."""
        lowered = pipeline.in_buckets(self._partitioned(searched), self.device, policies)
        return timeline_of(lowered, self.limit).peak

    def added(self, searched: Searched, policies: Policies) -> float:
        """Seconds that the policies add to a step."""
        if not replace(policies, offloads_optimizer=False):
            return 0.0
        assignment, made = searched.assignment, self._partitioned(searched)
        prices = DevicePrices(assignment.mesh, self.device)
        _, effects = effects_on(
            self.graph, made, self.rules, assignment, prices, policies, self.limit.operators
        )
        return sum(effect.seconds for effect in effects.values())

    def regathers(self, searched: Searched) -> bool:
        """Whether a plan gathers parameters of which copies would be kept for backward."""
        everything = Policies(regather=frozenset(n.target for n in self.graph.sources("param")))
        lowered = pipeline.in_buckets(self._partitioned(searched), self.device, everything)
        return any(REGATHER in node.attrs for node in lowered.calls)
