"""What a reshard needs in memory, for every pair of layouts.

A step makes a new tensor from an old one, unless both show the same memory, and works in buffers
besides: collectives take and give pieces that are stacked in front, so that along any dimension
but the outermost they are copied once more (in buckets along that, too). Along a path the source
stays alive; each step adds
its result, and the one before is let go. Backward the same steps are undone, from the end.

All numbers are parts of the whole tensor's size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.ir.layout import REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.passes.device import Device
from autopar.passes.reshard.cost import PathTable, path_table
from autopar.passes.reshard.steps import Step


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


class ReshardMemories:
    """The memory of every reshard that `plan_reshard` finds on a mesh of one device.

    What many tensors of a model have in common is worked out once, and kept with this object.
    """

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self._known: dict[Hashable, ReshardMemory] = {}

    def between(
        self,
        sources: Sequence[Layout],
        destinations: Sequence[Layout],
        shape: Sequence[int],
        *,
        grad: bool,
        fetched: bool = False,
    ) -> ReshardMemory:
        """Of all reshards of a tensor of some shape, whole, between two sets of layouts."""
        if not grad:
            sources = [layout.without_gradient() for layout in sources]
            destinations = [layout.without_gradient() for layout in destinations]
        both, mesh = (*sources, *destinations), self.mesh
        table = path_table(shape, mesh, self.device, grad=grad, between=both, fetched=fetched)
        rows, columns = table.ids(sources), table.ids(destinations)
        # Buckets are flat: what goes into one is copied along any dimension.
        outermost = next((d for d, size in enumerate(shape) if size != 1), 0)
        outermost = -1 if fetched else outermost
        held = _held(table, tuple(shape), mesh)
        key = table, held.tobytes(), outermost, rows.tobytes(), columns.tobytes()
        if key not in self._known:
            steps = _step_memory(table, held, outermost, self.device.backend == "gloo")
            self._known[key] = ReshardMemory(*_along_paths(table, rows, columns, steps))
        return self._known[key]


@lru_cache(maxsize=1024)
def _held(table: PathTable, shape: tuple[int, ...], mesh: Mesh) -> np.ndarray:
    """The part of a tensor that a rank holds under each layout of a table, float64 [layout]."""
    return np.array([1 / layout.pieces(shape, mesh) for layout in table.layouts])


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


def _step_memory(
    table: PathTable, held: np.ndarray, outermost: int, exchanged: bool
) -> _StepMemory:
    columns = np.zeros((4, len(table.steps)))
    before, after = table.ends
    for step, same in table.alike:
        found = _of_steps(step, held[before[same]], held[after[same]], outermost, exchanged)
        for column, nbytes in zip(columns, found, strict=True):
            column[same] = nbytes
    return _StepMemory(held, *columns)


def _of_steps(
    step: Step, before: np.ndarray, after: np.ndarray, outermost: int, exchanged: bool
) -> tuple[np.ndarray | float, ...]:
    """What steps of one kind make and use, forward and backward (see `runtime/collectives.py`).

    before, after:
        what a rank holds before and after each of them
    exchanged:
        whether a reduce-scatter receives as much as it sends (`device.BACKENDS`)
    """

    def stacked(dim: int | None, share: np.ndarray) -> np.ndarray | float:
        return share if dim is not None and dim > outermost else 0.0

    replicated = step.state == REPLICATE
    match step.kind:
        case "all_reduce":
            return after, 0.0, before if replicated else 0.0, 0.0
        case "all_gather":
            back = stacked(step.dim, after) + exchanged * after if replicated else 0.0
            return after, stacked(step.dim, after), before, back
        case "reduce_scatter":
            buffers = stacked(step.dim, before)
            return after, buffers + exchanged * before, before, buffers
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


def _along_paths(
    table: PathTable, rows: np.ndarray, columns: np.ndarray, steps: _StepMemory
) -> list[np.ndarray]:
    """The parts of `ReshardMemory`, [row, column], over the paths of a table."""
    shape = len(rows), len(columns)
    first, at = np.repeat(rows, len(columns)), np.tile(columns, len(rows))
    # From the end: the pairs that have a step left, that step, and the layout it leads to.
    path, pairs = [], np.arange(len(at))
    while len(pairs):
        step, before = table.last_steps(first[pairs], at[pairs])
        taken = step >= 0
        pairs, step = pairs[taken], step[taken]
        path.append((pairs, step, at[pairs]))
        at[pairs] = before[taken]
    source = steps.held[at]
    copy, moment, back, back_moment = np.zeros((4, len(at)))
    # All that is held on the way, what one starts from included as long as it is there.
    total, back_total, held = source.copy(), source.copy(), source.copy()
    for pairs, step, after in reversed(path):
        start, had = source[pairs], copy[pairs]
        now = held[pairs] = steps.held[after]
        # What makes nothing new uses nothing either, and changes none of the maxima.
        made = steps.made[step]
        need = made + steps.used[step]
        moment[pairs] = np.maximum(moment[pairs], had + need)
        total[pairs] = np.maximum(total[pairs], np.where(had > 0, had, start) + need)
        copy[pairs] = np.where(made > 0, made, had)
        made, used = steps.back_made[step], steps.back_used[step]
        back_moment[pairs] = made + np.maximum(back_moment[pairs], used)
        back_total[pairs] = np.maximum(back_total[pairs], now + made + used)
        back[pairs] = np.where(made > 0, start, back[pairs])
    found = copy, back, moment, back_moment, total - source, np.maximum(back_total - held, 0.0)
    return [part.reshape(shape) for part in found]
