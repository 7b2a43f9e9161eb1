"""Whose a parameter is: a parallel module's own, or that of the model it was made from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.face import Face

#: A parameter of a parallelised model -> its name, and the module that trains its pieces.
_originals: Any = WeakIdKeyDictionary()
#: The parallel modules. Not their parameters: PyTorch changes the dtype or device of one that is a
#: DTensor only while nothing has a weak reference to it.
_faces: weakref.WeakSet[Face] = weakref.WeakSet()
#: Optimizer -> how many parameters it had when they were looked at, and their module, if any.
_trained: weakref.WeakKeyDictionary[Optimizer, tuple[int, weakref.ref[Face] | None]] = (
    weakref.WeakKeyDictionary()
)


def remember(model: nn.Module, face: Face) -> None:
    """Note whose the parameters of a model, and of the parallel module made from it, are."""
    for name, parameter in model.named_parameters():
        _originals[parameter] = (name, weakref.ref(face))
    _faces.add(face)
    _trained.clear()


def owner_of(parameter: Tensor) -> tuple[str, Face] | None:
    """The name of a parallelised model's own parameter, and the module that trains its pieces."""
    found = _originals.get(parameter)
    face = None if found is None else found[1]()
    return None if found is None or face is None else (found[0], face)


def faces_of(parameters: Sequence[Tensor]) -> list[Face | None]:
    """The parallel module that each parameter is a piece of; None for any other parameter."""
    owners = {id(p): face for face in list(_faces) for p in face.parameters()}
    return [owners.get(id(parameter)) for parameter in parameters]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained_by(optimizer: Optimizer) -> Face | None:
    """The parallel module that an optimizer trains, beside whatever else; None if it trains none.

    Asked in every step, so parameters are looked at again only where their number has changed.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _trained.get(optimizer)
    if known is None or known[0] != count:
        face = next(filter(None, faces_of(parameters_of(optimizer))), None)
        known = count, None if face is None else weakref.ref(face)
        _trained[optimizer] = known
    return None if known[1] is None else known[1]()


def forget(optimizer: Optimizer) -> None:
    """Look at an optimizer's parameters again: they were replaced by as many others."""
    _trained.pop(optimizer, None)
