"""The ten reshard steps, differentiable.

A step changes the state of a tensor along some mesh axes (`autopar.ir.layout` explains the
states). Its gradient goes the other way by a step again, because R and P are each other's dual
while S and I are their own::

    step             forward              backward         which does
    all_reduce to I  P -> I    sum        to_replicate     nothing
    all_reduce to R  P -> R    sum        all_reduce to R  all-reduce
    all_gather to I  S -> I    gather     slice of I       slice
    all_gather to R  S -> R    gather     reduce_scatter   reduce-scatter
    reduce_scatter   P -> S    scatter    all_gather to R  all-gather
    all_to_all       S -> S    exchange   all_to_all       all-to-all back
    recut            S -> S    exchange   recut            exchange back
    slice of I       I -> S    slice      all_gather to I  all-gather
    slice of R       R -> S    slice      pad              zero-pad
    pad              S -> P    zero-pad   slice of R       slice
    mask of I        I -> P    mask       to_invariant     nothing
    mask of R        R -> P    mask       mask of R        mask
    to_replicate     I -> R    nothing    all_reduce to I  all-reduce
    to_invariant     R -> I    nothing    mask of I        mask

So one autograd function serves all of them, and gradients of gradients follow. A step remembers
its group: backward needs no active context.

A step may be told the dtype in which its backward sums what comes back; autograd then gives the
gradient the dtype of the tensor again.

Where the pieces of a group are uneven, a step is told their sizes along the dimension that it
gathers, cuts or moves (`autopar.ir.local` works them out); without sizes they are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir.layout import INVARIANT, REPLICATE
from autopar.runtime.groups import Group, Sizes, current
from autopar.runtime.operators import operator


@dataclass(frozen=True)
class Step(ABC):
    """What one rank does with its piece, over one group of more than one rank."""

    group: Group
    reduced: torch.dtype | None = field(default=None, kw_only=True)

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The new piece; knows nothing of gradients."""

    @property
    @abstractmethod
    def dual(self) -> Step:
        """The step that takes the gradient back."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return x
        if x.requires_grad and torch.is_grad_enabled():
            return _Differentiable.apply(x, self)
        return self.run(x)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Step) -> Tensor:
        ctx.step = step
        return step.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        step: Step = ctx.step
        return step.dual(grad if step.reduced is None else grad.to(step.reduced)), None


@dataclass(frozen=True)
class AllReduce(Step):
    to: str

    def run(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)

    @property
    def dual(self) -> Step:
        return ToReplicate(self.group) if self.to == INVARIANT else self


@dataclass(frozen=True)
class AllGather(Step):
    dim: int
    to: str
    sizes: Sizes = None

    def run(self, x: Tensor) -> Tensor:
        return self.group.all_gather(x, self.dim, self.sizes)

    @property
    def dual(self) -> Step:
        if self.to == INVARIANT:
            return Slice(self.group, self.dim, INVARIANT, self.sizes)
        return ReduceScatter(self.group, self.dim, self.sizes)


@dataclass(frozen=True)
class ReduceScatter(Step):
    dim: int
    sizes: Sizes = None

    def run(self, x: Tensor) -> Tensor:
        return self.group.reduce_scatter(x, self.dim, self.sizes)

    @property
    def dual(self) -> Step:
        return AllGather(self.group, self.dim, REPLICATE, self.sizes)


@dataclass(frozen=True)
class AllToAll(Step):
    src: int
    dst: int
    src_sizes: Sizes = None
    dst_sizes: Sizes = None

    def run(self, x: Tensor) -> Tensor:
        return self.group.all_to_all(x, self.dst, self.src, self.dst_sizes, self.src_sizes)

    @property
    def dual(self) -> Step:
        return AllToAll(self.group, self.dst, self.src, self.dst_sizes, self.src_sizes)


@dataclass(frozen=True)
class Recut(Step):
    dim: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        return self.group.recut(x, self.dim, self.before, self.after)

    @property
    def dual(self) -> Step:
        return Recut(self.group, self.dim, self.after, self.before)


@dataclass(frozen=True)
class Slice(Step):
    dim: int
    origin: str
    sizes: Sizes = None

    def run(self, x: Tensor) -> Tensor:
        # A copy: a view would keep the whole tensor alive for as long as its block is.
        block = self.group.block(x, self.dim, self.sizes)
        return block.clone(memory_format=torch.contiguous_format)

    @property
    def dual(self) -> Step:
        if self.origin == INVARIANT:
            return AllGather(self.group, self.dim, INVARIANT, self.sizes)
        return Pad(self.group, self.dim, self.sizes)


@dataclass(frozen=True)
class Pad(Step):
    dim: int
    sizes: Sizes = None

    def run(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = sum(self.sizes) if self.sizes else shape[self.dim] * self.group.size
        whole = x.new_zeros(shape)
        self.group.block(whole, self.dim, self.sizes).copy_(x)
        return whole

    @property
    def dual(self) -> Step:
        return Slice(self.group, self.dim, REPLICATE, self.sizes)


@dataclass(frozen=True)
class Mask(Step):
    origin: str

    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x) if self.group.is_first else torch.zeros_like(x)

    @property
    def dual(self) -> Step:
        return ToInvariant(self.group) if self.origin == INVARIANT else self


@dataclass(frozen=True)
class ToReplicate(Step):
    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    @property
    def dual(self) -> Step:
        return AllReduce(self.group, INVARIANT)


@dataclass(frozen=True)
class ToInvariant(Step):
    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    @property
    def dual(self) -> Step:
        return Mask(self.group, INVARIANT)


@operator("all_reduce")
def all_reduce(
    x: Tensor, axes: tuple[str, ...], to: str, *, reduced: torch.dtype | None = None
) -> Tensor:
    """P -> `to` ("I" or "R"): the sum over the ranks along the axes."""
    return AllReduce(current().group(axes), to, reduced=reduced)(x)


@operator("all_gather")
def all_gather(
    x: Tensor,
    axes: tuple[str, ...],
    dim: int,
    to: str,
    *,
    sizes: Sizes = None,
    reduced: torch.dtype | None = None,
) -> Tensor:
    """S(dim) -> `to` ("I" or "R"); the axes are the minor-most ones of the dimension."""
    return AllGather(current().group(axes), dim, to, sizes, reduced=reduced)(x)


@operator("reduce_scatter")
def reduce_scatter(x: Tensor, axes: tuple[str, ...], dim: int, *, sizes: Sizes = None) -> Tensor:
    """P -> S(dim): this rank's block of the sum; the axes become the dimension's minor-most."""
    return ReduceScatter(current().group(axes), dim, sizes)(x)


@operator("all_to_all")
def all_to_all(
    x: Tensor,
    axes: tuple[str, ...],
    src: int,
    dst: int,
    *,
    src_sizes: Sizes = None,
    dst_sizes: Sizes = None,
) -> Tensor:
    """S(src) -> S(dst): the axes leave one dimension, minor-most, and join the other so.

    Sizes are given for both dimensions or for none.
    """
    return AllToAll(current().group(axes), src, dst, src_sizes, dst_sizes)(x)


@operator("recut")
def recut(
    x: Tensor,
    axes: tuple[str, ...],
    dim: int,
    *,
    before: tuple[int, ...],
    after: tuple[int, ...],
) -> Tensor:
    """S(dim) -> S(dim) in pieces of other sizes; the axes are all those of the dimension."""
    return Recut(current().group(axes), dim, before, after)(x)


@operator("slice")
def slice_(
    x: Tensor, axes: tuple[str, ...], dim: int, origin: str, *, sizes: Sizes = None
) -> Tensor:
    """`origin` ("I" or "R") -> S(dim): this rank's block."""
    return Slice(current().group(axes), dim, origin, sizes)(x)


@operator("pad")
def pad(x: Tensor, axes: tuple[str, ...], dim: int, *, sizes: Sizes = None) -> Tensor:
    """S(dim) -> P: the block at its place in the whole tensor, zeros around it."""
    return Pad(current().group(axes), dim, sizes)(x)


@operator("mask")
def mask(x: Tensor, axes: tuple[str, ...], origin: str) -> Tensor:
    """`origin` ("I" or "R") -> P: the first rank of the group keeps it, others have zeros."""
    return Mask(current().group(axes), origin)(x)


@operator("to_replicate")
def to_replicate(x: Tensor, axes: tuple[str, ...], *, reduced: torch.dtype | None = None) -> Tensor:
    """I -> R: the value stays; gradients, terms from here on, are summed over the ranks."""
    return ToReplicate(current().group(axes), reduced=reduced)(x)


@operator("to_invariant")
def to_invariant(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """R -> I: the value stays; the first rank takes the gradient as the only term."""
    return ToInvariant(current().group(axes))(x)
