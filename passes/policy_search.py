"""Memory policies chosen together with the plan, under a limit on memory.

That is what ``memory_policy="auto"`` asks for.

A plan may fit a limit because it divides more, because it keeps less for the backward pass, or by
some of both. The cheapest plan of all is tried under every policy, then with only as many of its
first blocks recomputed or offloaded as it takes: what they keep lives longest, and one more block
never makes less memory of it, so the number is found by bisection. A policy with which it does not
fit gets the search under the limit, as a user who names it would get. What is cheapest by the
predicted times of the plan and of its policy is taken; so it never is dearer than one of these
policies named by hand, as long as there is time to try them all. Only what changes no number is
tried.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.ir.errors import MemoryLimitError
from autopar.ir.graph import Graph
from autopar.passes.communication import format_bytes
from autopar.passes.memory.limit import MemoryLimit
from autopar.passes.policies import Given, Policies, block_of
from autopar.passes.search import Searched

#: What a user writes to have policies chosen.
AUTO = "auto"
#: The policies that are tried for a whole model, the mildest first.
WHOLE = ("keep", "compress", "offload", "recompute", "recompute:sqrt", "recompute+offload")
#: What the model checkpoints itself, where it does.
_OWN = "as the model has it"
#: Those of them that are tried for some blocks only.
PARTLY = ("recompute", "offload")
#: How near to the bound on all plans a plan is as good as it, as a fraction of its time.
_NEAR = 1e-9
#: How many times the seconds of one search under the limit all of them may take together, once
#: something is known to fit.
_SEARCHES = 4


@dataclass(frozen=True)
class Start:
    """A plan of no limit, which policies are tried on.

    zero:
        the level of ZeRO that it is stored at
    regathers:
        whether it gathers parameters, so that they may be gathered again
    """

    zero: int
    searched: Searched
    regathers: bool


@dataclass(frozen=True)
class Tried:
    """One combination: bytes at the peak, seconds of a step and of what the policy adds to it.

    seconds, added:
        None where it is over the limit
    """

    name: str
    peak: int
    seconds: float | None = None
    added: float | None = None

    def __str__(self) -> str:
        if self.seconds is None or self.added is None:
            return f"{self.name}: {format_bytes(self.peak)}, over the limit"
        seconds = self.seconds + self.added
        total = f"{self.name}: {format_bytes(self.peak)}, {seconds * 1e3:.3f} ms"
        return f"{total}, {self.added * 1e3:.3f} of them for the policy" if self.added else total


@dataclass(frozen=True)
class Chosen:
    """The best combination, and what it was compared with.

    left_out:
        policies that the search under the limit had no time for
    """

    searched: Searched
    given: Given
    policies: Policies
    zero: int
    best: Tried
    tried: tuple[Tried, ...]
    left_out: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What a plan says of it."""
        lines = [f"memory_policy='auto': {self.best}; tried were", *map(str, self.tried)]
        if self.left_out:
            lines.append(f"for lack of time not divided more: {', '.join(self.left_out)}")
        return "\n  ".join(lines)


class Costs(Protocol):
    """What the search asks about a plan under policies."""

    def resolve(self, given: Given, zero: int) -> Policies: ...

    def peak(self, searched: Searched, policies: Policies) -> int:
        """Bytes at the peak of a step, simulated."""
        ...

    def added(self, searched: Searched, policies: Policies) -> float:
        """Seconds that the policies add to a step."""
        ...

    def within(self, policies: Policies) -> Searched:
        """The search under the limit. Raises MemoryLimitError."""
        ...


def choose_policies(
    graph: Graph,
    limit: MemoryLimit,
    starts: Sequence[Start],
    zero: int,
    costs: Costs,
    *,
    searches: bool = True,
    offloads: bool = True,
) -> Chosen:
    """The cheapest plan and policy within a limit.

    starts:
        plans without a limit, the cheapest one of all first
    zero:
        the level of ZeRO that a search under the limit is made for
    searches:
        whether that search has much to choose from; else it is made only where nothing else fits
    offloads:
        whether it saves anything to keep things on the host

    Raises MemoryLimitError, with the smallest peak of all that was tried, where nothing fits.
    """
    return _Choice(graph, limit, starts, zero, costs, offloads).run(searches)


