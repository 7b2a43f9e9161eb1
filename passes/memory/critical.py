"""The times of a step at which the most may be in use, and a clock that counts only those.

What is in use at corresponding times in the copies of a block changes by the same amount from each
copy to the next: one more holds its activations, one less its gradients. So it is most in the first
copy or in the last, and the times of those between need not be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopar.passes.memory.lifetimes import Interval, Lifetimes


class Clock:
    """Positions of `Lifetimes` -> positions among those that are looked at.

    The optimizer's step is divided into moments, one for each parameter that it updates.
    """

    def __init__(self, lives: Lifetimes, passed_over: Iterable[str], moments: int) -> None:
        """`passed_over`: calls at whose times nobody looks."""
        over = set(passed_over)
        forward = np.ones(lives.end // 2, dtype=bool)
        start = 0
        for name, position in lives.calls.items():
            forward[start : position + 1] = name not in over
            start = position + 1
        looked_at = np.concatenate([forward, forward[::-1]])
        self._passed = np.concatenate([[0], np.cumsum(looked_at)]).tolist()
        self._end = lives.end
        self.end: int = self._passed[-1] + max(moments, 1)

    def interval(self, interval: Interval) -> Interval:
        """The positions looked at in an interval; it may be empty."""
        return self._at(interval[0]), self._at(interval[1])

    def moment(self, number: int) -> Interval:
        """The time in which the optimizer updates one of its parameters."""
        step = self._passed[-1] + number
        return step, step + 1

    def _at(self, position: int) -> int:
        return self._passed[position] if position <= self._end else self.end
