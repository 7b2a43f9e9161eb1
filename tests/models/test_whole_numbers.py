"""Numbers of the whole batch, row or table that no rank can get from its own piece alone.

Each is a small model under a split that tempts to work piece by piece: the mean of means, the index
within a piece, the bias once for every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import shard, verify

Forward = Callable[..., Any]


class Holding(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, forward: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._forward = forward
        self.double()

    def forward(self, *inputs: Tensor) -> Any:
        return self._forward(self.layers, *inputs)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(4))


def check(model: nn.Module, inputs: tuple[Tensor, ...], ranks: int, **options: Any) -> None:
    verify(model, inputs, mesh={"x": ranks}, tolerance=1e-9, **options).raise_if_failed()


def _attention(layers: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    """Six query heads and two key and value heads out of one product."""
    q, k, v = layers["fused"](x).split([24, 8, 8], -1)
    q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layers["out"](heads.transpose(1, 2).flatten(2)).square().mean()


def _balance(layers: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    """How often each expert is chosen, times how likely it is: a product of two means."""
    likely = layers["router"](x).softmax(-1)
    chosen = F.one_hot(likely.topk(2, -1).indices, 5).sum(1).to(x.dtype)
    return 5 * (chosen.mean(0) * likely.mean(0)).sum()


def _penalised(layers: Mapping[str, nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """A sum over the batch, a constant divisor, and the weights themselves."""
    scores = layers["fit"](x)
    weights = sum(p.square().sum() for p in layers.parameters())  # type: ignore[attr-defined]
    return F.mse_loss(scores, y, reduction="sum") + scores.abs().sum() / 50 + 0.02 * weights


def _bent(layers: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    summed = layers["rows"](x)
    return summed.relu() + 0.3 * summed.abs() + 2.0


def _two_tables(layers: Mapping[str, nn.Module], first: Tensor, second: Tensor) -> Tensor:
    return layers["long"](first) * layers["short"](second)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("gathered", [True, False])
def test_loss_of_scores_that_were_split_by_class(ranks: int, gathered: bool) -> None:
    """Whether the loss sees the scores whole again or split, it counts every class once."""
    model = Holding(
        lambda layers, x, y: F.cross_entropy(layers["head"](x), y), head=nn.Linear(6, 9)
    )
    hint = {"in_strategy": ((1, 1), (ranks, 1)), "out_strategy": ((1, 1),)}
    hints = {"layers.head": hint if gathered else hint["in_strategy"]}
    check(model, (drawn(5, 6), integers(9, 5)), ranks, hints=hints)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_fused_product_of_unequal_parts_split_by_columns(ranks: int) -> None:
    model = Holding(_attention, fused=nn.Linear(12, 40), out=nn.Linear(24, 12))
    hints = {
        "layers.fused": ((1, 1, 1), (ranks, 1)),
        "layers.out": ((1, 1, ranks), (1, ranks)),
    }
    check(model, (drawn(2, 5, 12),), ranks, hints=hints)


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_that_are_no_mean_over_the_batch(ranks: int) -> None:
    x = drawn(7, 6) + torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    check(Holding(_balance, router=nn.Linear(6, 5)), (x,), ranks, mode="data_parallel")
    check(Holding(_penalised, fit=nn.Linear(6, 3)), (x, drawn(7, 3)), ranks, mode="data_parallel")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_bias_joins_a_sum_once_and_what_bends_comes_after_it(ranks: int) -> None:
    model = Holding(_bent, rows=nn.Linear(10, 4))
    check(model, (drawn(3, 10),), ranks, hints={"layers.rows": ((1, ranks), (1, ranks))})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [True, False])
def test_tables_of_different_lengths(ranks: int, rows: bool) -> None:
    model = Holding(_two_tables, long=nn.Embedding(11, 4), short=nn.Embedding(5, 4))
    table = (ranks, 1) if rows else (1, ranks)
    hints = {f"layers.{name}": (table, (1, 1)) for name in ("long", "short")}
    check(model, (integers(11, 3, 4), integers(5, 3, 4)), ranks, hints=hints)


ROWS, FEWER, COLUMNS = integers(6, 9), integers(4, 6), integers(8, 6, 8)

#: What is computed of a tensor [6, 8], and along which dimension it comes split.
ALONG: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "places of the largest": (lambda x: (*x.max(1), x.argmax(1), x.argmax(), x.argmin(0)), 1),
    "places of the smallest": (lambda x: (*x.min(0), x.argmin(0), x.argmin()), 0),
    "running sums": (lambda x: (x.cumsum(1), (x > 0).cumsum(1)), 1),
    "shares": (lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)), 1),
    "merged": (lambda x: (x.view(2, 3, 8).flatten(1), x.view(48)), 1),
    "cut again": (lambda x: (x.view(4, 12), x.view(2, 3, 8).transpose(0, 1).reshape(6, 8)), 0),
    "rows elsewhere": (lambda x: (x.index_select(0, ROWS), x[ROWS[:5]]), 0),
    "added elsewhere": (lambda x: torch.zeros_like(x).index_add(0, FEWER, x), 0),
    "put elsewhere": (lambda x: torch.zeros_like(x).scatter_add(1, COLUMNS, x), 1),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ALONG)
def test_along_a_dimension_that_is_split(name: str, ranks: int) -> None:
    compute, dim = ALONG[name]
    layout = tuple("x" if d == dim else None for d in range(2))
    model = Holding(lambda layers, x: compute(shard(x, layout)))
    # Large, so that sums of exponentials overflow without their common maximum; with equal entries.
    x = (drawn(6, 8) * 40 + 150).round().requires_grad_()
    check(model, (x,), ranks)
