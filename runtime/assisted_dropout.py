"""Dropout in its four forms, with masks that the ranks agree on."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from autopar.runtime.groups import current
from autopar.runtime.operators import operator
from autopar.runtime.random import Fill, draw
from autopar.runtime.splits import Split, local_block, star_names

#: The value that a dropped activation of SELU takes.
SELU_FLOOR = 1.7580993408473766


@_disable_dynamo
def keep_mask(
    like: Tensor, shape: tuple[int, ...], factors: list[str], p: float, split: Split
) -> Tensor:
    """Ones with probability `1 - p`, else zeros, in the dtype of `like`.

    `factors` names the factors of each dimension of `shape`, which decide what blocks differ.
    """
    block = local_block(shape, factors, split)
    return draw(
        current(),
        block,
        Fill("bernoulli_", (1 - p,)),
        like.dtype,
        like.device,
    )


def apply_dropout(x: Tensor, factors: list[str], p: float, split: Split) -> Tensor:
    """x with entries dropped, the others scaled up; factors as in `keep_mask`."""
    if p == 1:
        return x * 0
    return x * keep_mask(x, tuple(x.shape), factors, p, split).div_(1 - p)


@operator("dropout")
def dropout(x: Tensor, p: float, train: bool, *, split: Split) -> Tensor:
    """`aten.dropout` in training."""
    return apply_dropout(x, star_names(x.dim()), p, split)


@operator("native_dropout")
def native_dropout(
    x: Tensor, p: float, train: bool | None, *, split: Split
) -> tuple[Tensor, Tensor]:
    """`aten.native_dropout` in training: also the mask of what is kept."""
    if p == 1:
        return x * 0, torch.zeros_like(x, dtype=torch.bool)
    mask = keep_mask(x, tuple(x.shape), star_names(x.dim()), p, split)
    return x * mask * (1 / (1 - p)), mask.bool()


@operator("feature_dropout")
def feature_dropout(x: Tensor, p: float, train: bool, *, split: Split) -> Tensor:
    """`aten.feature_dropout` in training: whole channels `x[b, c]` are dropped."""
    if p == 1:
        return x * 0
    shape = (*x.shape[:2], *([1] * (x.dim() - 2)))
    factors = [*star_names(x.dim())[:2], *([""] * (x.dim() - 2))]
    return x * keep_mask(x, shape, factors, p, split).div_(1 - p)


@operator("alpha_dropout")
def alpha_dropout(x: Tensor, p: float, train: bool, *, split: Split) -> Tensor:
    """`aten.alpha_dropout` in training: keeps the mean and variance of SELU activations."""
    if p == 1:
        return x * 0
    scale = 1 / math.sqrt((SELU_FLOOR**2 * p + 1) * (1 - p))
    mask = keep_mask(x, tuple(x.shape), star_names(x.dim()), p, split)
    shift = (mask - 1) * (SELU_FLOOR * scale) + SELU_FLOOR * scale * p
    return x * (mask * scale) + shift
