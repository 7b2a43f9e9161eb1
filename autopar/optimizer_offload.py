"""Optimizer state in the host's memory: between steps nothing of it is on the device.

Around every step of an optimizer that trains a module with ``offload_optimizer=True`` its state is
brought to the device and put back. PyTorch's own optimizers step each parameter by itself, so their
step is taken in several parts, of a few parameters each, and only the state of one part is on the
device at a time (ZeRO-Offload, Ren et al. 2021, keeps the state there as well, and steps on the
host; here the device steps, so that the update is the same bit for bit). Others, and steps with a
closure, get all of their state at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from autopar.ir.keep import STEP_BYTES
from autopar.owners import trained_by


class HostMemory:
    """Where state is between steps: in the host's memory, pinned where the device is another.

    On a CPU that is where it is already, and nothing moves.
    """

    def put(self, x: Tensor, room: Tensor | None) -> Tensor:
        """A tensor's values on the host, in `room` where that is given (and fits)."""
        if x.device.type == "cpu":
            return x
        if room is None or (room.shape, room.dtype) != (x.shape, x.dtype):
            room = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
        # Whoever reads the host's memory does not wait for the device.
        return room.copy_(x)

    def take(self, x: Tensor, device: torch.device) -> Tensor:
        """The values on the device."""
        return x.to(device, non_blocking=x.is_pinned())


HOST = HostMemory()

#: A tensor of state on the host -> the device that it is brought to.
_away: Any = WeakIdKeyDictionary()
#: A tensor of state on the device -> the host's memory that it came from, to be used again.
_rooms: Any = WeakIdKeyDictionary()
#: Optimizers within a step that is taken in parts -> the parameters of their groups.
_parted: weakref.WeakKeyDictionary[Optimizer, list[list[Tensor]]] = weakref.WeakKeyDictionary()
_watching = False


def watch_offload(needs_whole: Callable[[Optimizer], bool]) -> None:
    """From here on, state of optimizers of modules that ask for it is kept on the host.

    needs_whole:
        whether the steps of an optimizer see whole tensors (`autopar.whole_steps`)
    """
    global _watching
    if _watching:
        return
    _watching = True

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _rejoin(optimizer)
        if not _offloads(optimizer):
            return
        closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
        if closure or needs_whole(optimizer) or not _steps_by_parameter(optimizer):
            _take_all(optimizer)
        else:
            _step_in_parts(optimizer)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        offloads = optimizer in _parted or _offloads(optimizer)
        _rejoin(optimizer)
        if offloads:
            put_away(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def put_away(optimizer: Optimizer) -> None:
    """Move an optimizer's state to the host, where its module asks for that."""
    if _offloads(optimizer):
        _move(optimizer, list(optimizer.state), _to_host)


def _offloads(optimizer: Optimizer) -> bool:
    """Whether it trains a module that keeps optimizer state on the host."""
    face = trained_by(optimizer)
    return face is not None and face.offloads_optimizer


def _steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether a step of some parameters is a part of the step of all; known of PyTorch's own."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


# -- moving -----------------------------------------------------------------------------------


def _to_host(value: Any) -> Any:
    """A tensor of some size on the host; anything else as it is, step counters among it."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value in _away:
        return value
    local = _local(value)
    kept = HOST.put(local, _rooms.pop(local, None))
    moved = value if kept is local else _like(value, kept)
    _away[moved] = local.device
    return moved


def _to_device(value: Any) -> Any:
    if not isinstance(value, Tensor) or value not in _away:
        return value
    local = _local(value)
    taken = HOST.take(local, _away.pop(value))
    if taken is local:
        return value
    _rooms[taken] = local
    return _like(value, taken)


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def _like(value: Tensor, local: Tensor) -> Tensor:
    """Other memory, of the same place in the whole. `DTensor.from_local` would move it."""
    if isinstance(value, DTensor):
        return DTensor(local, value._spec, requires_grad=False)
    return local


def _move(optimizer: Optimizer, parameters: Sequence[Tensor], way: Callable[[Any], Any]) -> None:
    """Send the state of some parameters, of those that have any, one way."""
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if state:
            optimizer.state[parameter] = pytree.tree_map(way, state)


def _take_all(optimizer: Optimizer) -> None:
    _move(optimizer, list(optimizer.state), _to_device)


# -- in parts -------------------------------------------------------------------------------------


def _step_in_parts(optimizer: Optimizer) -> None:
    """Take all parts of a step but the last, and leave that to the step that was called."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    parts = _parts([_nbytes(p) for group in groups for p in group if p.grad is not None])
    if len(parts) < 2:
        _take_all(optimizer)
        return
    _parted[optimizer] = groups
    trained = [(k, p) for k, group in enumerate(groups) for p in group if p.grad is not None]
    try:
        for number, (start, end) in enumerate(parts):
            for k, group in enumerate(optimizer.param_groups):
                # In place: some optimizers keep a reference to the list.
                group["params"][:] = [p for at, p in trained[start:end] if at == k]
            part = [parameter for _, parameter in trained[start:end]]
            _move(optimizer, part, _to_device)
            if number < len(parts) - 1:
                _plain_step(optimizer)
                _move(optimizer, part, _to_host)
    except BaseException:
        _rejoin(optimizer)
        raise


def _parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of parameters of at most `STEP_BYTES` together; a larger one is alone."""
    found: list[tuple[int, int]] = []
    start, held = 0, 0
    for k, size in enumerate(sizes):
        if k > start and held + size > STEP_BYTES:
            found.append((start, k))
            start, held = k, 0
        held += size
    return [*found, (start, len(sizes))] if sizes else found


def _nbytes(parameter: Tensor) -> int:
    local = _local(parameter)
    return math.prod(local.shape) * local.element_size()


def _plain_step(optimizer: Any) -> None:
    """The step without its hooks, which belong to the step as a whole."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _rejoin(optimizer: Optimizer) -> None:
    """Give the groups their parameters back."""
    for group, parameters in zip(optimizer.param_groups, _parted.pop(optimizer, ()), strict=False):
        group["params"][:] = parameters
