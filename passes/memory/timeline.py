"""What one rank holds in memory during one training step, and when.

Time is counted in positions: node ``i`` of ``F`` runs forward at ``i`` and backward at
``2F-1-i``, the optimizer steps at ``2F``. A tensor lives from the call that makes it until the
last one that reads it, forward or (where autograd saved it) backward. Tensors that share a storage
count once, and a view keeps the storage of its base alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.ir.errors import PlanError

#: What memory is held for, in the order of reports. "inputs" are inputs, buffers and constants;
#: "activations" are results kept for later operators or for backward, "gathered" those that a
#: reshard made; "transients" are gradients on their way back, "workspace" is what an operator
#: uses while it runs.
KINDS = (
    "parameters", "gradients", "optimizer", "activations", "gathered", "transients", "workspace",
    "inputs",
)  # fmt: skip

#: Optimizer -> tensors of the parameter's size and dtype that it keeps for each parameter.
OPTIMIZER_STATES: Mapping[str, int] = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
#: Optimizer -> tensors of a parameter's size that it uses while updating one parameter.
OPTIMIZER_WORKSPACE: Mapping[str, int] = {
    "none": 0, "sgd": 0, "momentum": 0, "adam": 2, "adamw": 2,
}  # fmt: skip


def optimizer_states(optimizer: str) -> int:
    """Raises PlanError for an optimizer whose memory is not known."""
    if optimizer not in OPTIMIZER_STATES:
        raise PlanError(
            f"optimizer: expected one of {', '.join(OPTIMIZER_STATES)}, got {optimizer!r}; choose "
            "the one that keeps as many tensors per parameter"
        )
    return OPTIMIZER_STATES[optimizer]


@dataclass(frozen=True)
class Held:
    """One piece of memory and when it is in use.

    name:
        the parameter, input or value it belongs to
    kind:
        one of `KINDS`
    start, end:
        the half-open range of positions
    module:
        the module path of the operator that made it
    """

    name: str
    kind: str
    nbytes: int
    start: int
    end: int
    module: str = ""


@dataclass(frozen=True)
class Timeline:
    """Everything one rank holds during a step. All sizes are bytes.

    nodes:
        how many nodes the graph has (``F`` of the positions)
    assumed:
        operators that could not be observed and are taken to save all they read and make
    host:
        call -> bytes that are kept for it in the host's memory; where that is the device's, they
        are among `held`
    host_state:
        parameter -> bytes of optimizer state, likewise
    """

    held: tuple[Held, ...]
    nodes: int
    assumed: tuple[str, ...] = ()
    host: Mapping[str, int] = field(default_factory=dict)
    host_state: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def profile(self) -> dict[str, np.ndarray]:
        """Kind -> bytes in use at every position, int64 [2F+1]."""
        changes = {kind: np.zeros(2 * self.nodes + 2, dtype=np.int64) for kind in KINDS}
        for item in self.held:
            changes[item.kind][item.start] += item.nbytes
            changes[item.kind][item.end] -= item.nbytes
        return {kind: np.cumsum(change)[:-1] for kind, change in changes.items()}

    @cached_property
    def total(self) -> np.ndarray:
        """Bytes in use at every position, int64 [2F+1]."""
        return np.sum(list(self.profile.values()), axis=0)

    @cached_property
    def peak_position(self) -> int:
        """The first position at which most is in use."""
        return int(self.total.argmax())

    @property
    def peak(self) -> int:
        """The most bytes in use at one time."""
        return int(self.total[self.peak_position])

    @property
    def at_peak(self) -> tuple[Held, ...]:
        """What is in use at the peak, the largest first."""
        at = self.peak_position
        live = [item for item in self.held if item.start <= at < item.end and item.nbytes]
        return tuple(sorted(live, key=lambda item: -item.nbytes))

    @property
    def kinds_at_peak(self) -> dict[str, int]:
        """Kind -> bytes in use at the peak; they sum to it."""
        return {kind: int(bytes_[self.peak_position]) for kind, bytes_ in self.profile.items()}

    @property
    def kind_peaks(self) -> dict[str, int]:
        """Kind -> the most bytes in use for it at any one time."""
        return {kind: int(bytes_.max()) for kind, bytes_ in self.profile.items()}

    def phase(self, position: int) -> str:
        """ "forward", "backward" or "optimizer step"."""
        if position < self.nodes:
            return "forward"
        return "backward" if position < 2 * self.nodes else "optimizer step"
