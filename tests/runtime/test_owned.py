"""Gradients are written to in place only where nobody else can see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.owned import is_ours


class _Asked(torch.autograd.Function):
    """Remembers what its backward is told of the gradients that come, and spoils those it may."""

    answers: list[bool]
    spoils = True

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        ours = is_ours(grads)
        _Asked.answers.append(ours)
        copies = tuple(grad.clone() for grad in grads)
        if ours and _Asked.spoils:
            grads[0].fill_(torch.nan)
        return copies


def asked(x: Tensor) -> Tensor:
    (y,) = _Asked.apply(x)
    return y


def twice_read(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two gradients."""
    y = asked(a)
    return (y @ b + y * b).sum()


def residual(a: Tensor, b: Tensor) -> Tensor:
    """An addition gives one tensor to both of its terms; a leaf has made its copy by then."""
    return ((asked(a) + b) @ b).sum()


def before_another(a: Tensor, b: Tensor) -> Tensor:
    """The other term's backward is still to come."""
    other = torch.sin(b)
    return ((asked(a) + other) @ b).sum()


def before_another_of_a_transpose(a: Tensor, b: Tensor) -> Tensor:
    other = torch.sin(b)
    return ((asked(a).t() + other) @ b).sum()


def after_another(a: Tensor, b: Tensor) -> Tensor:
    """The other term's backward is done."""
    return ((asked(a) + torch.sin(b)) @ b).sum()


def kept(a: Tensor, b: Tensor) -> Tensor:
    """A hook sees the gradient, and keeps it."""
    y = asked(a)
    y.register_hook(lambda grad: seen.append(grad))
    return (y @ b).sum()


def returned(a: Tensor, b: Tensor) -> Tensor:
    """The pass gives the gradient back."""
    y = asked(a)
    seen.append(*torch.autograd.grad((y @ b).sum(), y, retain_graph=True))
    return (y @ b).sum()


def retained(a: Tensor, b: Tensor) -> Tensor:
    y = asked(a)
    y.retain_grad()
    seen.append(y)
    return (y @ b).sum()


seen: list[Tensor] = []

CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "of a product": (lambda a, b: (asked(a) @ b).sum(), True),
    "summed": (twice_read, True),
    "expanded": (lambda a, b: asked(a).sum() + b.sum(), False),
    "of a transpose": (lambda a, b: (asked(a).t() @ b).sum(), True),
    "of a linear layer": (lambda a, b: torch.nn.functional.linear(b, asked(a)).sum(), True),
    "by columns": (lambda a, b: (asked(a).t().contiguous() * b).sum(), False),
    "of a transpose, before another": (before_another_of_a_transpose, False),
    "of a part": (lambda a, b: torch.cat([asked(a), b], 0).mul(2).sum(), False),
    "of both terms, one is a leaf": (residual, True),
    "of both terms, before the other": (before_another, False),
    "of both terms, after the other": (after_another, True),
    "kept by a hook": (kept, False),
    "returned": (returned, True),
    "retained": (retained, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_ours_only_where_nobody_else_holds_it(name: str) -> None:
    compute, expected = CASES[name]
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    found = []
    for spoils in (False, True, True):
        _Asked.answers, _Asked.spoils = [], spoils
        seen.clear()
        for leaf in leaves:
            leaf.grad = None
        compute(*leaves).backward()
        assert _Asked.answers == [expected]
        others = [x.grad if x.requires_grad else x for x in seen]
        found.append([leaf.grad.clone() for leaf in leaves] + others)  # type: ignore[union-attr]
    for again in found[1:]:
        torch.testing.assert_close(again, found[0], rtol=0, atol=0)


def test_several_gradients_or_none_are_not_ours() -> None:
    _Asked.answers = []
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    y, z = _Asked.apply(a, b)
    (y @ z).sum().backward()
    assert _Asked.answers == [False]
    assert not is_ours((None,))
