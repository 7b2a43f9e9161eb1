"""What ``memory_policy="auto"`` comes to for a traced model (see `passes.policy_search`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from autopar.ir.layout import Layout
from autopar.passes import pipeline
from autopar.passes.memory.limit import MemoryLimit
from autopar.passes.policies import NO_POLICIES, Given, Policies
from autopar.passes.policy_costs import PlanCosts
from autopar.passes.policy_search import Chosen, Start, choose_policies
from autopar.passes.search import Searched
from autopar.passes.zero import Sharded

if TYPE_CHECKING:
    from autopar.compiler import Request, Traced

#: The level at which parameters are stored in shards where nobody asked for one.
_LEVEL = 2

#: The search: with given layouts, under a limit, with policies.
Decide = Callable[[Mapping[str, Layout] | None, MemoryLimit | None, Policies], Searched]


def chosen_policies(
    traced: Traced,
    request: Request,
    pinned: Mapping[str, Layout] | None,
    decide: Decide,
    resolve: Callable[[Given, int], Policies],
    mode: str,
) -> tuple[Chosen, Sharded | None]:
    """The cheapest plan and policy within the limit of a request, and how it is stored in shards.

    resolve:
        the policies for what a user gives, at a level of ZeRO

    Raises MemoryLimitError where nothing fits.
    """
    limit = request.limit
    assert limit is not None
    graph, device = traced.graph, request.device

    def stored(searched: Searched, limit: MemoryLimit | None, policies: Policies) -> Sharded:
        return pipeline.store_in_shards(
            graph, searched, device, lambda layouts: decide(layouts, limit, policies)
        )

    def within(policies: Policies) -> Searched:
        found = decide(pinned, limit, policies)
        shards = request.zero and pinned is None
        return stored(found, limit, policies).searched if shards else found

    costs = PlanCosts(graph, traced.rules, device, limit, resolve, within)
    free = decide(pinned, None, NO_POLICIES)
    starts = [Start(0, free, costs.regathers(free))]
    sharded = None
    if pinned is None:
        sharded = stored(free, None, NO_POLICIES)
        in_shards = sharded.searched
        start = Start(request.zero or _LEVEL, in_shards, costs.regathers(in_shards))
        if request.zero:
            starts = [start]
        elif sharded.shards:
            starts.append(start)
    searches = mode in ("auto", "semi_auto")
    chosen = choose_policies(
        graph,
        limit,
        starts,
        request.zero,
        costs,
        searches=searches,
        offloads=device.separate_memory,
    )
    return chosen, sharded if chosen.zero else None
