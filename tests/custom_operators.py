"""Custom operators as users write them: registered with PyTorch, unknown to the compiler.

Each has its own backward (`register_autograd`) and its own shape function (`register_fake`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_calls = itertools.count()


def _differentiable(op: Any, formula: Any) -> None:
    """Give an operator the backward of a differentiable formula of its tensor arguments."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.given = inputs

    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = [
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
            for x in ctx.given
        ]
        with torch.enable_grad():
            made = formula(*given)
        wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        outs = made if isinstance(made, tuple) else (made,)
        pairs = [(y, g) for y, g in zip(outs, grads, strict=True) if y.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        )
        return tuple(
            next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in given
        )

    op.register_autograd(backward, setup_context=setup)


# Pointwise, with one scale for each feature.


def _fused(x: Tensor, gate: Tensor, scale: Tensor, alpha: float) -> Tensor:
    return F.silu(gate) * x * scale + alpha * x


@torch.library.custom_op("autopar_test::fused_gate", mutates_args=())
def fused_gate(x: Tensor, gate: Tensor, scale: Tensor, alpha: float = 0.5) -> Tensor:
    return _fused(x, gate, scale, alpha)


@fused_gate.register_fake
def _(x: Tensor, gate: Tensor, scale: Tensor, alpha: float = 0.5) -> Tensor:
    return torch.empty_like(x)


_differentiable(fused_gate, _fused)


# A reduction of two tensors over the last dimension.


def _energy(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).tanh().sum(-1)


@torch.library.custom_op("autopar_test::energy", mutates_args=())
def energy(x: Tensor, y: Tensor) -> Tensor:
    return _energy(x, y)


@energy.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1])


_differentiable(energy, _energy)


# Systems of equations, many at a time.


def _ridge(a: Tensor, b: Tensor, damping: float) -> Tensor:
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve(a.mT @ a + damping * eye, a.mT @ b)


@torch.library.custom_op("autopar_test::ridge_solve", mutates_args=())
def ridge_solve(a: Tensor, b: Tensor, damping: float) -> Tensor:
    return _ridge(a, b, damping)


@ridge_solve.register_fake
def _(a: Tensor, b: Tensor, damping: float) -> Tensor:
    return b.new_empty(*a.shape[:-2], a.shape[-1], b.shape[-1])


_differentiable(ridge_solve, _ridge)


# Attention of several heads within a window of the last positions.


def _windowed(q: Tensor, k: Tensor, v: Tensor, heads: int, window: int) -> Tensor:
    b, s, width = q.shape
    q, k, v = (x.reshape(b, s, heads, width // heads).transpose(1, 2) for x in (q, k, v))
    at = torch.arange(s, device=q.device)
    near = (at[:, None] - at[None, :] < window) & (at[:, None] >= at[None, :])
    scores = (q @ k.mT) / (width // heads) ** 0.5
    weights = scores.masked_fill(~near, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(b, s, width)


@torch.library.custom_op("autopar_test::windowed_attention", mutates_args=())
def windowed_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, window: int) -> Tensor:
    return _windowed(q, k, v, heads, window)


@windowed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, heads: int, window: int) -> Tensor:
    return torch.empty_like(q)


_differentiable(windowed_attention, _windowed)


# Rows read by index, with an optional bias.


def _rows(table: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
    read = table[index]
    return read if bias is None else read + bias


@torch.library.custom_op("autopar_test::read_rows", mutates_args=())
def read_rows(table: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    return _rows(table, index, bias)


@read_rows.register_fake
def _(table: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    return table.new_empty(*index.shape, *table.shape[1:])


_differentiable(read_rows, _rows)


# Groups of rows, each with its own matrix.


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = x.split(counts.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weight, strict=True)])


@torch.library.custom_op("autopar_test::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return _grouped(x, weight, counts)


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


_differentiable(grouped_product, _grouped)


# Rows normalised by their own statistics; the statistics are returned, too.


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.float()  # in single precision, as kernels do
    deviation = (x.var(-1, correction=0) + eps).rsqrt()
    return (x - x.mean(-1, keepdim=True)) * deviation[..., None] * weight + bias, deviation


@torch.library.custom_op("autopar_test::row_norm", mutates_args=())
def row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _normalised(x, weight, bias, eps)


@row_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, dtype=torch.promote_types(torch.float32, weight.dtype))
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32)


_differentiable(row_norm, _normalised)


# A scan over several tensors of a list.


def _scan(xs: Sequence[Tensor], decay: Tensor) -> Tensor:
    total = torch.zeros_like(xs[0][..., 0])
    rows = []
    for at in range(xs[0].shape[-1]):
        total = total * decay.sigmoid() + sum(x[..., at] for x in xs)
        rows.append(total)
    return torch.stack(rows, -1)


@torch.library.custom_op("autopar_test::decaying_scan", mutates_args=())
def decaying_scan(xs: Sequence[Tensor], decay: Tensor) -> Tensor:
    return _scan(xs, decay)


@decaying_scan.register_fake
def _(xs: Sequence[Tensor], decay: Tensor) -> Tensor:
    return torch.empty_like(xs[0])


def _scan_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.xs, ctx.decay = inputs


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor]:
    xs = [x.detach().requires_grad_() for x in ctx.xs]
    decay = ctx.decay.detach().requires_grad_()
    with torch.enable_grad():
        made = _scan(xs, decay)
    *of_xs, of_decay = torch.autograd.grad(made, [*xs, decay], grad)
    return of_xs, of_decay


decaying_scan.register_autograd(_scan_backward, setup_context=_scan_setup)


# Rows clipped where one outweighs the whole batch: nothing to see of it on ordinary numbers.


def _clipped(x: Tensor, limit: float) -> Tensor:
    norms = x.norm(dim=-1)
    if norms.max() <= limit * norms.mean():
        return x.clone()
    return x * (limit * norms.mean() / norms.max())


@torch.library.custom_op("autopar_test::batch_clip", mutates_args=())
def batch_clip(x: Tensor, limit: float) -> Tensor:
    return _clipped(x, limit)


@batch_clip.register_fake
def _(x: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


_differentiable(batch_clip, _clipped)


# Other results at every call.


@torch.library.custom_op("autopar_test::jitter", mutates_args=())
def jitter(x: Tensor) -> Tensor:
    return x + 1e-3 * next(_calls)


@jitter.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


jitter.register_autograd(
    lambda ctx, grad: grad.clone(), setup_context=lambda ctx, inputs, output: None
)


# A backward that is not linear in the gradient it is given.


@torch.library.custom_op("autopar_test::clip_gradient", mutates_args=())
def clip_gradient(x: Tensor, limit: float) -> Tensor:
    return x.clone()


@clip_gradient.register_fake
def _(x: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


def _limit_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.limit = inputs[1]


clip_gradient.register_autograd(
    lambda ctx, grad: (grad.clamp(-ctx.limit, ctx.limit), None), setup_context=_limit_setup
)


# Rows that depend on one another at a distance only.


def _echo(x: Tensor, distance: int) -> Tensor:
    return x + 0.5 * F.pad(x, (0, 0, distance, 0))[..., : x.shape[-2], :]


@torch.library.custom_op("autopar_test::echo", mutates_args=())
def echo(x: Tensor, distance: int) -> Tensor:
    return _echo(x, distance)


@echo.register_fake
def _(x: Tensor, distance: int) -> Tensor:
    return torch.empty_like(x)


_differentiable(echo, _echo)
