"""Prices memory: multipliers on the live sets, adapted while messages pass.

Every priced network gives a lower bound, and decoding it gives assignments that mostly fit.
Multipliers grow where the preferred options exceed the room and shrink where they leave some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .clock import Clock, rounded_up, same_cost
from .dual import Dual
from .layout import Layout

# Multipliers change by at most this factor (as an exponent) per sweep and unit of excess. When
# the bound stalls for _STALL sweeps, the best prices are taken up again with shorter steps.
_FIRST_STEP, _LAST_STEP, _SHORTER = 0.1, 0.004, 0.6
_STALL, _BETTER = 40, 1e-4
# Growth, in steps, where far more than the room is used.
_FASTEST = 1.5
# All multipliers times their room together start at this part of the bound without memory.
_FIRST_PRICE = 1e-2
# A multiplier stays above this part of the largest one, so that it can come back.
_LEAST_PRICE = 1e-9
_DECODE_EVERY = 4
# How much of its weight a preference keeps from sweep to sweep.
_FADE = 0.95
# Repair raises the multipliers of exceeded sets by a part, and at least to a part of the largest
# one. Both start small, so that the first assignment that fits is a cheap one, and grow from
# round to round, so that there is one soon.
_RAISE, _RAISE_GROWTH = 0.03, 1.05
_RAISE_FROM, _RAISE_FROM_GROWTH = 1e-7, 1.15
_MOST_RAISES = 150
# Seconds that looking for a first assignment may go on when the time is up.
_GRACE = 1.0


@dataclass
class Best:
    """The best assignment of a layout's nodes so far; None before the first.

    Attributes:
        over: the least excess over the limit of any allowed assignment seen, 0 or less once
            one fits.
    """

    choice: np.ndarray | None = None
    cost: float = np.inf
    over: float = np.inf

    def offer(self, layout: Layout, choice: np.ndarray) -> bool:
        """Takes an assignment if it is allowed, fits and is cheaper."""
        cost = layout.cost(choice)
        if not np.isfinite(cost):
            return False
        over = layout.over(choice)
        self.over = min(self.over, over)
        if over > 0 or cost >= self.cost:
            return False
        self.choice, self.cost = choice, cost
        return True


class Preferences:
    """What nodes preferred to hold, averaged over the latest sweeps.

    As prices swing around the best ones, preferences swing between the assignments that a linear
    relaxation mixes: where they differ in memory is what has to be decided.
    """

    def __init__(self, dual: Dual) -> None:
        self._dual = dual
        self._weight = 0.0
        self._mean = np.zeros(len(dual.expected))
        self._square = np.zeros(len(dual.expected))

    def add(self) -> None:
        """Takes note of the sweep just made."""
        expected = self._dual.expected
        self._weight = _FADE * self._weight + 1
        self._mean = _FADE * self._mean + expected
        self._square = _FADE * self._square + expected**2

    def widest(self) -> tuple[float, int, np.ndarray, float]:
        """The node whose memory is in doubt at the highest price.

        Returns (the price of the doubt, its position, what each option pays for memory, what the
        node paid on average); the price is 0 where nothing is in doubt.
        """
        memory = self._dual.layout.memory
        if memory is None or not len(memory.owner) or not self._weight:
            return 0.0, 0, np.zeros(0), 0.0
        price = memory.shape_prices(self._dual.multipliers)
        mean = self._mean / self._weight
        spread = np.sqrt(np.maximum(self._square / self._weight - mean**2, 0.0))
        doubt = np.bincount(memory.owner, spread * price)
        position = int(doubt.argmax())
        lo, hi = self._dual.layout.offset[position : position + 2]
        paid = memory.price(self._dual.multipliers)[lo:hi]
        return (
            float(doubt[position]),
            position,
            paid,
            float((mean * price)[memory.owner == position].sum()),
        )


def search(
    dual: Dual,
    best: Best,
    clock: Clock,
    *,
    whole: bool,
    seconds: float,
    persistent: bool,
    sweeps: float = np.inf,
    preferences: Preferences | None = None,
    stage: str | None = "lagrange",
    met: Callable[[float, float], bool] = same_cost,
) -> float:
    """Sweeps and prices until nothing gets better; returns the bound and leaves its state.

    Stops early when the bound has ``met`` the best cost, after ``seconds`` or ``sweeps``, or,
    unless ``persistent``, when the bound stalls for the first time.

    Args:
        best: takes the assignments found.
        whole: costs are whole numbers.
        preferences: takes note of every sweep.
        stage: as what to report news; None for not at all.
    """
    until = clock.elapsed() + seconds
    memory = dual.layout.memory
    forbidden = _forbidden_cost(dual)
    bound, state = -np.inf, (dual.multipliers, dual.message.copy())
    step = _FIRST_STEP
    sweep = last_news = 0
    news_best, news_bound = np.inf, -np.inf
    while sweep == 0 or (step > _LAST_STEP and clock.elapsed() < until and sweep < sweeps):
        dual.sweep()
        sweep += 1
        if preferences is not None:
            preferences.add()
        if sweep % _DECODE_EVERY == 0 or sweep == 1:
            now = rounded_up(dual.bound(), whole)
            if now > bound:
                bound, state = now, (dual.multipliers, dual.message.copy())
            best.offer(dual.layout, dual.decode(forbidden))
            if stage is not None:
                clock.report(stage, best.cost, bound)
            if met(best.cost, bound):
                break
            scale = _BETTER * max(1e-6, abs(bound))
            if bound > news_bound + scale or best.cost < news_best - scale:
                last_news, news_best, news_bound = sweep, best.cost, bound
        if sweep - last_news >= _STALL:
            if not persistent:
                break
            step *= _SHORTER if memory is not None else 0.1
            last_news = sweep
            dual.restore(*state)
        if memory is not None:
            prices = dual.multipliers if dual.multipliers.any() else _first_prices(dual, bound)
            dual.price(_adapt(dual, prices, step))
    dual.restore(*state)
    return bound


def repair(
    dual: Dual, best: Best, clock: Clock, seconds: float, raises: int = _MOST_RAISES
) -> None:
    """Raises memory prices where assignments exceed the limit until one fits.

    Starting from good prices that one is cheap, often cheaper than those met on the way there.
    Before there is any assignment, a second more than ``seconds`` may be spent on one.
    The bound of such prices is worse, so the state is left as it was.
    """
    memory = dual.layout.memory
    if memory is None:
        return
    until = clock.elapsed() + (seconds if best.cost < np.inf else max(seconds, _GRACE))
    state = dual.multipliers, dual.message.copy()
    forbidden = _forbidden_cost(dual)
    multipliers = dual.multipliers
    if not multipliers.any():
        multipliers = _first_prices(dual, 1.0)
    for count in range(raises):
        if clock.elapsed() >= until:
            break
        choice = dual.decode(forbidden)
        best.offer(dual.layout, choice)
        exceeded = dual.layout.held(choice) > memory.live.room
        if not exceeded.any() and np.isfinite(dual.layout.cost(choice)):
            break
        least = _RAISE_FROM * _RAISE_FROM_GROWTH**count * multipliers.max()
        raised = np.maximum(multipliers * (1 + _RAISE * _RAISE_GROWTH**count), least)
        multipliers = np.where(exceeded, raised, multipliers)
        dual.price(multipliers)
        dual.sweep()
    dual.restore(*state)


def _first_prices(dual: Dual, bound: float) -> np.ndarray:
    memory = dual.layout.memory
    assert memory is not None
    total = max(abs(bound), 1.0) * _FIRST_PRICE
    prices: np.ndarray = total / (len(memory.live.room) * np.maximum(memory.live.room, 1e-9))
    return prices


def _adapt(dual: Dual, multipliers: np.ndarray, step: float) -> np.ndarray:
    memory = dual.layout.memory
    assert memory is not None
    excess = memory.profile(dual.expected) / np.maximum(memory.live.room, 1e-9) - 1.0
    change = np.where(
        excess > 0, np.minimum(_FASTEST, np.sqrt(np.abs(excess))), np.maximum(excess, -1.0)
    )
    multipliers = multipliers * np.exp(step * change)
    return np.maximum(multipliers, _LEAST_PRICE * multipliers.max())


def _forbidden_cost(dual: Dual) -> float:
    """A finite price for a forbidden pair that no saving elsewhere can be worth."""
    layout = dual.layout
    finite = layout.pair_costs[np.isfinite(layout.pair_costs)]
    largest = max(np.abs(finite).max(initial=1.0), np.abs(layout.costs).max(initial=1.0))
    return float(largest) * 1e3
