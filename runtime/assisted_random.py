"""Tensors of random numbers, each rank making its own block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.groups import current
from autopar.runtime.operators import operator
from autopar.runtime.random import Fill, draw, next_generator
from autopar.runtime.splits import Split, local_block, star_names


def _block(
    shape: Sequence[int], fill: Fill, dtype: torch.dtype, device: Any, split: Split
) -> Tensor:
    place = local_block(tuple(shape), star_names(len(shape)), split)
    return draw(current(), place, fill, dtype, torch.device(device or "cpu"))


def _sized(
    shape: Sequence[int], fill: Fill, options: dict[str, Any], split: Split, default: torch.dtype
) -> Tensor:
    dtype = options.get("dtype") or default
    return _block(shape, fill, dtype, options.get("device"), split)


def _like(x: Tensor, fill: Fill, options: dict[str, Any], split: Split) -> Tensor:
    dtype = options.get("dtype") or x.dtype
    return _block(x.shape, fill, dtype, options.get("device") or x.device, split)


class _Drawn(torch.autograd.Function):
    """What was drawn, as a result of `x`: its gradient is zero, not absent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drawn: Tensor) -> Tensor:
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros_like(grad), None


def _from(x: Tensor, drawn: Tensor) -> Tensor:
    return _Drawn.apply(x, drawn)  # type: ignore[no-any-return]


def _uniform(low: float = 0.0, high: float = 1.0) -> Fill:
    return Fill("uniform_", (low, high))


def _normal(mean: float = 0.0, std: float = 1.0) -> Fill:
    return Fill("normal_", (mean, std))


def _integers(low: int, high: int) -> Fill:
    return Fill("random_", (low, high))


@operator("rand_default")
def rand(size: Sequence[int], *, split: Split, **options: Any) -> Tensor:
    """`aten.rand`; size is the local one."""
    return _sized(size, _uniform(), options, split, torch.get_default_dtype())


@operator("randn_default")
def randn(size: Sequence[int], *, split: Split, **options: Any) -> Tensor:
    """`aten.randn`; size is the local one."""
    return _sized(size, _normal(), options, split, torch.get_default_dtype())


@operator("normal_float_float")
def normal(mean: float, std: float, size: Sequence[int], *, split: Split, **options: Any) -> Tensor:
    """`aten.normal.float_float`; size is the local one."""
    return _sized(size, _normal(mean, std), options, split, torch.get_default_dtype())


@operator("randint_default")
def randint(high: int, size: Sequence[int], *, split: Split, **options: Any) -> Tensor:
    """`aten.randint`; size is the local one."""
    return _sized(size, _integers(0, high), options, split, torch.int64)


@operator("randint_low")
def randint_low(
    low: int, high: int, size: Sequence[int], *, split: Split, **options: Any
) -> Tensor:
    """`aten.randint.low`; size is the local one."""
    return _sized(size, _integers(low, high), options, split, torch.int64)


@operator("rand_like_default")
def rand_like(x: Tensor, *, split: Split, **options: Any) -> Tensor:
    """`aten.rand_like`."""
    return _like(x, _uniform(), options, split)


@operator("randn_like_default")
def randn_like(x: Tensor, *, split: Split, **options: Any) -> Tensor:
    """`aten.randn_like`."""
    return _like(x, _normal(), options, split)


@operator("randint_like_default")
def randint_like(x: Tensor, high: int, *, split: Split, **options: Any) -> Tensor:
    """`aten.randint_like`."""
    return _like(x, _integers(0, high), options, split)


@operator("randint_like_low_dtype")
def randint_like_low(x: Tensor, low: int, high: int, *, split: Split, **options: Any) -> Tensor:
    """`aten.randint_like.low_dtype`."""
    return _like(x, _integers(low, high), options, split)


# The functional forms of `x.uniform_()` and its kin: of x only shape, dtype and device matter.


@operator("uniform_default")
def uniform(x: Tensor, low: float = 0.0, high: float = 1.0, *, split: Split) -> Tensor:
    """`aten.uniform`."""
    return _from(x, _like(x, _uniform(low, high), {}, split))


@operator("normal_functional_default")
def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0, *, split: Split) -> Tensor:
    """`aten.normal_functional`."""
    return _from(x, _like(x, _normal(mean, std), {}, split))


@operator("exponential_default")
def exponential(x: Tensor, lambd: float = 1.0, *, split: Split) -> Tensor:
    """`aten.exponential`."""
    return _from(x, _like(x, Fill("exponential_", (lambd,)), {}, split))


@operator("bernoulli_p")
def bernoulli_p(x: Tensor, p: float, *, split: Split) -> Tensor:
    """`aten.bernoulli.p`."""
    return _from(x, _like(x, Fill("bernoulli_", (p,)), {}, split))


@operator("bernoulli_default")
def bernoulli(p: Tensor, *, split: Split) -> Tensor:
    """`aten.bernoulli`: ones with the probabilities p."""
    block = local_block(tuple(p.shape), star_names(p.dim()), split)
    probabilities = p.detach()

    def fill(x: Tensor, generator: torch.Generator) -> Tensor:
        # Where the whole tensor is drawn, what the other ranks' probabilities are does not
        # matter: every entry takes one random number.
        whole = x.shape != probabilities.shape
        q = block.put(probabilities, 0.5) if whole else probabilities
        return torch.bernoulli(q, generator=generator)

    return _from(p, draw(current(), block, fill, p.dtype, p.device))


# Operators that nothing splits, but whose ranks must draw the same.


@operator("randperm_default")
def randperm(n: int, *, split: Split, **options: Any) -> Tensor:
    """`aten.randperm`."""
    generator = next_generator(current(), device=options.get("device"))
    return torch.randperm(n, generator=generator, **options)


@operator("multinomial_default")
def multinomial(x: Tensor, num_samples: int, replacement: bool = False, *, split: Split) -> Tensor:
    """`aten.multinomial`."""
    generator = next_generator(current(), device=x.device)
    return torch.multinomial(x.detach(), num_samples, replacement, generator=generator)
