"""Every reshard step keeps the whole value, and its gradient keeps the whole gradient."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime import collectives as c
from autopar.runtime.lockstep import run_lockstep
from four_states import CASES, Case, dual, pieces, whole

SHAPE = (4, 8, 4)

GROUPS = [
    (Mesh((("a", 2),)), ("a",)),
    (Mesh((("a", 4),)), ("a",)),
    (Mesh((("a", 2), ("b", 2))), ("a",)),
    (Mesh((("a", 2), ("b", 2))), ("b",)),
    (Mesh((("a", 2), ("b", 2))), ("a", "b")),
    (Mesh((("a", 2), ("b", 2))), ("b", "a")),
    (Mesh((("a", 2), ("one", 1))), ("one", "a")),
    (Mesh((("one", 1),)), ("one",)),
]

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_group = pytest.mark.parametrize(
    ("mesh", "axes"), GROUPS, ids=[f"{m}-{'+'.join(a)}" for m, a in GROUPS]
)


def randn(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_group(mesh: Mesh, axes: tuple[str, ...], results: list) -> list[list]:
    """The results of the ranks of each group, in the order of the group."""
    groups = {mesh.group(rank, axes) for rank in range(mesh.size)}
    return [[results[rank] for rank in members] for members in sorted(groups)]


def run(case: Case, mesh: Mesh, axes: tuple[str, ...], value: Tensor, cotangent: Tensor) -> list:
    """(x, y, cotangent piece, gradient of x, second-order gradient of the cotangent) per rank."""
    count = mesh.axis_size(*axes)
    xs = pieces(value, case.source, count, seed=1)
    gs = pieces(cotangent, dual(case.target), count, seed=2)
    hs = pieces(value, case.source, count, seed=3)

    def on_rank(rank: int) -> tuple[Tensor, ...]:
        index = mesh.index(mesh.coordinates(rank), axes)
        x = xs[index].clone().requires_grad_()
        g = gs[index].clone().requires_grad_()
        y = case.step(x, axes)
        (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
        (again,) = torch.autograd.grad(grad, g, hs[index])
        return x.detach(), y.detach(), g.detach(), grad.detach(), again

    return run_lockstep(mesh, on_rank, timeout=20)


@each_group
@each_case
def test_step_keeps_value_and_gradient(case: Case, mesh: Mesh, axes: tuple[str, ...]) -> None:
    value, cotangent = randn(11), randn(12)
    for group in by_group(mesh, axes, run(case, mesh, axes, value, cotangent)):
        _, ys, _, grads, again = (list(column) for column in zip(*group, strict=True))
        torch.testing.assert_close(whole(ys, case.target), value)
        torch.testing.assert_close(whole(grads, dual(case.source)), cotangent)
        # The gradient of the gradient is the step itself.
        torch.testing.assert_close(whole(again, case.target), value)


@each_case
def test_gradient_is_the_adjoint(case: Case) -> None:
    """<step(x), g> = <x, gradient(g)>, counting what all ranks hold alike once."""
    mesh, axes = Mesh((("a", 4),)), ("a",)
    ranks = run(case, mesh, axes, randn(21), randn(22))

    def paired(left: list[Tensor], right: list[Tensor], state: int | str) -> Tensor:
        products = [(a * b).sum() for a, b in zip(left, right, strict=True)]
        return products[0] if state == "I" else sum(products[1:], products[0])

    xs, ys, gs, grads, _ = (list(column) for column in zip(*ranks, strict=True))
    torch.testing.assert_close(
        paired(ys, gs, case.target), paired(xs, grads, case.source), rtol=1e-12, atol=1e-12
    )


@each_case
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_step_without_gradient(case: Case, dtype: torch.dtype) -> None:
    mesh, axes = Mesh((("a", 2),)), ("a",)
    value = torch.arange(128, dtype=dtype).view(SHAPE)
    xs = pieces(value, case.source, 2, seed=4)
    ys = run_lockstep(mesh, lambda rank: case.step(xs[rank], axes), timeout=20)
    assert not any(y.requires_grad for y in ys)
    torch.testing.assert_close(whole(ys, case.target), value)


@each_case
def test_step_takes_any_strides(case: Case) -> None:
    """Transposed values and expanded gradients give what contiguous ones give."""
    mesh, axes = Mesh((("a", 2),)), ("a",)
    value = randn(31)
    xs = pieces(value, case.source, 2, seed=5)

    def on_rank(rank: int) -> tuple[Tensor, Tensor]:
        x = xs[rank].transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        assert not x.is_contiguous()
        y = case.step(x, axes)
        share = 2.0 if dual(case.target) == "P" else 1.0
        (y.sum() / share).backward()
        return y.detach(), x.grad

    ys, grads = (list(column) for column in zip(*run_lockstep(mesh, on_rank), strict=True))
    torch.testing.assert_close(whole(ys, case.target), value)
    torch.testing.assert_close(whole(grads, dual(case.source)), torch.ones_like(value))


def test_backward_needs_no_active_context() -> None:
    """A thread that runs backward knows no rank; the steps remember their groups."""
    mesh = Mesh((("a", 2),))

    def on_rank(rank: int) -> Tensor:
        x = torch.full((2,), float(rank + 1), requires_grad=True)
        y = c.all_reduce(c.to_replicate(x, ("a",)) ** 2, ("a",), "R").sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join(20)
        return x.grad

    # Each rank's x gets the sum over ranks of 2x times the summed gradient (2).
    for grad in run_lockstep(mesh, on_rank):
        torch.testing.assert_close(grad, torch.full((2,), 2.0 * (1 + 2) * 2))


def test_results_of_ranks_share_no_memory() -> None:
    mesh = Mesh((("a", 2),))
    for case in CASES:
        xs = pieces(randn(41), case.source, 2, seed=6)
        ys = run_lockstep(mesh, lambda rank: case.step(xs[rank].clone(), ("a",)))  # noqa: B023
        assert ys[0].untyped_storage().data_ptr() != ys[1].untyped_storage().data_ptr(), case


def test_slice_frees_the_whole() -> None:
    """The block must not keep the whole tensor's memory."""
    mesh = Mesh((("a", 2),))
    blocks = run_lockstep(mesh, lambda rank: c.slice_(torch.ones(8, 4), ("a",), 0, "I"))
    assert [b.untyped_storage().nbytes() for b in blocks] == [4 * 4 * 4] * 2
