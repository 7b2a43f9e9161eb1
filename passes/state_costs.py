"""What keeping optimizer state in the host's memory saves on one rank, and what it costs."""

from __future__ import annotations

import math

from autopar.ir.graph import Graph
from autopar.ir.keep import OFFLOAD, STATE
from autopar.passes.device import Device
from autopar.passes.keep_costs import HOST_BANDWIDTH, Effect
from autopar.passes.memory.effects import local_shape
from autopar.passes.memory.timeline import optimizer_states


def state_effect(lowered: Graph, optimizer: str, device: Device) -> Effect:
    """The effect of state that is brought to the device and put back in every step.

    lowered:
        a lowered graph, whose parameters say where their state is
    optimizer:
        a key of `timeline.OPTIMIZER_STATES`

    Where the device has no memory of its own nothing moves, and nothing is saved. Raises PlanError
    for an unknown optimizer.
    """
    parameters = [n for n in lowered.sources("param") if n.attrs.get(STATE) == OFFLOAD]
    values = [node.results[0] for node in parameters]
    held = sum(math.prod(local_shape(lowered, v)) * v.dtype.itemsize for v in values)
    nbytes = optimizer_states(optimizer) * held
    if not device.separate_memory:
        return Effect(0, nbytes, 0.0)
    return Effect(nbytes, nbytes, 2 * nbytes / HOST_BANDWIDTH)
