"""Softmax and its logarithm along a dimension that is split over ranks.

A row is shifted by its largest entry on any rank, so large logits are as safe as on one device.
Half precision is computed in float32, as torch does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.layout import REPLICATE
from autopar.runtime.extreme import extreme
from autopar.runtime.operators import operator
from autopar.runtime.precision import accumulation_dtype
from autopar.runtime.splits import Split, reduce_plain, sum_over


def shifted(x: Tensor, dim: int, split: Split, family: str = "c") -> tuple[Tensor, Tensor]:
    """A row minus its largest entry over all ranks, and that entry (dimension kept, no gradient).

    An infinite entry shifts by zero, so that no ``inf - inf`` arises.
    """
    top = reduce_plain(extreme(x, [dim], "amax"), split, family, op="max")
    top = top.masked_fill(top.isinf(), 0)
    return x - top, top


def _normalised(x: Tensor, dim: int, dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    """The input in the type to compute in, and the type of the result."""
    result = dtype or x.dtype
    if not result.is_floating_point:
        raise TypeError(f"softmax: expected a floating point type, got {result}")
    return x.to(accumulation_dtype(result)), result


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None, split: Split) -> Tensor:
    x, result = _normalised(x, dim, dtype)
    e = shifted(x, dim, split)[0].exp()
    return (e / sum_over(e.sum(dim, keepdim=True), split, "c", to=REPLICATE)).to(result)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None, split: Split) -> Tensor:
    x, result = _normalised(x, dim, dtype)
    z = shifted(x, dim, split)[0]
    total = sum_over(z.exp().sum(dim, keepdim=True), split, "c", to=REPLICATE)
    return (z - total.log()).to(result)


@operator("softmax_int")
def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, *, split: Split = ()) -> Tensor:
    """`aten.softmax.int`; x is this rank's block along `dim`, and so is the result."""
    return _softmax(x, dim, dtype, split)


@operator("log_softmax_int")
def log_softmax(
    x: Tensor, dim: int, dtype: torch.dtype | None = None, *, split: Split = ()
) -> Tensor:
    """`aten.log_softmax.int`; x is this rank's block along `dim`, and so is the result."""
    return _log_softmax(x, dim, dtype, split)


@operator("softmax_default")
def softmax_half_to_float(x: Tensor, dim: int, half_to_float: bool, *, split: Split = ()) -> Tensor:
    """`aten._softmax`: `half_to_float` makes the result float32."""
    return _softmax(x, dim, torch.float32 if half_to_float else None, split)


@operator("log_softmax_default")
def log_softmax_half_to_float(
    x: Tensor, dim: int, half_to_float: bool, *, split: Split = ()
) -> Tensor:
    """`aten._log_softmax`: `half_to_float` makes the result float32."""
    return _log_softmax(x, dim, torch.float32 if half_to_float else None, split)
