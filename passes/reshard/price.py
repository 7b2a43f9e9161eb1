"""What one reshard step costs, forward and backward: a line over the bytes of the whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from autopar.ir.cut import piece_sizes
from autopar.ir.errors import LayoutError
from autopar.ir.layout import REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.passes.collective_cost import NOTHING, Line, blocking_line
from autopar.passes.device import Device, bytes_moved
from autopar.passes.reshard.steps import Step


class StepLine(NamedTuple):
    """The time of a step, forward and backward, as lines over the bytes of the *whole* tensor."""

    forward: Line
    backward: Line


def step_times(
    step: Step,
    nbytes: float,
    mesh: Mesh,
    device: Device,
    *,
    grad: bool,
    shape: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Seconds of a step, forward and backward; `nbytes` is the size of the whole tensor.

    Without its `shape` pieces are taken to be even.
    """
    line = step_line(step, mesh, device, shape)
    return line.forward.at(nbytes), line.backward.at(nbytes) if grad else 0.0


def step_line(
    step: Step, mesh: Mesh, device: Device, shape: Sequence[int] | None = None
) -> StepLine:
    """The price of a step of a tensor with gradient; without one only `forward` is paid."""
    if step.kind == "recut":
        if shape is None:
            raise LayoutError("recut: its price depends on the shape of the tensor")
        return _recut_line(step, mesh, device, shape)
    if shape is None:
        before, after = even_share(step.before, mesh), even_share(step.after, mesh)
        return line_of(step.kind, step.axes, step.state, before, after, mesh, device)
    before, after = share(step.before, shape, mesh), share(step.after, shape, mesh)
    uneven = not (step.before.divides(shape, mesh) and step.after.divides(shape, mesh))
    return line_of(step.kind, step.axes, step.state, before, after, mesh, device, padded=uneven)


def even_share(layout: Layout, mesh: Mesh) -> float:
    """The part of a tensor that one rank holds where all pieces are equal."""
    return 1 / mesh.axis_size(*layout.split_axes)


def share(layout: Layout, shape: Sequence[int], mesh: Mesh) -> float:
    """The part of a tensor of some shape that the rank with the largest piece holds."""
    if layout.divides(shape, mesh):
        return even_share(layout, mesh)
    return math.prod(layout.local_shape(shape, mesh)) / max(math.prod(shape), 1)


def line_of(
    kind: str,
    axes: tuple[str, ...],
    state: str | None,
    before: float,
    after: float,
    mesh: Mesh,
    device: Device,
    padded: bool = False,
) -> StepLine:
    """The price of a step from the shares of the tensor a rank holds before and after it.

    Every operator that runs, collective or local, is also launched. `padded`: pieces may be
    uneven, and gathering and scattering move every one of them at the size of the largest.
    """
    larger, smaller = max(before, after), min(before, after)
    group = mesh.axis_size(*axes)

    def collective(name: str) -> Line:
        # The tensor the group works on is the larger of the two, all-to-all's is in n pieces.
        worked_on = larger
        if padded and name in ("all_gather", "reduce_scatter"):
            worked_on = max(larger, smaller * group)
        pieces = group if name == "all_to_all" else 1
        line = blocking_line(device, mesh, name, axes)
        return Line(device.launch + line.latency, line.per_byte * worked_on * pieces)

    def copy(part: float) -> Line:
        return Line(device.launch, part / device.memory_bandwidth)

    cut = copy(2 * smaller)  # read a piece, write it
    fill = copy(before + after)  # read a piece, write the whole
    keep = copy(after)  # write zeros; the one rank that keeps its value reads it too
    replicated = state == REPLICATE
    match kind:
        case "all_reduce":
            reduce = collective("all_reduce")
            return StepLine(reduce, reduce if replicated else NOTHING)
        case "all_gather":
            back = collective("reduce_scatter") if replicated else cut
            return StepLine(collective("all_gather"), back)
        case "reduce_scatter":
            return StepLine(collective("reduce_scatter"), collective("all_gather"))
        case "all_to_all":
            move = collective("all_to_all")
            return StepLine(move, move)
        case "slice":
            return StepLine(cut, fill if replicated else collective("all_gather"))
        case "pad":
            return StepLine(fill, cut)
        case "mask":
            return StepLine(keep, keep if replicated else NOTHING)
        case "to_replicate":
            return StepLine(NOTHING, collective("all_reduce"))
        case "to_invariant":
            return StepLine(NOTHING, keep)
    raise LayoutError(f"unknown reshard step {kind!r}")


def _recut_line(step: Step, mesh: Mesh, device: Device, shape: Sequence[int]) -> StepLine:
    """An exchange in which a rank sends only what it holds and others are to hold."""
    assert step.dim is not None
    size, counts = shape[step.dim], mesh.sizes_of(step.axes)
    pieces = [piece_sizes(size, counts, x.unit(step.dim)) for x in (step.before, step.after)]
    moved = most_sent(*pieces) / max(size, 1)
    before, after = share(step.before, shape, mesh), share(step.after, shape, mesh)
    # Other dimensions are cut alike before and after.
    moved *= before * size / max(1, step.before.local_shape(shape, mesh)[step.dim])
    line = blocking_line(device, mesh, "all_to_all", step.axes)
    per_byte = line.per_byte / bytes_moved("all_to_all", mesh.axis_size(*step.axes))
    copied = (before + after) / device.memory_bandwidth
    both = Line(device.launch + line.latency, per_byte * moved + copied)
    return StepLine(both, both)


def most_sent(before: Sequence[int], after: Sequence[int]) -> int:
    """The most elements that one rank sends where pieces of one set of sizes become another."""
    starts, ends = ([0, *itertools.accumulate(sizes)] for sizes in (before, after))
    kept = (
        max(0, min(starts[i + 1], ends[i + 1]) - max(starts[i], ends[i]))
        for i in range(len(before))
    )
    return max(size - stays for size, stays in zip(before, kept, strict=True))
