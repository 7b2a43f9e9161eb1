"""Where MindSpore's auto parallel falls short, and what is wanted instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import shard
from outcomes import BYTES_ONLY, Net, Outcome, all_reduce, outcome, randn
from zoo import build

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 16, 4, 2, 4, 8
VOCABULARY = 2048


class Block(nn.Module):
    """A transformer block of six dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def megatron(dp: int, tp: int) -> dict[str, Any]:
    """Six hints per block: columns, columns, columns, rows; columns, rows."""
    columns = {f"blocks.*.{name}": ((dp, 1, 1), (tp, 1)) for name in ("q", "k", "v", "fc")}
    rows = {f"blocks.*.{name}": ((dp, 1, tp), (1, tp)) for name in ("o", "proj")}
    return columns | rows


def transformer(**options: Any) -> Outcome:
    torch.manual_seed(0)
    return outcome(Transformer().double(), torch.randint(VOCABULARY, (BATCH, LENGTH)), **options)


@pytest.mark.parametrize("tp", [2, 4])
def test_six_megatron_hints_cost_two_all_reduces_per_block_and_nothing_else(tp: int) -> None:
    found = transformer(mesh={"tp": tp}, hints=megatron(1, tp), device=BYTES_ONLY)
    per_block = [all_reduce(tp, BATCH, LENGTH, WIDTH)] * 2
    assert found.forward == per_block * BLOCKS
    # Backward as many: where a block's input enters the column-split layers.
    assert found.backward == per_block * BLOCKS


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_where_latency_counts_no_more_sums_of_activations(tp: int, device: str) -> None:
    """At these sizes a collective is nearly all latency, and gradients of parameters share one: the
    sum at a block's input may be had as sums of the gradients of what came before it."""
    found = transformer(mesh={"tp": tp}, hints=megatron(1, tp), device=device)
    activations = all_reduce(tp, BATCH, LENGTH, WIDTH)
    assert found.forward == [activations] * 2 * BLOCKS
    assert 0 < found.backward.count(activations) <= 2 * BLOCKS
    gradients = {all_reduce(tp, WIDTH), all_reduce(tp, VOCABULARY, WIDTH)}
    assert set(found.backward) - {activations} <= gradients


def test_beside_a_batch_axis_the_activations_cost_the_same_two_all_reduces() -> None:
    found = transformer(mesh={"dp": 2, "tp": 2}, hints=megatron(2, 2), device="cpu")
    per_block = [all_reduce(2, BATCH // 2, LENGTH, WIDTH)] * 2
    loss = all_reduce(2, 1)
    assert found.forward == [loss, *per_block * BLOCKS]


def test_hints_on_gpt2_spread_through_every_block() -> None:
    """Three hints on Conv1D layers, in two entries for three dimensions."""
    model, call = build("gpt2")
    hints = {
        "transformer.h.*.mlp.c_fc": ((2, 1), (1, 2)),
        "transformer.h.*.mlp.c_proj": ((2, 2), (2, 1)),
        "transformer.h.*.attn.c_proj": ((2, 2), (2, 1)),
    }
    found = outcome(model, kwargs=call, mesh={"dp": 2, "tp": 2}, hints=hints, device="cpu")
    for row in found.rows("aten.scaled_dot_product_attention"):
        assert row.strategy.startswith("((2, 2, 1, 1), (2, 2, 1, 1), (2, 2, 1, 1)")
        assert "spread from hint" in row.chosen_by
    fc = [r for r in found.plan.rows if r.module.endswith("mlp.c_fc")]
    assert [r.strategy for r in fc] == ["((2, 1, 1), (1, 2), (2,))"] * 2


def unsplittable(function: Any) -> Outcome:
    """A function of the activation of a product whose batch is hinted to be split by four."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        return function(shard(torch.matmul, ((4, 1), (1, 1)))(x, net.w))

    return outcome(Net(forward, w=(8, 8)), randn(8, 8), mesh={"a": 2, "b": 2}, outputs="full")


def test_a_roll_along_the_split_dimension_is_replicated() -> None:
    found = unsplittable(lambda h: torch.roll(h, 1, 0))
    (roll,) = found.rows("aten.roll")
    assert roll.inputs[0].startswith("[-, ")
    assert found.forward != []


def test_a_norm_over_the_split_dimension_is_right() -> None:
    """`outcome` compares it with one device; a silent batch split would be off."""
    found = unsplittable(lambda h: h.norm(dim=0))
    assert found.forward != []


def test_an_operator_without_a_distributed_form_is_replicated_and_noted() -> None:
    found = unsplittable(torch.linalg.inv)
    (inverse,) = found.rows("aten.linalg_inv")
    assert inverse.inputs == inverse.outputs == ("[-, -]",)
    (note,) = found.plan.notes
    assert note.startswith("aten.linalg_inv.default has no rule: it runs whole on every rank")


def test_a_histogram_of_a_split_batch_is_right() -> None:
    found = unsplittable(lambda h: (torch.histc(h.detach(), 4, -2.0, 2.0), h.sum()))
    assert found.report.checks[0].error == 0


@pytest.mark.parametrize(
    ("mesh", "strategy", "expected"),
    [
        ({"a": 3}, ((3, 1), (1, 1)), []),
        ({"a": 3}, ((1, 3), (3, 1)), [all_reduce(3, 12, 18)]),
        ({"a": 6}, ((1, 6), (6, 1)), [all_reduce(6, 12, 18)]),
        ({"a": 3, "b": 2}, ((3, 2), (2, 1)), [all_reduce(2, 4, 18)]),
        ({"a": 3, "b": 2}, ((6, 1), (1, 1)), []),
        ({"a": 5}, ((1, 1), (1, 1)), []),
    ],
)
def test_counts_need_not_be_powers_of_two(
    mesh: dict[str, int], strategy: Any, expected: list[Any]
) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        product = shard(torch.matmul, strategy)(x, net.w)
        return shard(product, (strategy[0][0], strategy[1][1]))

    found = outcome(Net(forward, w=(12, 18)), randn(12, 12), mesh=mesh)
    assert found.forward == expected


@pytest.mark.parametrize("ranks", [3, 6])
def test_a_model_plans_itself_on_three_and_six_devices(ranks: int) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6)).double()
    found = outcome(model, randn(12, 12), mesh={"d": ranks}, mode="auto", device="h100")
    assert {row.chosen_by for row in found.plan.rows} == {"search"}
