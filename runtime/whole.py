"""Random numbers in calls that stay whole: every rank draws the same.

Such a call draws from torch's default generator. It is given, for the time of the call, the state
of the generator that the ranks agree on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from autopar.ir.whole import Whole
from autopar.runtime.groups import current
from autopar.runtime.random import default_generator, next_generator
from autopar.runtime.row_major import RowMajorDraws

# Ranks that are threads of one process share its default generator.
_LOCK = threading.Lock()


def drawing_alike(op: str, whole: Whole) -> Callable[..., Any]:
    """The operator `op`, drawing the numbers that every other rank draws."""

    @_disable_dynamo
    def run(operands: Sequence[Tensor]) -> Any:
        device = operands[0].device if operands else torch.device("cpu")
        shared = next_generator(current(), 0, device)
        used = default_generator(device)
        with _LOCK:
            before = used.get_state()
            used.set_state(shared.get_state())
            try:
                with RowMajorDraws():
                    return whole(operands)
            finally:
                shared.set_state(used.get_state())
                used.set_state(before)

    return run
