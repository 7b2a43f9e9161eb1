"""A model without its values: what is traced again once every rank holds its own pieces.

A skeleton is a copy of the model's modules in which every parameter and buffer is a fake tensor:
it has a shape, a dtype and a device, and no memory. So a model that nobody else refers to is freed
when its pieces are made, and a model on the meta device is traced as if it were on a real one.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

#: Where a module keeps its tensors and modules; a copy has stand-ins and copies of them.
_COPIED_FIELDS = ("_parameters", "_buffers", "_modules")


class Skeleton:
    """What a model is traced from after its values are gone.

    module:
        the copy; the model itself where it cannot be copied (see `Skeleton.of`)
    """

    def __init__(self, module: nn.Module, mode: FakeTensorMode) -> None:
        self.module = module
        self._mode = mode

    @staticmethod
    def of(model: nn.Module, device: torch.device | None = None) -> Skeleton:
        """The skeleton of a model, whose tensors claim to be on `device` (default: where they are).

        A model is kept as it is, values included, where one of its functions refers to its own
        modules from a closure, so that a copy would go on using the original, or where
        `copy.deepcopy` refuses it.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        if _refers_to_itself(model):
            return Skeleton(model, mode)
        memo = _stand_ins(model, mode, device)
        try:
            return Skeleton(copy.deepcopy(model, memo), mode)
        except Exception:  # whatever a user's __deepcopy__ may raise
            return Skeleton(model, mode)

    @contextmanager
    def like(self, tensors: Mapping[str, Tensor], training: Mapping[str, bool]) -> Iterator[Any]:
        """The module as it has to be traced now; it comes out as it went in.

        tensors:
            parameters and buffers by name; dtype, device and `requires_grad` are taken over
        training:
            module path -> its training flag
        """
        modules = dict(self.module.named_modules())
        flags = {path: module.training for path, module in modules.items()}
        swapped = [
            (module, dict(module._parameters), dict(module._buffers)) for module in modules.values()
        ]
        stand_ins = {
            id(old): self._stand_in(old, tensors[name])
            for name, old in (*self.module.named_parameters(), *self.module.named_buffers())
            if name in tensors
        }
        try:
            for path, module in modules.items():
                module.training = training.get(path, module.training)
                for held in (module._parameters, module._buffers):
                    for leaf, old in held.items():
                        held[leaf] = stand_ins.get(id(old), old)  # type: ignore[assignment]
            yield self.module
        finally:
            for path, module in modules.items():
                module.training = flags[path]
            for module, parameters, buffers in swapped:
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def _stand_in(self, old: Tensor, now: Tensor) -> Tensor:
        fake = _empty(self._mode, old, now.dtype, now.device)
        return nn.Parameter(fake, now.requires_grad) if isinstance(old, nn.Parameter) else fake


def traceable(model: nn.Module, device: torch.device) -> nn.Module:
    """What to trace a model from: itself; one without values, as if they were on `device`."""
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.is_meta for tensor in tensors):
        return Skeleton.of(model, device).module
    return model


def _empty(
    mode: FakeTensorMode, like: Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    with mode:
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)


def _stand_ins(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | None
) -> dict[int, Any]:
    """What `deepcopy` takes for each tensor: a fake one for state, the same one for the rest."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and name not in _COPIED_FIELDS:
                memo[id(value)] = value
    for parameter in model.parameters():
        fake = _empty(mode, parameter, parameter.dtype, device or parameter.device)
        memo[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _empty(mode, buffer, buffer.dtype, device or buffer.device)
    return memo


def _refers_to_itself(model: nn.Module) -> bool:
    """Whether a function kept on a module holds one of the model's own modules or tensors.

    Bound methods and partials are copied with what they hold; closures are not.
    """
    own = {id(item) for item in (*model.modules(), *model.parameters(), *model.buffers())}
    seen: set[int] = set()

    def reaches(value: Any, inside: bool) -> bool:
        if inside and id(value) in own:
            return True
        if id(value) in seen or isinstance(value, (nn.Module, Tensor, type)):
            return False
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            cells = [c.cell_contents for c in value.__closure__ or () if _is_set(c)]
            return any(reaches(item, True) for item in (*cells, *(value.__defaults__ or ())))
        if isinstance(value, types.MethodType):
            return reaches(value.__self__, inside) or reaches(value.__func__, inside)
        if isinstance(value, functools.partial):
            held = (value.func, *value.args, *value.keywords.values())
            return any(reaches(item, inside) for item in held)
        if isinstance(value, dict):
            return any(reaches(item, inside) for item in value.values())
        if isinstance(value, (list, tuple, set)):
            return any(reaches(item, inside) for item in value)
        return False

    return any(
        reaches(value, False)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _COPIED_FIELDS
    )


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that was never assigned
        return False
