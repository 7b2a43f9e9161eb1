"""Callables for observing the operators of a traced graph, on one device.

The planner does not import the runtime. The compiler's own operators that stand in traced graphs
come down to a few of torch's, which do for seeing what they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.errors import GraphError
from autopar.ir.trace_grad import has_overload, overload


def _addmm_nd(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), w)
    return flat.view(*x.shape[:-1], w.shape[-1])


def _batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = running_mean.clone(), running_var.clone()
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    return y, mean, var


def _constrain(x: Tensor) -> Tensor:
    return x


def _checked(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _as_strided(x: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    return torch.as_strided(x.contiguous(), size, stride, offset)


def _as_strided_scatter(
    x: Tensor, piece: Tensor, size: list[int], stride: list[int], offset: int
) -> Tensor:
    return torch.as_strided_scatter(x.contiguous(), piece, size, stride, offset)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "autopar.as_strided": _as_strided,
    "autopar.as_strided_scatter": _as_strided_scatter,
    "autopar.addmm_nd": _addmm_nd,
    "autopar.batch_norm_train": _batch_norm_train,
    "autopar.checked": _checked,
    "autopar.constrain": _constrain,
}


def callable_of(op: str) -> Callable[..., Any]:
    """What to run to see what an operator keeps.

    Raises GraphError for an operator that is neither torch's nor has a stand-in.
    """
    if op in _STAND_INS:
        return _STAND_INS[op]
    if not op.startswith("autopar.") and has_overload(op):
        found: Callable[..., Any] = overload(op)
        return found
    raise GraphError(f"operator {op!r}: it cannot be observed, it is neither torch's nor known")
