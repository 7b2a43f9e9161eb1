"""Layer, RMS and group normalisation of rows that are split over ranks.

Statistics are computed in float32 for half precision inputs, the variance from deviations (not
from the mean of squares, which cancels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ir.layout import REPLICATE
from autopar.runtime.nothing import nothing
from autopar.runtime.operators import operator
from autopar.runtime.precision import accumulation_dtype
from autopar.runtime.splits import Split, part_of, share_of, sum_over


def mean_over(x: Tensor, dims: Sequence[int], split: Split, *families: str) -> Tensor:
    """The mean over local dimensions and over the ranks that split them (dimensions kept, R)."""
    local = mean_term(x, list(dims), True, share_of(split, *families))
    return sum_over(local, split, *families, to=REPLICATE)


def mean_term(
    x: Tensor, dims: list[int], keepdim: bool, share: float, dtype: torch.dtype | None = None
) -> Tensor:
    """What this rank adds to the mean over dimensions of which it has a share; 0 if it has none."""
    if share == 0:
        return x.sum(dims, keepdim=keepdim, dtype=dtype)
    return x.mean(dims, keepdim=keepdim, dtype=dtype) * share


@operator("layer_norm")
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    split: Split = (),
) -> Tensor:
    """`aten.layer_norm` of a block of the normalised dimensions.

    `normalized_shape` is the whole one and only its length is used.
    """
    dims = range(-len(normalized_shape), 0)
    z = x.to(accumulation_dtype(x.dtype))
    z = z - mean_over(z, dims, split, "d")
    z = z * torch.rsqrt(mean_over(z.square(), dims, split, "d") + eps)
    return affine(z, weight, bias).to(x.dtype)


@operator("rms_norm")
def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    split: Split = (),
) -> Tensor:
    """`aten.rms_norm` of a block of the normalised dimensions."""
    dims = range(-len(normalized_shape), 0)
    z = x.to(accumulation_dtype(x.dtype))
    floor = torch.finfo(z.dtype).eps if eps is None else eps
    z = z * torch.rsqrt(mean_over(z.square(), dims, split, "d") + floor)
    return affine(z, weight, None).to(x.dtype)


@operator("group_norm")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    split: Split = (),
) -> Tensor:
    """`aten.group_norm` of whole groups, this rank's share of them."""
    _, groups = part_of(split, "g", num_groups)
    if not groups:
        return nothing(((tuple(x.shape), x.dtype, x.requires_grad),), *_given(x, weight, bias))[0]
    return torch.ops.aten.group_norm.default(x, groups, weight, bias, eps, cudnn_enabled)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def affine(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = z if weight is None else z * weight
    return z if bias is None else z + bias
