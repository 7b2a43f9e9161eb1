"""Products of groups of rows with a matrix each, with the rows or the matrices split over ranks.

`ends` tells where each group ends, of all groups and in all rows. A rank that has some of the rows
clips it to those. One that has some of the matrices turns its rows round so that its own groups
come first, makes those, turns the result back and leaves zeros elsewhere: a term of the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar.runtime.operators import operator
from autopar.runtime.splits import Split, part_of


def _grouped(
    product: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor, split: Split
) -> Tensor:
    rows = x.shape[0]
    first_row, _ = part_of(split, "t", rows)
    ends = (ends - first_row).clamp(0, rows)
    first, count = part_of(split, "e", weight.shape[0])
    if count == ends.shape[0]:
        return product(x, weight, ends)
    starts = torch.cat([ends.new_zeros(1), ends])
    start, stop = starts[first], starts[first + count]
    place = torch.arange(rows, device=x.device)
    turned = (place + start) % rows
    # What a product leaves in rows of no group is undefined, in its backward too.
    mine = (place < stop - start).unsqueeze(-1)
    own_ends = (ends[first : first + count] - start).to(ends.dtype)
    made = product(torch.where(mine, x[turned], 0), weight, own_ends)
    return torch.where(mine, made, 0)[(place - start) % rows]


@operator("grouped_mm")
def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
    *,
    split: Split,
) -> Tensor:
    """`aten._grouped_mm`"""

    def product(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten._grouped_mm(a, w, ends, bias, out_dtype)
        return made

    return _grouped(product, x, weight, offs, split)


@operator("grouped_mm_each")
def grouped_mm_each(x: Tensor, weight: Tensor, ends: Tensor, *, split: Split) -> Tensor:
    """`transformers.grouped_mm_fallback`, one product for each group."""
    return _grouped(torch.ops.transformers.grouped_mm_fallback, x, weight, ends, split)
