"""What it costs to bring a parameter into the graph, and its gradient back.

The first steps of parameters go in buckets (`fuse`): the tensors are copied into one buffer and out
of it, and latency is paid once for a whole bucket, so each tensor pays its part. A large one has a
bucket to itself, pays the latency and is not copied. Of what comes
back, the collectives run beside the backward pass (`overlap`); copying does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np

from autopar.ir.layout import REPLICATE
from autopar.ir.mesh import Mesh
from autopar.passes.bucket_size import BucketSize, bucket_size
from autopar.passes.collective_cost import NOTHING, Line
from autopar.passes.device import Device
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
    # One lookup for thousands of steps: a device is slow to hash.
    size_of = cache(partial(bucket_size, device, mesh))
    for i, (step, (before, after)) in enumerate(zip(steps, held.tolist(), strict=True)):
        if step.kind in _PACKED and before and after:
            lines[i], sent[i] = fetch_line(step, before, after, size_of, nbytes)
    return lines, sent


def fetch_line(
    step: Step,
    before: float,
    after: float,
    size_of: Callable[[str, tuple[str, ...]], BucketSize],
    nbytes: float,
) -> tuple[StepLine, Line]:
    """The price of a step of a bucket for one of its tensors, and of its gradient's collective.

    `before` and `after` are the shares of the tensor, of about `nbytes`, that a rank holds;
    `size_of` says of a collective and its axes how tensors travel through it.
    """
    larger = max(before, after)

    def alone(kind: str) -> bool:
        return larger * nbytes >= size_of(kind, step.axes).alone

    def collective(kind: str) -> Line:
        size = size_of(kind, step.axes)
        per_byte = size.line.per_byte * larger
        if alone(kind):
            return Line(size.waits, per_byte)
        return Line(0.0, per_byte + size.waits / size.full * larger)

    def copy(kind: str, part: float) -> Line:
        return Line(0.0, size_of(kind, step.axes).copying * part)

    def pack(kind: str, part: float) -> Line:
        return NOTHING if alone(kind) else copy(kind, part)

    if step.kind == "to_replicate":
        sent = collective("all_reduce")
        return StepLine(NOTHING, _sum(sent, pack("all_reduce", after))), sent
    if step.kind == "all_reduce":
        summed = collective("all_reduce")
        forward = _sum(copy("all_reduce", before), summed)
        if step.state != REPLICATE:
            return StepLine(forward, NOTHING), NOTHING
        return StepLine(forward, _sum(summed, pack("all_reduce", after))), summed
    # Along another dimension than the first the pieces lie apart, whoever travels with them.
    whole = pack if step.dim == 0 else copy
    gathered = collective("all_gather")
    forward = _sum(pack("all_gather", before), gathered, whole("all_gather", after))
    if step.state != REPLICATE:
        return StepLine(forward, copy("all_gather", before)), NOTHING
    sent = collective("reduce_scatter")
    return StepLine(forward, _sum(sent, whole("reduce_scatter", after))), sent


def _sum(*lines: Line) -> Line:
    return Line(sum(line.latency for line in lines), sum(line.per_byte for line in lines))
