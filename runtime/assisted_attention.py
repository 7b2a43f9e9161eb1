"""Attention with dropout: the ranks must agree on what is dropped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.runtime.assisted_dropout import apply_dropout
from autopar.runtime.operators import operator
from autopar.runtime.splits import Split


@operator("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    split: Split = (),
) -> Tensor:
    """`aten.scaled_dot_product_attention`, written out, with dropout of the probabilities.

    query `[*, h, q, k]`, key `[*, h, s, k]`, value `[*, h, s, v]` -> `[*, h, q, v]`; batch,
    heads and (where not causal) queries may be this rank's block.
    """
    if enable_gqa and query.dim() > 2:
        repeat = query.shape[-3] // max(1, key.shape[-3])
        key, value = (x.repeat_interleave(repeat, -3) for x in (key, value))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    kept = apply_dropout(_softmax(scores), _factors(scores.dim()), dropout_p, split)
    return kept @ value


def _softmax(scores: Tensor) -> Tensor:
    """Softmax of each row; a row that is masked out altogether gives zeros, not NaN."""
    return torch.softmax(scores, -1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)


def _factors(rank: int) -> list[str]:
    """The factors of the probabilities `[*, h, q, s]`, as the rule names them."""
    batch = [f"b{d}" for d in range(max(0, rank - 3))]
    return [*batch, *(["h r"] if rank > 2 else []), "q", ""]
