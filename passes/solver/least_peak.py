"""The smallest peak that any allowed assignment reaches: why a memory limit can not be met.

    minimise over x of finite cost   max over t of   sum of usages_ih[x_i] over holds h live at t

Weights on the live sets that sum to 1 turn the maximum into a sum: the cheapest assignment at
these prices is a lower bound, and decoding it is a good assignment. The weights move to the
fullest sets. An integer program takes what time is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from . import ilp
from .clock import Clock, same_cost
from .dual import Dual
from .errors import InfeasibleError
from .holdings import Holdings
from .layout import Layout
from .memory import LiveSets, Spans
from .network import Network
from .problem import Node, Problem, evaluate
from .prune import prune_unsupported
from .reduction import Reduction
from .solve import solve

# Part of the time that the weights may take, how far they move in a round at first and at last
# (as an exponent), and how they slow down where the bound does not get better.
_SHARE, _FIRST_STEP, _LAST_STEP, _SLOWER, _STALL = 0.4, 1.0, 0.02, 0.6, 12
# No weight is less, so that it can come back.
_LEAST_WEIGHT = 1e-9
# By what part the bound must get better to go on at the same pace.
_BETTER = 1e-3
# Sweeps per round.
_SWEEPS = 2
# Up to this many pairs the integer program is quicker than insisting on a better bound.
_SMALL_PAIRS = 2_000


@dataclass(frozen=True)
class LeastPeak:
    """How little memory can do.

    Attributes:
        peak: the smallest peak found.
        bound: a proven lower bound on the peak of every assignment of finite cost; equal to
            ``peak`` where that is the smallest.
        choice: an assignment of finite cost whose peak is ``peak``.
    """

    peak: float
    bound: float
    choice: tuple[int, ...]


def least_peak(problem: Problem, *, seconds: float = 10.0) -> LeastPeak:
    """The smallest peak that any assignment of finite cost reaches, whatever it costs.

    Args:
        problem: its limit is not looked at.
        seconds: time budget; ``peak`` and ``bound`` differ where it runs out.

    Raises:
        InfeasibleError: no assignment of finite cost exists, or none was found in time.
        ValueError: negative seconds.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds: got {seconds}, expected a number >= 0")
    clock = Clock(seconds)
    free = _without_costs(problem)
    network = Network.of(free)
    prune_unsupported(network, [node.name for node in problem.nodes])
    live, floor = _live_sets(Spans.of(free), network)
    keep = set() if live is None else live.varying()
    reduction = Reduction(network, lambda node: node not in keep).run()
    least = _Least(bound=0.0)
    rest: dict[int, int] | None = {}
    if network.alive():
        layout = Layout(network, network.alive(), live)
        _search(layout, least, clock)
        rest = None if least.choice is None else layout.choices(least.choice)
    if rest is None:  # any assignment will do
        choice = solve(free, seconds=max(1.0, clock.left())).choice
    else:
        choices = reduction.expand(rest)
        choice = tuple(choices[node] for node in range(len(problem.nodes)))
    peak = evaluate(free, choice)[1]
    bound = floor + least.bound
    return LeastPeak(peak, peak if same_cost(peak, bound) else bound, choice)


def _without_costs(problem: Problem) -> Problem:
    """The problem where everything that is allowed costs nothing."""
    nodes = tuple(
        Node(node.name, np.where(np.isfinite(node.costs), 0.0, np.inf), node.held)
        for node in problem.nodes
    )
    edges = tuple(
        replace(edge, costs=np.where(np.isfinite(edge.costs), 0.0, np.inf))
        for edge in problem.edges
    )
    return Problem(nodes, tuple(edge for edge in edges if edge.costs.any()))


def _live_sets(spans: Spans, network: Network) -> tuple[LiveSets | None, float]:
    """(the sets that can exceed the floor, the floor): what is held whatever is chosen."""
    everything = LiveSets.of(spans, 0.0, network.options)
    if everything is None:
        return None, 0.0
    return LiveSets.of(spans, everything.floor, network.options), everything.floor


@dataclass
class _Least:
    """The least memory above the floor that was found, and a lower bound on it."""

    bound: float
    over: float = np.inf
    choice: np.ndarray | None = None

    def offer(self, layout: Layout, choice: np.ndarray) -> None:
        """Takes an assignment if it is allowed and holds less."""
        over = max(0.0, layout.over(choice))
        if over < self.over and np.isfinite(layout.cost(choice)):
            self.over, self.choice = over, choice

    def known(self) -> bool:
        return same_cost(self.over, self.bound)


def _search(layout: Layout, least: _Least, clock: Clock) -> None:
    if layout.memory is not None:
        _weigh(layout, layout.memory, least, clock)
    if least.known():
        return
    allowed = np.isfinite(layout.pair_costs)
    answer = ilp.solve(layout, allowed, set(), clock, np.inf, elastic=True)
    if answer.choice is not None:
        least.offer(layout, answer.choice)
    elif answer.solved:
        raise InfeasibleError("problem: every assignment uses a forbidden choice or pair")
    least.bound = max(least.bound, answer.bound)


def _weigh(layout: Layout, memory: Holdings, least: _Least, clock: Clock) -> None:
    """Moves the weights to the fullest sets while that gives better bounds."""
    dual = Dual(layout)
    until = clock.elapsed() + _SHARE * clock.left()
    weights = np.full(len(memory.live.room), 1.0 / len(memory.live.room))
    # Dearer than anything that memory can cost.
    forbidden = 10.0 * float(memory.scale.sum())
    step, stalled, best = _FIRST_STEP, 0, weights
    while step > _LAST_STEP and not least.known():
        dual.price(weights)
        for _ in range(_SWEEPS):
            dual.sweep()
        bound = dual.bound()
        stalled = 0 if bound > least.bound + _BETTER * abs(bound) else stalled + 1
        if bound > least.bound:
            least.bound, best = bound, weights
        least.offer(layout, dual.decode(forbidden))
        if clock.elapsed() >= until:
            break
        if stalled > _STALL:
            if len(layout.pair_costs) <= _SMALL_PAIRS:
                break
            step, stalled, weights = step * _SLOWER, 0, best
        excess = memory.profile(dual.expected) - memory.live.room
        largest = max(float(np.abs(excess).max()), 1e-300)
        weights = weights * np.exp(step * excess / largest)
        weights = np.maximum(weights / weights.sum(), _LEAST_WEIGHT)
        weights /= weights.sum()
