"""Extremes over dimensions that are split over ranks.

Every rank finds the extreme of its block, the ranks compare. Results are complete on every rank;
so is the gradient that comes back, of which each rank takes what belongs to its block.

Values are compared after gathering them, not by a max-reduction, because torch's extremes let
NaN win and reductions over ranks need not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.ir.layout import INVARIANT
from autopar.runtime.extreme import extreme
from autopar.runtime.groups import Group
from autopar.runtime.operators import operator
from autopar.runtime.precision import accumulation_dtype
from autopar.runtime.splits import (
    Split,
    group_of,
    groups_of,
    part_of,
    reduce_plain,
    sum_over,
)

Dims = int | Sequence[int] | None
Extreme = Literal["amax", "amin"]


def _listed(x: Tensor, dim: Dims) -> list[int]:
    """The dimensions, counted from the front; none given are all."""
    if dim is None or dim == [] or dim == ():
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]


class _Extreme(torch.autograd.Function):
    """The extreme over dimensions; its gradient is shared out evenly among ties."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: list[int], keepdim: bool, name: Extreme, groups: list[Group]
    ) -> Tensor:
        best = extreme(x, dims, name)
        for group in groups:
            best = extreme(group.all_gather(best, dims[0]), dims[:1], name)
        ctx.save_for_backward(x, best)
        ctx.call = dims, keepdim, groups
        return best if keepdim else best.squeeze(dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, best = ctx.saved_tensors
        dims, keepdim, groups = ctx.call
        if not keepdim:
            for d in sorted(dims):
                grad = grad.unsqueeze(d)
        ties = x == best
        count = ties.sum(dims, keepdim=True)
        for group in groups:
            count = group.all_reduce(count)
        return ties * (grad / count), None, None, None, None


def _extreme(x: Tensor, dim: Dims, keepdim: bool, name: Extreme, split: Split) -> Tensor:
    return _Extreme.apply(x, _listed(x, dim), keepdim, name, list(groups_of(split, "r")))


def _register_extreme(name: Literal["max", "min"]) -> None:
    over: Extreme = "amax" if name == "max" else "amin"

    @operator(f"a{name}_default")
    def over_dims(x: Tensor, dim: Dims = (), keepdim: bool = False, *, split: Split) -> Tensor:
        return _extreme(x, dim, keepdim, over, split)

    @operator(f"{name}_default")
    def over_all(x: Tensor, *, split: Split) -> Tensor:
        return _extreme(x, None, False, over, split)

    @operator(f"{name}_dim")
    def with_index(
        x: Tensor, dim: int, keepdim: bool = False, *, split: Split
    ) -> tuple[Tensor, Tensor]:
        dim %= x.dim()
        start, _ = part_of(split, f"r{dim}", 0)
        value, index = _Indexed.apply(x, dim, name, group_of(split, f"r{dim}"), start)
        return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))

    @operator(f"arg{name}_default")
    def index_only(
        x: Tensor, dim: int | None = None, keepdim: bool = False, *, split: Split
    ) -> Tensor:
        # Only a tensor of one dimension is split without `dim`; its flat index is the index.
        d = 0 if dim is None else dim % x.dim()
        start, _ = part_of(split, f"r{d}", 0)
        index = _Indexed.apply(x.detach(), d, name, group_of(split, f"r{d}"), start)[1]
        return index if keepdim else index.squeeze(d)


for _name in ("max", "min"):
    _register_extreme(_name)


@operator("aminmax_default")
def aminmax(
    x: Tensor, *, dim: int | None = None, keepdim: bool = False, split: Split
) -> tuple[Tensor, Tensor]:
    """`aten.aminmax`."""
    return _extreme(x, dim, keepdim, "amin", split), _extreme(x, dim, keepdim, "amax", split)


class _Indexed(torch.autograd.Function):
    """The extreme along one dimension (kept) and its index; the gradient goes to that entry."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, name: str, group: Group, start: int
    ) -> tuple[Tensor, Tensor]:
        """`start` is where this rank's block begins."""
        pick = getattr(torch, name)
        if x.shape[dim]:
            value, index = pick(x, dim, keepdim=True)
        else:
            # It loses, or ties with an entry of an earlier rank: the first rank has some.
            value = extreme(x, [dim], "amax" if name == "max" else "amin")
            index = torch.zeros_like(value, dtype=torch.int64)
        values = group.all_gather(value, dim)
        indices = group.all_gather(index + start, dim)
        # Of equal values the first wins, as it does within one tensor.
        value, rank = pick(values, dim, keepdim=True)
        index = indices.gather(dim, rank)
        ctx.save_for_backward(index)
        ctx.call = dim, start, x.shape
        ctx.mark_non_differentiable(index)
        return value, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        dim, start, shape = ctx.call
        local = index - start
        mine = (local >= 0) & (local < shape[dim])
        zeros = grad.new_zeros(shape)
        if not shape[dim]:
            return zeros, None, None, None, None
        return zeros.scatter(dim, local.where(mine, 0), grad * mine), None, None, None, None


@operator("logsumexp_default")
def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False, *, split: Split) -> Tensor:
    """`aten.logsumexp`."""
    dims = _listed(x, dim)
    z = x.to(accumulation_dtype(x.dtype))
    top = reduce_plain(extreme(z, dims, "amax"), split, "r", op="max")
    top = top.masked_fill(top.isinf(), 0)
    total = sum_over((z - top).exp().sum(dims, keepdim=True), split, "r", to=INVARIANT)
    y = (total.log() + top).to(x.dtype)
    return y if keepdim else y.squeeze(dims)


def _register_logical(name: str, op: str) -> None:
    local: Callable[..., Tensor] = getattr(torch, name)

    def whole(x: Tensor, split: Split) -> Tensor:
        # As numbers: not every transport reduces booleans. (For uint8 torch answers in uint8.)
        return reduce_plain(x.to(torch.uint8), split, "r", op=op).to(x.dtype)

    @operator(f"{name}_default")
    def over_all(x: Tensor, *, split: Split) -> Tensor:
        return whole(local(x), split)

    @operator(f"{name}_dim")
    def over_dim(x: Tensor, dim: int, keepdim: bool = False, *, split: Split) -> Tensor:
        return whole(local(x, dim, keepdim=keepdim), split)

    @operator(f"{name}_dims")
    def over_dims(
        x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, split: Split
    ) -> Tensor:
        return whole(local(x, _listed(x, dim), keepdim=keepdim), split)


for _name, _op in (("any", "max"), ("all", "min")):
    _register_logical(_name, _op)
