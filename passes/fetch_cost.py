"""What it costs to bring a parameter into the graph, and its gradient back.

The first steps of parameters go in buckets (`fuse`): the tensors are copied into one buffer and out
of it, and latency is paid once for a whole bucket, so each tensor pays its part. Of what comes
back, the collectives run beside the backward pass (`overlap`); copying does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.layout import REPLICATE
from autopar.ir.mesh import Mesh
from autopar.passes.collective_cost import NOTHING, Line, collective_line
from autopar.passes.device import Device
from autopar.passes.fuse import bucket_bytes
from autopar.passes.reshard.price import StepLine
from autopar.passes.reshard.steps import Step

#: The steps that a bucket sends for all of its tensors at once. What else it may do to them, such
#: as cutting them, is done to each by itself.
_PACKED = ("all_gather", "all_reduce", "to_replicate")


def in_buckets(
    steps: Sequence[Step],
    lines: np.ndarray,
    held: np.ndarray,
    mesh: Mesh,
    device: Device,
    nbytes: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The prices of steps for a parameter, and what of them brings its gradient back.

    lines:
        the prices for any tensor, lines over its bytes [step, forward or backward, 2]
    held:
        the shares of the tensor that a rank holds before and after each step, where they are
        even, else 0 [step, 2]
    nbytes:
        about the size of the tensor

    Returns lines like those given, and lines of the gradients' collectives [step, 2].
    """
    lines, sent = lines.copy(), np.zeros((len(lines), 2))
    for i, (step, (before, after)) in enumerate(zip(steps, held.tolist(), strict=True)):
        if step.kind in _PACKED and before and after:
            lines[i], sent[i] = fetch_line(step, before, after, mesh, device, nbytes)
    return lines, sent


def fetch_line(
    step: Step, before: float, after: float, mesh: Mesh, device: Device, nbytes: float
) -> tuple[StepLine, Line]:
    """The price of a step of a bucket for one of its tensors, and of its gradient's collective.

    `before` and `after` are the shares of the tensor, of about `nbytes`, that a rank holds.
    """
    larger = max(before, after)

    def collective(kind: str) -> Line:
        line = collective_line(device, mesh, kind, step.axes)
        waits = (line.latency + device.launch) / bucket_bytes(device, mesh, kind, step.axes)
        return Line(0.0, (line.per_byte + waits) * larger)

    def copy(part: float) -> Line:
        return Line(0.0, 2 * part / device.memory_bandwidth)

    if step.kind == "to_replicate":
        sent = collective("all_reduce")
        return StepLine(NOTHING, _sum(sent, copy(after))), sent
    if step.kind == "all_reduce":
        summed = collective("all_reduce")
        forward = _sum(copy(before), summed)
        if step.state != REPLICATE:
            return StepLine(forward, NOTHING), NOTHING
        return StepLine(forward, _sum(summed, copy(after))), summed
    # A tensor as large as a bucket has one to itself: nothing is to be taken apart.
    alone = larger * nbytes >= bucket_bytes(device, mesh, "all_gather", step.axes)
    packing = NOTHING if alone else copy(before)
    unpacking = NOTHING if alone and step.dim == 0 else copy(after)
    forward = _sum(packing, collective("all_gather"), unpacking)
    if step.state != REPLICATE:
        return StepLine(forward, copy(before)), NOTHING
    sent = collective("reduce_scatter")
    return StepLine(forward, _sum(sent, copy(after))), sent


def _sum(*lines: Line) -> Line:
    return Line(sum(line.latency for line in lines), sum(line.per_byte for line in lines))
