"""A dense layer whose weight is stored ``[in, out]``."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.operators import operator


@operator("addmm_nd")
def addmm_nd(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """`bias + x @ w`: bias `[o]`, x `[*, i]`, w `[i, o]` -> `[*, o]`."""
    flat = torch.addmm(bias, x.flatten(0, -2), w)
    return flat.view(*x.shape[:-1], w.shape[-1])
