"""Ranges and identity matrices of which a rank makes its own block.

The whole tensor is made and cut. These are small (positions, frequencies), and cutting gives bit
for bit what one device gives, whatever the step and the rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.rules.creation import RANGES
from autopar.runtime.operators import operator
from autopar.runtime.splits import Split, part_of, star_names


def _register(name: str, overload: str) -> None:
    aten = getattr(getattr(torch.ops.aten, name), overload)

    @operator(f"{name}_{overload}")
    def block(*args: Any, split: Split, **kwargs: Any) -> Tensor:
        whole = aten(*args, **kwargs)
        for d, factor in enumerate(star_names(whole.dim())):
            whole = whole.narrow(d, *part_of(split, factor, whole.shape[d]))
        return whole.clone(memory_format=torch.contiguous_format)


for _range in RANGES:
    _register(*_range.split("."))
