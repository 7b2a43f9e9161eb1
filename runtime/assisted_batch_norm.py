"""Batch normalisation in training, with the statistics of the whole batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.runtime.assisted_norm import affine, mean_over
from autopar.runtime.batch_norm import checked_batch_norm
from autopar.runtime.operators import operator
from autopar.runtime.precision import accumulation_dtype
from autopar.runtime.splits import Split, is_split, star_names, whole_size


@operator("batch_norm_train")
def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    *,
    split: Split = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the statistics of the batch; x is `[b, c, *]`, the others `[c]`.

    Returns the result and the new running mean and variance (unbiased, as torch keeps it), which
    are whole along the axes that split the batch or space.
    """
    if x.shape[1] and not (is_split(split, "b") or is_split(split, "s")):
        mean, var = running_mean.clone(), running_var.clone()
        y = checked_batch_norm(x, mean, var, weight, bias, True, momentum, eps)
        return y, mean, var
    y, mean, var, count = _normalise(x, weight, bias, eps, split)
    unbiased = var * (count / (count - 1)) if count > 1 else var * float("nan")
    return y, _blend(running_mean, mean, momentum), _blend(running_var, unbiased, momentum)


@operator("batch_norm")
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: None,
    running_var: None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    split: Split,
) -> Tensor:
    """`aten.batch_norm` in training, without running statistics."""
    return _normalise(x, weight, bias, eps, split)[0]


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, split: Split
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The result, the mean and (biased) variance per channel, and how many numbers they cover."""
    dims = [d for d in range(x.dim()) if d != 1]
    z = x.to(accumulation_dtype(x.dtype))
    mean = mean_over(z, dims, split, "b", "s")
    z = z - mean
    var = mean_over(z.square(), dims, split, "b", "s")
    z = z * torch.rsqrt(var + eps)
    y = affine(z, _per_channel(weight, x), _per_channel(bias, x)).to(x.dtype)
    names = ["b", "c", *star_names(x.dim() - 2, "s")]
    count = math.prod(whole_size(split, names[d], x.shape[d]) for d in dims)
    return y, mean.detach().flatten(), var.detach().flatten(), count


def _per_channel(p: Tensor | None, x: Tensor) -> Tensor | None:
    return None if p is None else p.view(-1, *([1] * (x.dim() - 2)))


def _blend(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    return ((1 - momentum) * running + momentum * new).to(running.dtype)