class _Choice:
    def __init__(
        self,
        graph: Graph,
        limit: MemoryLimit,
        starts: Sequence[Start],
        zero: int,
        costs: Costs,
        offloads: bool,
    ) -> None:
        self.whole, self.partly = (
            [given for given in each if offloads or "offload" not in given]
            for each in (WHOLE, PARTLY)
        )
        self.limit, self.starts, self.zero, self.costs = limit, starts, zero, costs
        modules = (block_of(node.origin.module) for node in graph.calls)
        self.blocks = list(dict.fromkeys(block for block in modules if block))
        self.tried: list[Tried] = []
        self.best: Chosen | None = None

    def run(self, searches: bool) -> Chosen:
        failing = [given for start in self.starts for given in self._whole(start)]
        for start in self.starts:
            for kind in self.partly:
                self._partly(start, kind)
        until = time.perf_counter() + _SEARCHES * self.limit.seconds
        bound = self.starts[0].searched.solution.bound
        error: MemoryLimitError | None = None
        left_out = []
        for given in dict.fromkeys(failing):
            if self.best is not None and _total(self.best.best) <= bound * (1 + _NEAR):
                break
            if self.best is not None and not (searches and time.perf_counter() < until):
                left_out += [given or _OWN] if searches else []
                continue
            policies = self.costs.resolve(given, self.zero)
            try:
                searched = self.costs.within(policies)
            except MemoryLimitError as problem:
                error = problem
                continue
            self._offer(searched, given, policies, self.zero, f"{given or _OWN}, divided more")
        if self.best is None:
            least = min(self.tried, key=lambda each: each.peak)
            raise MemoryLimitError(
                f"memory limit {format_bytes(self.limit.nbytes)}: nothing fits under any policy "
                f"that was tried ({', '.join(self.whole)}); the smallest peak of the cheapest plan "
                f"is {format_bytes(least.peak)}, with {least.name}. Of the last search: {error}"
            )
        ranked = sorted(self.tried, key=lambda each: (each.seconds is None, _total(each)))
        return replace(self.best, tried=tuple(ranked), left_out=tuple(left_out))

    def _whole(self, start: Start) -> Iterator[str | None]:
        """Try all policies for the whole model while they can be better than what was found; gives
        those that do not fit."""
        seconds = start.searched.solution.cost
        own = self.costs.resolve(None, start.zero)
        if own:
            name = _OWN + _stored(start.zero)
            if not self._offer(start.searched, None, own, start.zero, name):
                yield None
        for given in self.whole:
            for regather in (False, True) if start.regathers else (False,):
                if given == "keep":
                    spelled = "regather" if regather else "keep"
                else:
                    spelled = f"{given}+regather" if regather else given
                if not self._may_be_better(seconds):
                    return
                policies = self.costs.resolve(spelled, start.zero)
                name = spelled + _stored(start.zero)
                if not self._offer(start.searched, spelled, policies, start.zero, name):
                    yield spelled

    def _partly(self, start: Start, given: str) -> None:
        """Try it for the first blocks, as few as it takes."""
        if len(self.blocks) < 2 or not self._may_be_better(start.searched.solution.cost):
            return

        def of(count: int) -> tuple[Mapping[str, str], Policies, int]:
            chosen = {"*": "keep", **dict.fromkeys(self.blocks[:count], given)}
            policies = self.costs.resolve(chosen, start.zero)
            return chosen, policies, self.costs.peak(start.searched, policies)

        low, high = 0, len(self.blocks)
        found = of(high)
        if found[2] > self.limit.nbytes:
            return
        while high - low > 1:  # `low` does not fit, or is none; `high` does
            middle = (low + high) // 2
            tried = of(middle)
            if tried[2] <= self.limit.nbytes:
                high, found = middle, tried
            else:
                low = middle
        chosen, policies, peak = found
        if high < len(self.blocks):
            name = f"{given} of the first {high} of {len(self.blocks)} blocks"
            name += _stored(start.zero)
            self._offer(start.searched, chosen, policies, start.zero, name, peak)

    def _may_be_better(self, seconds: float) -> bool:
        return self.best is None or seconds < _total(self.best.best)

    def _offer(
        self,
        searched: Searched,
        given: Given,
        policies: Policies,
        zero: int,
        name: str,
        peak: int | None = None,
    ) -> bool:
        """Note a combination, and take it if it fits and is the best; says whether it fits."""
        if peak is None:
            peak = self.costs.peak(searched, policies)
        if peak > self.limit.nbytes:
            self.tried.append(Tried(name, peak))
            return False
        tried = Tried(name, peak, searched.solution.cost, self.costs.added(searched, policies))
        self.tried.append(tried)
        # Of equals the first one: the mildest.
        if self.best is None or _total(tried) < _total(self.best.best):
            self.best = Chosen(searched, given, policies, zero, tried, ())
        return True


def _total(tried: Tried) -> float:
    return (tried.seconds or 0.0) + (tried.added or 0.0)


def _stored(zero: int) -> str:
    return f", zero={zero}" if zero else ""
