"""Means and variances over dimensions that are split over ranks.

A mean is returned as this rank's term. So is a variance: given the mean of the whole dimension it
is a sum of squared deviations. The gradient through that mean is zero (the deviations sum to
zero), so the mean is shared without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.layout import INVARIANT
from autopar.runtime.assisted_norm import mean_term
from autopar.runtime.operators import operator
from autopar.runtime.precision import accumulation_dtype
from autopar.runtime.splits import Split, reduce_plain, share_of, sum_over, whole_size


@operator("mean")
def mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    split: Split,
) -> Tensor:
    """`aten.mean` (with or without `dim`): this rank's term of it."""
    return mean_term(x, _listed(x, dim), keepdim, share_of(split, "r"), dtype)


def _listed(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions that a call names; none are all."""
    return [dim] if isinstance(dim, int) else list(dim or range(x.dim()))


def _central(
    x: Tensor, dim: int | Sequence[int] | None, correction: float, keepdim: bool, split: Split
) -> tuple[Tensor, Tensor]:
    """This rank's terms of the variance and of the mean."""
    dims = _listed(x, dim)
    z = x.to(accumulation_dtype(x.dtype))
    term = mean_term(z, dims, True, share_of(split, "r"))
    whole = reduce_plain(term, split, "r", op="sum")
    count = math.prod(whole_size(split, f"r{d % x.dim()}", x.shape[d]) for d in dims)
    # As torch does, fewer numbers than the correction divide by zero, not by less.
    var = (z - whole).square().sum(dims, keepdim=keepdim) / max(0.0, count - correction)
    return var, term if keepdim else term.squeeze(dims)


def _var(x: Tensor, *call: Any) -> Tensor:
    return _central(x, *call)[0].to(x.dtype)


def _std(x: Tensor, *call: Any) -> Tensor:
    split = call[-1]
    return _root(sum_over(_central(x, *call)[0], split, "r", to=INVARIANT)).to(x.dtype)


def _var_mean(x: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    var, term = _central(x, *call)
    return var.to(x.dtype), term.to(x.dtype)


def _std_mean(x: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    split = call[-1]
    var, term = _central(x, *call)
    std = _root(sum_over(var, split, "r", to=INVARIANT))
    return std.to(x.dtype), sum_over(term, split, "r", to=INVARIANT).to(x.dtype)


def _root(var: Tensor) -> Tensor:
    """The square root, with a gradient of zero (not infinity) at zero, as `torch.std` has."""
    flat = var == 0
    return var.masked_fill(flat, 1).sqrt().masked_fill(flat, 0)


def _register(name: str, moments: Callable[..., Any]) -> None:
    """The three overloads, which spell the same thing."""

    @operator(f"{name}_default")
    def default(x: Tensor, unbiased: bool = True, *, split: Split) -> Any:
        return moments(x, None, float(unbiased), False, split)

    @operator(f"{name}_dim")
    def over_dims(
        x: Tensor,
        dim: Sequence[int] | None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        split: Split,
    ) -> Any:
        return moments(x, dim, float(unbiased), keepdim, split)

    @operator(f"{name}_correction")
    def corrected(
        x: Tensor,
        dim: Sequence[int] | None = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
        split: Split,
    ) -> Any:
        return moments(x, dim, 1.0 if correction is None else float(correction), keepdim, split)


for _name, _moments in (
    ("var", _var),
    ("std", _std),
    ("var_mean", _var_mean),
    ("std_mean", _std_mean),
):
    _register(_name, _moments)
