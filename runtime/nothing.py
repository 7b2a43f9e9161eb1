"""What an operator makes of pieces in which there is nothing.

Where a dimension has fewer elements than there are ranks, the last ranks hold empty pieces. Not
every operator of PyTorch takes them, so it is not called: its results are empty, and so is what
its operands get back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: For each result its shape, its dtype, and whether a gradient flows back from it.
Results = tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Results, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        made = tuple(
            torch.zeros(shape, dtype=dtype, device=operands[0].device)
            for shape, dtype, _ in results
        )
        plain = [y for y, (_, _, grad) in zip(made, results, strict=True) if not grad]
        ctx.mark_non_differentiable(*plain)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.zeros_like(x) if needed else None for x, needed in wanted)


def nothing(results: Results, *operands: Tensor) -> tuple[Tensor, ...]:
    """The results of a call of which some are empty, and gradients of zero for its operands."""
    return _Nothing.apply(results, *operands)
