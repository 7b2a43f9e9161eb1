"""Functions that are traced as something else than what PyTorch makes of them.

The CTC loss allocates by the longest target, a number out of a tensor, so export cannot run it,
although its result is one number (or one for each sample). It becomes a call that stays whole.

Bags of an equal number of rows are a look-up and a reduction, which may be split as PyTorch's own
operator may not: that is told where bags begin by a tensor. So does a shift by a symbol, and a
loop of products over pieces (`trace_grouped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.ir.trace_grouped import GroupedProducts
from autopar.ir.trace_loops import Loops
from autopar.ir.trace_numbers import rolled_by_a_symbol
from autopar.ir.whole import TensorType, Whole, operator_for


class FunctionsReplaced(TorchFunctionMode):
    """Replaces calls of such functions while a model is traced.

    loops:
        whether loops over hit experts are taken apart (`trace_loops`)
    """

    def __init__(self, *, loops: bool = False) -> None:
        super().__init__()
        self._grouped = GroupedProducts()
        self._loops = Loops() if loops else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.ctc_loss:
            return _ctc(*args, **kwargs)
        replaced = _REPLACED.get(func)
        made = None if replaced is None else replaced(*args, **kwargs)
        if made is None:
            made = self._grouped.replaced(func, args, kwargs)
        if made is None:
            if self._loops is None:
                made = func(*args, **kwargs)
            else:
                made = self._loops.call(func, args, kwargs)
            self._grouped.look(func, args, kwargs, made)
        return made

    def returned(self, output: Any) -> None:
        """Look at what the model returns."""
        if self._loops is not None:
            self._loops.refuse_escapes(output)


@dataclass(frozen=True)
class _CtcRecipe:
    blank: int
    reduction: str
    zero_infinity: bool

    def __call__(self, log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        inputs, outputs = lengths
        return F.ctc_loss(
            log_probs, targets, inputs, outputs, self.blank, self.reduction, self.zero_infinity
        )


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    lengths = [
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.long, device=targets.device)
        for x in (input_lengths, target_lengths)
    ]
    samples = tuple(log_probs.shape[1:-1]) if reduction == "none" else ()
    recipe = _CtcRecipe(blank, reduction, zero_infinity)
    result = TensorType(samples, log_probs.dtype, True)
    whole = Whole(recipe, (result,), needs_data=True, what="ctc_loss")
    run = operator_for("ctc_loss", repr(recipe) + repr(result), None, whole)
    made: Tensor = run([log_probs, targets, *lengths])
    return made


def _bags(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """`embedding_bag` of a matrix of indices, one bag in each row; None for any other."""
    if input.dim() != 2 or max_norm is not None or sparse or scale_grad_by_freq:
        return None
    if mode == "max" and padding_idx is not None:
        return None
    rows = F.embedding(input, weight, padding_idx)
    if mode == "max":
        return rows.max(1).values
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    counted = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    total = rows.masked_fill(~counted, 0).sum(1)
    if mode == "sum":
        return total
    return total / counted.sum(1).clamp(min=1).to(total.dtype)


#: Functions with what is traced in their place; that gives None where it does not apply.
_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.embedding_bag: _bags,
    torch.roll: rolled_by_a_symbol,
    Tensor.roll: rolled_by_a_symbol,
}
