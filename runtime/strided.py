"""Reading and writing a tensor by strides, as if it were dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.operators import operator


@operator("as_strided")
def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(x.contiguous(), size, stride, offset)


@operator("as_strided_scatter")
def as_strided_scatter(
    x: Tensor, piece: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    return torch.as_strided_scatter(x.contiguous(), piece, size, stride, offset)
