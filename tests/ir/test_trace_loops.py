"""Loops over the experts that were hit: products of groups where they go row by row, else whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.errors import InputError
from trace_check import check_same, ops, run

pytest.importorskip("transformers")
torch.set_num_threads(1)

ROWS, WIDTH, INNER, EXPERTS = 7, 8, 6, 3
#: The experts of each row; nobody asks for the second one.
CHOSEN = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2], [2, 0], [0, 2], [2, 0]])


class Experts(nn.Module):
    """A gated mixture of experts; `body` is what a visit does to the rows of its expert."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.up = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH).double())
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH).double())
        self.extra = nn.Parameter(torch.randn(EXPERTS, WIDTH).double())

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        # One class more than there are experts: it is never hit.
        mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        hit = (mask.sum((1, 2)) > 0).nonzero()
        made = torch.zeros_like(x)
        state: list[Tensor] = []
        for expert in hit:
            choice, token = torch.where(mask[expert[0]])
            y = self.body(self, x[token], expert[0], state) * gates[token, choice, None]
            made.index_add_(0, token, y)
        return made * (1 + len(state))


class Model(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH).double()
        self.experts = Experts(body)

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        return self.experts(self.fc(x), chosen, gates)


def mlp(m: Experts, x: Tensor, expert: Tensor, state: list[Tensor]) -> Tensor:
    up = m.up.view(-1, INNER, WIDTH)[expert]
    return F.silu(x.matmul(up.T)).matmul(m.down[expert])


def biased(m: Experts, x: Tensor, expert: Tensor, state: list[Tensor]) -> Tensor:
    return mlp(m, x, expert, state) + m.extra[expert]


def over_all_rows(m: Experts, x: Tensor, expert: Tensor, state: list[Tensor]) -> Tensor:
    return mlp(m, x, expert, state) - x.sum(0)


def counting(m: Experts, x: Tensor, expert: Tensor, state: list[Tensor]) -> Tensor:
    state.append(m.extra)
    return mlp(m, x, expert, state)


def example(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, gates = (torch.randn(ROWS, n, dtype=torch.float64, generator=draw) for n in (WIDTH, 2))
    return x.requires_grad_(), gates.requires_grad_()


def check(body: Any) -> tuple[Any, Model]:
    model = Model(body)
    x, gates = example()
    program = check_same(model, x, CHOSEN, gates, tolerance=1e-12)
    x, gates = example(seed=1)
    for chosen in (CHOSEN.new_ones(ROWS, 2) * torch.tensor([1, 0]), CHOSEN.flip(0)):
        got, _ = run(program, model, (x, chosen, gates), {})
        assert torch.allclose(got, model(x, chosen, gates), rtol=1e-12)
    return program, model


def test_a_loop_that_goes_row_by_row_is_grouped_products():
    program, model = check(mlp)
    assert sum("grouped_mm_fallback" in op for op in ops(program)) == 2
    assert not any(op.startswith("autopar_whole") for op in ops(program))
    x, gates = example()
    twice = CHOSEN.clone()
    twice[0] = 3
    with pytest.raises(InputError, match="which is not expert 3"):
        run(program, model, (x, twice, gates), {})


@pytest.mark.parametrize("body", [biased, over_all_rows, counting])
def test_a_loop_that_does_something_else_is_kept_whole(body):
    program, _ = check(body)
    assert any(op.startswith("autopar_whole.Experts") for op in ops(program))
