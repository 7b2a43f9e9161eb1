"""Mistakes in loss scaling, as errors that say what to do, before any gradient is changed.

PyTorch's `GradScaler` answers some mistakes with an assertion about its own state, and others not
at all: a step on gradients that are still multiplied by the scale, or clipping them, only makes a
run worse. Its methods are looked at here where the parameters of a parallel module are concerned;
scalers of other models work as they do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.face import Face
from autopar.ir.errors import OptimizerError
from autopar.owners import faces_of, owner_of, parameters_of, trained_by

#: Scalers that scaled something since their last update -> optimizers whose gradients they have
#: divided again.
_scaled: weakref.WeakKeyDictionary[GradScaler, weakref.WeakSet[Optimizer]] = (
    weakref.WeakKeyDictionary()
)
_watching = False


def watch_scalers() -> None:
    """From here on, a scaler that is used wrongly with a parallel module is an error."""
    global _watching
    if _watching:
        return
    _watching = True
    GradScaler.scale = _noting_scale(GradScaler.scale)  # type: ignore[method-assign]
    GradScaler.unscale_ = _checked_unscale(GradScaler.unscale_)  # type: ignore[method-assign]
    GradScaler.step = _checked_step(GradScaler.step)  # type: ignore[method-assign]
    GradScaler.update = _checked_update(GradScaler.update)  # type: ignore[method-assign]
    # `clip_grad_norm_` looks this up when it runs, however it was imported itself.
    clip_grad._clip_grads_with_norm_ = _checked_clip(clip_grad._clip_grads_with_norm_)
    clipped = _checked_clip(clip_grad.clip_grad_value_)
    clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = clipped
    register_optimizer_step_pre_hook(_check_direct_step)


# -- the scaler's own methods ---------------------------------------------------------------------


def _noting_scale(scale: Callable[..., Any]) -> Any:
    @functools.wraps(scale)
    def noting(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            _scaled.setdefault(self, weakref.WeakSet())
        return scale(self, outputs)

    return noting


def _checked_unscale(unscale: Callable[..., None]) -> Any:
    @functools.wraps(unscale)
    def checked(self: GradScaler, optimizer: Optimizer) -> None:
        if self.is_enabled():
            _check(self, optimizer, "unscale_")
        unscale(self, optimizer)
        if self in _scaled:
            _scaled[self].add(optimizer)

    return checked


def _checked_step(step: Callable[..., Any]) -> Any:
    @functools.wraps(step)
    def checked(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            _check(self, optimizer, "step")
        return step(self, optimizer, *args, **kwargs)

    return checked


def _checked_update(update: Callable[..., None]) -> Any:
    @functools.wraps(update)
    def checked(self: GradScaler, new_scale: Any = None) -> None:
        states = getattr(self, "_per_optimizer_states", {}).values()
        looked_at = any(state["found_inf_per_device"] for state in states)
        if self.is_enabled() and new_scale is None and not looked_at:
            raise OptimizerError(
                "GradScaler.update: no optimizer has stepped since the last update, so there is "
                "nothing to adapt the scale to; call scaler.step(optimizer) before it"
            )
        update(self, new_scale)
        _scaled.pop(self, None)

    return checked


def _check(scaler: GradScaler, optimizer: Optimizer, verb: str) -> None:
    """Raise OptimizerError where `scaler.step` or `unscale_` of an optimizer would go wrong."""
    kind = type(optimizer).__name__
    early = next(filter(None, map(owner_of, parameters_of(optimizer))), None)
    if early and early[1].ran and all(p.grad is None for p in parameters_of(optimizer)):
        raise OptimizerError(
            f"GradScaler.{verb}: this {kind} was made from the model that was parallelised "
            f"({early[0]!r} is one of its parameters), which has no gradients. Make it from "
            "parallel.parameters() after compilation, or call autopar.hand_over(optimizer, "
            "parallel)"
        )
    face = trained_by(optimizer)
    if face is None:
        return
    mixed = face.computes_in
    if mixed == torch.bfloat16:
        raise OptimizerError(
            f"GradScaler.{verb}: this {kind} trains a module with mixed_precision='bf16', whose "
            "gradients have the range of float32 and need no scaling; leave the scaler away, or "
            "make it with enabled=False"
        )
    if scaler._scale is None:
        raise OptimizerError(
            f"GradScaler.{verb}: nothing was scaled yet; the backward pass is "
            "scaler.scale(loss).backward()"
        )
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage is OptState.STEPPED:
        raise OptimizerError(
            f"GradScaler.{verb}: this {kind} has stepped already since the last scaler.update(), "
            "which belongs at the end of every step"
        )
    if stage is OptState.UNSCALED and verb == "unscale_":
        raise OptimizerError(
            f"GradScaler.unscale_: the gradients of this {kind} were divided by the scale already "
            "since the last scaler.update(); unscale_ is called once, after the last backward "
            "pass and before clipping"
        )
    if stage is OptState.READY:
        _check_gradients(face, optimizer, verb)


def _check_gradients(face: Face, optimizer: Optimizer, verb: str) -> None:
    def named(parameter: Tensor) -> str:
        found = [name for name, each in face.named_parameters() if each is parameter]
        return repr(found[0]) if found else "a parameter"

    grads = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    if not grads:
        raise OptimizerError(
            f"GradScaler.{verb}: none of the parameters of this {type(optimizer).__name__} has a "
            "gradient; the backward pass comes first, and zero_grad() after the step"
        )
    for parameter, grad in grads:
        if grad.dtype == torch.float16:
            raise OptimizerError(
                f"GradScaler.{verb}: the gradient of {named(parameter)} is in float16, as its "
                "parameter is; keep parameters in float32, and compute in float16 by "
                "mixed_precision='fp16'"
            )
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            raise OptimizerError(
                f"GradScaler.{verb}: the gradient of {named(parameter)} is not summed over the "
                "ranks, since every backward pass ran inside of no_sync, and a sum may overflow "
                "where its terms do not; leave no_sync for the last backward pass before the step"
            )


# -- gradients that are still scaled --------------------------------------------------------------


def _check_direct_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step that the scaler knows nothing of, on gradients that it has scaled."""
    if (
        torch.compiler.is_dynamo_compiling()
        or not _scaled
        or hasattr(optimizer, "found_inf")
        or "grad_scaler" in kwargs
    ):
        return
    face = trained_by(optimizer)
    if face is None or face.computes_in != torch.float16 or not _still_scaled(optimizer):
        return
    if any(p.grad is not None for p in parameters_of(optimizer)):
        raise OptimizerError(
            f"{type(optimizer).__name__}.step: its gradients are still multiplied by the scale of "
            "a GradScaler; call scaler.step(optimizer) and scaler.update() instead"
        )


def _still_scaled(optimizer: Optimizer) -> bool:
    return all(optimizer not in divided for divided in _scaled.values())


def _checked_clip(clip: Callable[..., Any]) -> Any:
    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and _scaled:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            _check_clipping(parameters)
        return clip(parameters, *args, **kwargs)

    return checked


def _check_clipping(parameters: Sequence[Tensor]) -> None:
    divided = {
        id(p) for found in _scaled.values() for optimizer in found for p in parameters_of(optimizer)
    }
    for parameter, face in zip(parameters, faces_of(parameters), strict=True):
        if face is None or face.computes_in != torch.float16 or parameter.grad is None:
            continue
        if id(parameter) not in divided:
            raise OptimizerError(
                "clipping: the gradients are still multiplied by the scale of a GradScaler; call "
                "scaler.unscale_(optimizer) between the backward pass and clipping"
            )
