"""Norms over batches of one image give right gradients wherever things lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.operators import resolve

CHANNELS = 4
MEAN = torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)
VAR = torch.linspace(0.5, 2, CHANNELS, dtype=torch.float64)

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]

NORMS: dict[str, Norm] = {
    "evaluation": lambda x, w, b: resolve("aten.batch_norm.default")(
        x, w, b, MEAN, VAR, False, 0.1, 1e-5, False
    ),
    "fixed": lambda x, w, b: resolve("aten._native_batch_norm_legit_no_training.default")(
        x, w, b, MEAN, VAR, 0.1, 1e-5
    )[0],
    "training": lambda x, w, b: resolve("autopar.batch_norm_train")(x, w, b, MEAN, VAR, 0.1, 1e-5)[
        0
    ],
    "instances": lambda x, w, b: resolve("aten.instance_norm.default")(
        x, w, b, None, None, True, 0.1, 1e-5, False
    ),
}


def by_hand(name: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The norm in plain arithmetic."""
    mean, var = (s.view(1, -1, 1, 1) for s in (MEAN, VAR))
    if name in ("training", "instances"):
        mean = x.mean((2, 3), keepdim=True)
        var = x.var((2, 3), unbiased=False, keepdim=True)
    scale, shift = (p.view(1, -1, 1, 1) for p in (weight, bias))
    return (x - mean) * torch.rsqrt(var + 1e-5) * scale + shift


def orders(x: Tensor) -> Iterator[Tensor]:
    """A tensor with its dimensions in every order in memory."""
    for order in permutations(range(x.dim())):
        back = [order.index(d) for d in range(x.dim())]
        yield x.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [(3, 5), (1, 4), (4, 1), (4, 4)], ids=str)
def test_gradients_of_one_image(name: str, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    image, cotangent = normal(1, CHANNELS, *size), normal(1, CHANNELS, *size)
    weight, bias = normal(CHANNELS).requires_grad_(), normal(CHANNELS).requires_grad_()
    x = image.clone().requires_grad_()
    want = torch.autograd.grad(by_hand(name, x, weight, bias), (x, weight, bias), cotangent)
    for x in orders(image):
        for grad in orders(cotangent):
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(NORMS[name](x, weight, bias), (x, weight, bias), grad)
            for got, expected in zip(found, want, strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_a_model_runs_them(norm: type[nn.Module]) -> None:
    model, x = norm(CHANNELS).eval(), torch.randn(1, CHANNELS, 3, 5)
    parallel = autopar.autoparallelize(norm(CHANNELS).eval(), (x,), mesh=1)
    torch.testing.assert_close(parallel(x), model(x))
