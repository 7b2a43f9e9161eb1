"""What a reshard needs in memory, for every pair of layouts.

A step makes a new tensor from an old one, unless both show the same memory, and works in buffers
besides: collectives take and give pieces that are stacked in front, so that along any dimension
but the outermost they are copied once more (in buckets along that, too). Along a path the source
stays alive; each step adds
its result, and the one before is let go. Backward the same steps are undone, from the end.

All numbers are parts of the whole tensor's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.ir.layout import REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.passes.device import Device
from autopar.passes.reshard_cost import PathTable, path_table
from autopar.passes.reshard_steps import Step


@dataclass(frozen=True, eq=False)
class ReshardMemory:
    """Parts of the whole tensor, float64 [source, destination].

    copy, back:
        the new tensor that is left, forward (in the destination's layout) and backward (a
        gradient in the source's); 0 where the memory of the other is shown
    moment, back_moment:
        the most that is in use on the way, beyond what one starts from
    alone, back_alone:
        the same where nothing else needs what one starts from, so that the first step lets it go
    """

    copy: np.ndarray
    back: np.ndarray
    moment: np.ndarray
    back_moment: np.ndarray
    alone: np.ndarray
    back_alone: np.ndarray


def reshard_memory(
    sources: Sequence[Layout],
    destinations: Sequence[Layout],
    shape: Sequence[int],
    mesh: Mesh,
    device: Device,
    *,
    grad: bool,
    fetched: bool = False,
) -> ReshardMemory:
    """The memory of every reshard that `plan_reshard` finds for a tensor of some shape."""
    if not grad:
        sources = [layout.without_gradient() for layout in sources]
        destinations = [layout.without_gradient() for layout in destinations]
    both = (*sources, *destinations)
    table = path_table(shape, mesh, device, grad=grad, between=both, fetched=fetched)
    rows, columns = table.ids(sources), table.ids(destinations)
    steps = _step_memory(table, tuple(shape), mesh, fetched)
    starts, of_row = np.unique(rows, return_inverse=True)
    found = _along_paths(table, starts, steps)
    chosen = of_row.reshape(-1)[:, None], columns[None, :]
    return ReshardMemory(*(part[chosen] for part in found))


@dataclass(frozen=True, eq=False)
class _StepMemory:
    """What each step of a table makes and uses, float64 [step]; `made` is 0 for an alias.

    held:
        what a rank holds under each layout of the table, float64 [layout]
    """

    held: np.ndarray
    made: np.ndarray
    used: np.ndarray
    back_made: np.ndarray
    back_used: np.ndarray


@lru_cache(maxsize=1024)
def _step_memory(
    table: PathTable, shape: tuple[int, ...], mesh: Mesh, fetched: bool
) -> _StepMemory:
    held = {layout: 1 / layout.pieces(shape, mesh) for layout in table.layouts}
    outermost = next((d for d, size in enumerate(shape) if size != 1), 0)
    # Buckets are flat: what goes into one is copied along any dimension.
    outermost = -1 if fetched else outermost
    rows = [_of_step(step, held[step.before], held[step.after], outermost) for step in table.steps]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), 4).T
    return _StepMemory(np.array(list(held.values())), *columns)


def _of_step(
    step: Step, before: float, after: float, outermost: int
) -> tuple[float, float, float, float]:
    """What one step makes and uses, forward and backward (see `runtime/collectives.py`)."""

    def stacked(dim: int | None, share: float) -> float:
        return share if dim is not None and dim > outermost else 0.0

    replicated = step.state == REPLICATE
    match step.kind:
        case "all_reduce":
            return after, 0.0, before if replicated else 0.0, 0.0
        case "all_gather":
            back = stacked(step.dim, after) if replicated else 0.0
            return after, stacked(step.dim, after), before, back
        case "reduce_scatter":
            return after, stacked(step.dim, before), before, stacked(step.dim, before)
        case "all_to_all":
            buffers = stacked(step.dim, before) + stacked(step.dst_dim, before)
            return after, buffers, before, buffers
        case "slice":
            return after, 0.0, before, 0.0 if replicated else stacked(step.dim, before)
        case "mask":
            return after, 0.0, before if replicated else 0.0, 0.0
        case "to_replicate":
            return 0.0, 0.0, before, before if outermost < 0 else 0.0
        case "to_invariant":
            return 0.0, 0.0, before, 0.0
    return after, 0.0, before, 0.0  # pad: zeros, and a slice of them


def _along_paths(table: PathTable, starts: np.ndarray, steps: _StepMemory) -> list[np.ndarray]:
    """The parts of `ReshardMemory`, [start, layout], over the paths of a table."""
    last, before = table.last_steps(starts)
    shape = last.shape
    source = np.broadcast_to(steps.held[starts, None], shape)
    if not len(table.steps):
        return [np.zeros(shape)] * 6
    moved = last >= 0
    step, start = np.where(moved, last, 0), np.where(moved, before, 0)

    def along(parts: np.ndarray) -> np.ndarray:
        return np.where(moved, parts[step], 0.0)

    made, used = along(steps.made), along(steps.used)
    back_made, back_used = along(steps.back_made), along(steps.back_used)
    new, back_new = made > 0, back_made > 0
    held = np.broadcast_to(steps.held, shape)
    copy, moment, back, back_moment = np.zeros((4, *shape))
    # All that is held on the way, what one starts from included as long as it is there.
    total, back_total = source, held
    # A layout's numbers follow from those of the layout before it: as often as a path is long.
    while True:
        known = copy, back, moment, back_moment, total, back_total
        was, undone, most, back_most, all_, back_all = (
            np.take_along_axis(part, start, axis=1) for part in known
        )
        current = np.where(was > 0, was, source)
        reached = (
            np.where(new, made, was),
            np.where(back_new, source, undone),
            np.where(new, np.maximum(most, was + made + used), most),
            back_made + np.maximum(back_most, back_used),
            np.where(new, np.maximum(all_, current + made + used), all_),
            np.where(back_new, np.maximum(back_all, held + back_made + back_used), back_all),
        )
        copy, back, moment, back_moment, total, back_total = (
            np.where(moved, now, part) for now, part in zip(reached, known, strict=True)
        )
        now = copy, back, moment, back_moment, total, back_total
        if all(np.array_equal(a, b) for a, b in zip(now, known, strict=True)):
            break
    return [copy, back, moment, back_moment, total - source, np.maximum(back_total - held, 0.0)]
