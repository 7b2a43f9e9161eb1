"""The largest and the smallest entry, with an answer for no entries at all."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def extreme(x: Tensor, dims: list[int], name: Literal["amax", "amin"]) -> Tensor:
    """`torch.amax` or `torch.amin` over dimensions, which are kept with size 1.

    Where there is nothing, because another rank has all of it, the answer is the value that never
    wins a comparison.
    """
    if all(x.shape[d] for d in dims):
        found: Tensor = getattr(torch, name)(x, dims, keepdim=True)
        return found
    shape = [1 if d in {k % x.dim() for k in dims} else n for d, n in enumerate(x.shape)]
    return x.new_full(shape, _loser(x.dtype, name))


def _loser(dtype: torch.dtype, name: str) -> float | int | bool:
    """What loses to every entry: the lowest value for a maximum, the highest for a minimum."""
    if dtype == torch.bool:
        return name == "amin"
    if dtype.is_floating_point:
        return float("-inf" if name == "amax" else "inf")
    info = torch.iinfo(dtype)
    return info.min if name == "amax" else info.max
