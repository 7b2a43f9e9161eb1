"""Optimizers that need whole tensors: their step sees them, and ranks keep their pieces.

Most optimizers step every element by itself, so they step pieces as they step wholes. Adafactor
keeps means over rows and columns instead (Shazeer and Stern 2018), and works in place where a
`DTensor` cannot; Muon multiplies matrices in bfloat16, which rounds otherwise on pieces. Around the
step of such an optimizer the pieces are put together: parameters and gradients are gathered, every
rank steps all of them alike, and keeps its piece. The state is whole on every rank; Adafactor's is
small, which is what it is for.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.ir.errors import OptimizerError
from autopar.optimizer_offload import watch_offload

#: Optimizers by the name of their class, wherever it is defined.
NEEDS_WHOLE = ("Adafactor", "Muon")

#: Optimizers for which that was asked (`step_whole`).
_asked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
#: Optimizers within a step -> (piece, whole) of their parameters.
_within: weakref.WeakKeyDictionary[Optimizer, list[tuple[DTensor, nn.Parameter]]] = (
    weakref.WeakKeyDictionary()
)
_watching = False


def step_whole(optimizer: Optimizer) -> Optimizer:
    """Let every step of an optimizer see whole tensors instead of `DTensor`s; returns it.

    For optimizers whose update of one element depends on others and that do not say so in terms
    that a `DTensor` understands. Each step gathers all of their parameters and gradients, and their
    state is whole on every rank. Adafactor and Muon are treated so without asking.
    """
    watch_steps()
    _asked.add(optimizer)
    return optimizer


def watch_steps() -> None:
    """From here on such optimizers see whole tensors."""
    global _watching
    watch_offload(_needs_whole)  # before, so that state is where whole tensors are made
    if not _watching:
        register_optimizer_step_pre_hook(_put_together)
        register_optimizer_step_post_hook(_take_apart)
        _watching = True


def _needs_whole(optimizer: Optimizer) -> bool:
    names = {base.__name__ for base in type(optimizer).__mro__}
    return optimizer in _asked or not names.isdisjoint(NEEDS_WHOLE)


def _put_together(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _needs_whole(optimizer):
        return
    _take_apart(optimizer, args, kwargs)  # what a step that failed has left
    pairs: list[tuple[DTensor, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for k, parameter in enumerate(group["params"]):
            if not isinstance(parameter, DTensor) or parameter.grad is None:
                continue
            if any(argument is not None for argument in (*args[1:], *kwargs.values())):
                raise OptimizerError(
                    f"{type(optimizer).__name__}: its steps are taken on whole tensors, so they "
                    "take no closure; compute the gradients before the step"
                )
            whole = nn.Parameter(_whole(parameter.detach()).clone())
            whole.grad = _whole(parameter.grad)
            pairs.append((parameter, whole))
            group["params"][k] = whole
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[whole] = {key: _whole(value) for key, value in state.items()}
    _within[optimizer] = pairs


def _take_apart(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    pairs = _within.pop(optimizer, None)
    if not pairs:
        return
    piece_of = {id(whole): piece for piece, whole in pairs}
    for group in optimizer.param_groups:
        group["params"][:] = [piece_of.get(id(p), p) for p in group["params"]]
    with torch.no_grad():
        for piece, whole in pairs:
            mesh = piece.device_mesh
            copies = [Replicate()] * mesh.ndim
            stepped = DTensor.from_local(whole.detach(), mesh, copies, run_check=False)
            piece.to_local().copy_(stepped.redistribute(mesh, piece.placements).to_local())
            if whole in optimizer.state:
                optimizer.state[piece] = optimizer.state.pop(whole)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
