"""Optimizers that were made from the model instead of the parallel module.

The parallel module trains parameters of its own: this rank's pieces. An optimizer made from the
model's parameters, before `autoparallelize` or after, would step tensors that nothing uses, and
the loss would stay where it is. Every optimizer step is therefore looked at: where its parameters
are a parallelised model's own and none of them has a gradient, it is an error that says so.
`hand_over` moves an optimizer to the parallel module.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.face import Face
from autopar.ir.errors import OptimizerError
from autopar.owners import forget, owner_of, parameters_of, remember
from autopar.scaler_checks import watch_scalers
from autopar.whole_steps import watch_steps

#: Optimizers whose parameters were looked at -> how many they were, and whether some are such.
_seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
_watching = False


def watch(model: nn.Module, face: Face) -> None:
    """From here on, an optimizer that steps the model's parameters in vain is an error."""
    global _watching
    remember(model, face)
    _seen.clear()
    watch_scalers()
    watch_steps()
    if not _watching:
        register_optimizer_step_post_hook(_check_step)
        _watching = True


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = parameters_of(optimizer)
    count, suspect = _seen.get(optimizer, (-1, False))
    if count != len(parameters):
        suspect = any(owner_of(p) is not None for p in parameters)
        _seen[optimizer] = len(parameters), suspect
    if not suspect:
        return
    owners = [(p, owner_of(p)) for p in parameters]
    # Those of a module that was never run have no gradients for another reason.
    originals = [(p, *owner) for p, owner in owners if owner is not None and owner[1].ran]
    if originals and all(p.grad is None for p, _, _ in originals):
        raise OptimizerError(
            f"this {type(optimizer).__name__} was made from the model that was parallelised "
            f"({originals[0][1]!r} is one of its parameters), not from the parallel module, so its "
            "steps change nothing that is used. Make it from parallel.parameters() after "
            "compilation, or call autopar.hand_over(optimizer, parallel)"
        )


def hand_over(optimizer: Optimizer, parallel: Face) -> Optimizer:
    """Let an optimizer that was made from the model train the parallel module; returns it.

    Its groups and options stay, its parameters are replaced by the parallel module's, and the
    state it has (momentum, …) is cut as the parameters are: state of a parameter's shape is split
    as the parameter is, anything else is kept whole. No communication.

    Raises NotCompiledError before the parallel module is compiled, OptimizerError where none of
    the parameters belongs to its model.
    """
    ours = dict(parallel.named_parameters())
    moved: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None and owner[1] is parallel:
                moved[id(parameter)] = owner[0]
    if not moved:
        raise OptimizerError(
            f"hand_over: none of the parameters of this {type(optimizer).__name__} belongs to the "
            "model that the parallel module was made from"
        )
    for group in optimizer.param_groups:
        old = list(group["params"])
        # In place: some optimizers keep a reference to the list.
        group["params"][:] = [ours[moved[id(p)]] if id(p) in moved else p for p in old]
        for parameter in old:
            if id(parameter) in moved and parameter in optimizer.state:
                name = moved[id(parameter)]
                state = optimizer.state.pop(parameter)
                optimizer.state[ours[name]] = _cut(state, name, parameter, parallel)
    _seen.pop(optimizer, None)
    forget(optimizer)
    return optimizer


def _cut(state: Mapping[str, Any], name: str, parameter: Tensor, parallel: Face) -> dict[str, Any]:
    return {
        key: parallel.piece_of(name, value)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
        else value
        for key, value in state.items()
    }
