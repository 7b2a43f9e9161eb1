"""In which type sums are kept."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which torch sums numbers of `dtype`: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
