"""Losses whose batch or classes are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.layout import INVARIANT
from autopar.ir.rules.loss import ELEMENTWISE, MEAN, NONE, SUM
from autopar.runtime.assisted_softmax import shifted
from autopar.runtime.groups import Landing
from autopar.runtime.operators import begins, operator
from autopar.runtime.precision import accumulation_dtype
from autopar.runtime.splits import (
    Split,
    is_split,
    part_of,
    reduce_plain,
    share_of,
    start_plain_sum,
    sum_over,
    whole_size,
)


@operator("cross_entropy_loss")
def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    split: Split,
    begun: Landing | None = None,
) -> Tensor:
    """`aten.cross_entropy_loss` of a block of the batch (a term, P), of the classes (I), or both.

    logits `[n, c, *]`, target `[n, *]` of whole class ids or `[n, c, *]` of probabilities,
    weight `[c]`. `begun`: what `begin_count` gave.
    """
    if target.is_floating_point():
        # Every sample counts, whatever its class: the mean is over all samples.
        share = share_of(split, "n", "d")
        local = torch.ops.aten.cross_entropy_loss.default(
            logits, target, weight, reduction if share else SUM, ignore_index, label_smoothing
        )
        return local * share if share else local
    dtype = accumulation_dtype(logits.dtype)
    dim = 1 if logits.dim() > 1 else 0
    classes = _Classes(target, weight, ignore_index, dim, logits.shape[dim], split)
    if not is_split(split, "c"):
        count = begun or classes.start_count()
        total = torch.ops.aten.cross_entropy_loss.default(
            logits, target, weight, SUM, ignore_index, label_smoothing
        )
        return (total.to(dtype) / count().to(dtype)).to(logits.dtype)
    x = logits.to(dtype)
    z, _ = shifted(x, dim, split)
    # Per sample: the sum of exponentials, the target's logit and, for smoothing, all logits.
    terms = [z.exp().sum(dim), classes.pick(z)]
    if label_smoothing:
        terms.append((z if weight is None else z * _along(weight, z, dim)).sum(dim))
    total, picked, *everything = sum_over(torch.stack(terms), split, "c", to=INVARIANT).unbind()
    log_total = total.log()
    loss = classes.weights * (log_total - picked)
    if label_smoothing:
        number = whole_size(split, "c", logits.shape[dim])
        smooth = log_total * classes.total_weight() - everything[0]
        share = label_smoothing / number
        loss = (1 - label_smoothing) * loss + share * smooth.where(classes.valid, 0)
    return classes.reduced(loss, reduction, begun).to(logits.dtype)


def _nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *,
    split: Split,
    begun: Landing | None = None,
) -> Tensor:
    """`aten.nll_loss` of log-probabilities `[n, c, *]`, split as a cross entropy may be."""
    dim = 1 if x.dim() > 1 else 0
    classes = _Classes(target, weight, ignore_index, dim, x.shape[dim], split)
    z = x.to(accumulation_dtype(x.dtype))
    picked = sum_over(classes.pick(z), split, "c", to=INVARIANT)
    return classes.reduced(-(classes.weights * picked), reduction, begun).to(x.dtype)


def begin_count(
    target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, split: Split
) -> Landing | None:
    """Start to count what a mean divides by; None where it takes more than the targets."""
    if reduction != MEAN or target.is_floating_point():
        return None
    if weight is not None:
        if is_split(split, "c") or not len(weight):
            return None
        valid = target != ignore_index
        weight = weight.detach().to(accumulation_dtype(weight.dtype))
        return start_plain_sum((weight[target.where(valid, 0)] * valid).sum(), split, "n", "d")
    return start_plain_sum((target != ignore_index).sum(), split, "n", "d")


begins("cross_entropy_loss")(begin_count)
for _name in ("nll_loss", "nll_loss_nd", "nll_loss2d"):
    operator(_name)(_nll_loss)
    begins(_name)(begin_count)


class _Classes:
    """What a loss needs of the targets, of which this rank knows a block of the classes.

    valid:
        which samples count (those whose target is not `ignore_index`)
    weights:
        the weight of each sample, zero for those that do not count
    """

    def __init__(
        self,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        dim: int,
        size: int,
        split: Split,
    ) -> None:
        self.valid = target != ignore_index
        self.weight, self.dim, self.split = weight, dim, split
        start, size = part_of(split, "c", size)
        local = target.where(self.valid, 0) - start
        self.mine = (local >= 0) & (local < size)
        self.local = local.where(self.mine, 0)
        self.weights = self._weights()

    def pick(self, x: Tensor) -> Tensor:
        """The entry of each sample's class, zero where another rank has it (a term)."""
        if not x.shape[self.dim]:
            return x.sum(self.dim)
        rows = x.gather(self.dim, self.local.unsqueeze(self.dim)).squeeze(self.dim)
        return rows.where(self.mine, 0)

    def _weights(self) -> Tensor:
        if self.weight is None:
            return self.valid
        weight = self.weight.detach().to(accumulation_dtype(self.weight.dtype))
        rows = weight[self.local] if len(weight) else weight.new_zeros(self.local.shape)
        term = rows * self.mine
        return reduce_plain(term, self.split, "c", op="sum") * self.valid

    def total_weight(self) -> Tensor | float:
        """The sum of the weights of all classes, or 1 per class where there are none."""
        if self.weight is None:
            return float(self._number_of_classes())
        return reduce_plain(self.weight.sum(), self.split, "c", op="sum")

    def _number_of_classes(self) -> int:
        return next(whole for name, _, whole in self.split if name == "c")

    def start_count(self) -> Landing:
        """What a mean divides by: the weights of all samples on all ranks. Wait for it later."""
        return start_plain_sum(self.weights.sum(), self.split, "n", "d")

    def reduced(self, loss: Tensor, reduction: int, begun: Landing | None) -> Tensor:
        loss = loss.where(self.valid, 0)
        if reduction == NONE:
            return loss
        if reduction == MEAN:
            count = begun or self.start_count()
            return loss.sum() / count()
        return loss.sum()


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    """Class weights with the rank of the logits."""
    return weight.view([-1 if d == dim else 1 for d in range(x.dim())])


def _register_mean_loss(name: str) -> None:
    aten = getattr(torch.ops.aten, name).default
    position = [a.name for a in aten._schema.arguments].index("reduction")

    @operator(name)
    def term(*args: Any, split: Split, **kwargs: Any) -> Tensor:
        """The mean of this rank's block, scaled to be a term of the mean of all."""
        share = share_of(split, "b")
        if share:
            return aten(*args, **kwargs) * share
        # The mean of nothing is not a number, the sum is 0.
        if len(args) > position:
            args = (*args[:position], SUM, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "reduction": SUM}
        return aten(*args, **kwargs)


for _name in ELEMENTWISE:
    _register_mean_loss(_name)
