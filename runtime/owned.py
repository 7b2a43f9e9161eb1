"""Whether a gradient may be written to where it lies: nobody but this backward holds it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor


def is_ours(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether the one gradient that came to a backward, in its arguments, is its own to change.

    It fills its memory in row-major order, and neither Python nor autograd holds it, or what it is
    a view of, for anybody else: another branch of the graph, a hook, a pass that returns it. True
    of tensors without data, which stand for gradients that are.
    """
    if len(grads) != 1 or grads[0] is None:
        return False
    grad = grads[0]
    if grad.is_meta:
        return True
    if type(grad) is not Tensor or not grad.is_contiguous():
        return False
    if grad.untyped_storage().nbytes() != grad.nbytes:
        return False
    view = grad._is_view()
    del grad
    return _holders(grads) == _holders_of_ours(view)


def held_by_others(grads: tuple[Tensor | None, ...]) -> list[bool]:
    """Whether somebody else holds, as a tensor, each of the gradients that came to a backward."""
    ours = _holders_of_ours(False)
    return [
        grads[k] is not None
        and any(n > most for n, most in zip(_references(grads, k), ours, strict=False))
        for k in range(len(grads))
    ]


def _references(grads: tuple[Tensor | None, ...], k: int) -> tuple[int, int]:
    """Those of Python and of PyTorch to one of some gradients."""
    grad = grads[k]
    assert grad is not None
    return sys.getrefcount(grad), grad._use_count()  # type: ignore[attr-defined]


def _holders(grads: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """References to a gradient, to its memory, and to what it is a view of."""
    found = _references(grads, 0)
    (grad,) = grads
    assert grad is not None
    memory = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)  # type: ignore[attr-defined]
    base = grad._base
    if base is None:
        return *found, memory
    return *found, memory, sys.getrefcount(base), base._use_count()  # type: ignore[attr-defined]


class _Count(torch.autograd.Function):
    """Counts the holders of a gradient that nobody else holds."""

    found: tuple[int, ...]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Count.found = _holders(grads)
        return grads[0]


@cache
def _holders_of_ours(view: bool) -> tuple[int, ...]:
    """What is counted in a backward of a gradient that nobody else holds, or of its transpose."""
    with torch.enable_grad():
        x = torch.ones(2, 2, requires_grad=True)
        y = _Count.apply(x)
        product = x.detach() @ (y.t() if view else y)
        torch.autograd.grad(product.sum(), x)
    return _Count.found
