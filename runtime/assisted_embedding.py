"""Embedding look-up with the vocabulary split."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.operators import operator
from autopar.runtime.splits import Split, part_of


@operator("embedding")
def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    split: Split = (),
) -> Tensor:
    """The rows of this rank's block of the vocabulary, zeros for ids of other blocks (P).

    weight `[v / n, d]`, indices `[*]` of whole ids -> `[*, d]`.
    """
    start, size = part_of(split, "v", weight.shape[0])
    if not size:
        return weight.sum() + weight.new_zeros((*indices.shape, weight.shape[1]))
    local = indices - start
    mine = (local >= 0) & (local < size)
    # As in `torch.embedding`, a padding index that names no row means none.
    padding = padding_idx - start if start <= padding_idx < start + size else -1
    rows = torch.ops.aten.embedding.default(
        weight, local.where(mine, 0), padding, scale_grad_by_freq, sparse
    )
    return rows * mine.unsqueeze(-1)
