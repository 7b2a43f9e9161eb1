"""Kinds of models that others found hard to trace, each equal to the single device when split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import verify
from autopar.ir.errors import TraceError
from model_zoo import MODELS, build_entry

MESHES = ({"dp": 2}, {"dp": 2, "tp": 2})


pytestmark = pytest.mark.usefixtures("one_thread")


def check(model: nn.Module, *args: Any, tolerance: float = 1e-9, **kwargs: Any) -> None:
    """Equal with the batch split, on one axis and on two."""
    for mesh in MESHES:
        report = verify(model, args, kwargs, mesh=mesh, mode="data_parallel", tolerance=tolerance)
        report.raise_if_failed()
        split = {axis for s in report.plan.assignment.strategies.values() for axis, _ in s.roles}
        assert split == set(mesh)


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_caches_are_switched_off_in_nested_configs_too(name):
    """Tied heads, padding masks, ignored labels, grouped heads; the configs are the default."""
    model, call = build_entry(MODELS[name], "eval")
    check(model, tolerance=5e-6, **call)


@pytest.mark.parametrize("name", ["mixtral", "mixtral-batched"])
def test_mixture_of_experts_splits_the_batch(name):
    model, call = build_entry(MODELS[name], "train")
    check(model, tolerance=1e-4, **call)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 4, num_layers=2, batch_first=True, **options)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].pow(2).mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "dropout": 0.3}])
def test_recurrent_layers_split_the_batch(kind, options):
    check(Recurrent(kind, **options), batch(4, 5, 6))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 4, batch_first=True).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.rnn(packed)[0].data.sum()


def test_packed_sequences_are_refused_by_name():
    with pytest.raises(TraceError, match="pack_padded_sequence"):
        verify(Packed(), (batch(2, 5, 6), torch.tensor([5, 3])), mesh=2)


class Stateful(nn.Module):
    """A step counter and a moving average in buffers, or a number in Python."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc = nn.Linear(6, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))
        self.steps = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.kind == "count":
            self.count += 1
            return y.pow(2).mean() * (1 + 0.1 * self.count)
        if self.kind == "average":
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            return (y - self.average).pow(2).mean()
        self.steps += 1
        return y.pow(2).mean() * self.steps


@pytest.mark.parametrize("kind", ["count", "average"])
def test_state_in_buffers_follows_the_whole_batch(kind):
    check(Stateful(kind), batch(4, 6))


def test_state_in_python_is_refused_by_name():
    with pytest.raises(TraceError, match="'steps'"):
        verify(Stateful("python"), (batch(4, 6),), mesh=2)


class Writing(nn.Module):
    def __init__(self, to_input: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6).double()
        self.to_input = to_input

    def forward(self, x: Tensor) -> Tensor:
        if self.to_input:
            x[:, 0] = 0
        h = self.fc(x).clone()
        h[:, 0] = 0
        h[:2] *= 2
        h.masked_fill_(h > 1, 1.0)
        h[:, 1:3].add_(h[:, 3:5].detach())
        return h.pow(2).mean()


def test_writes_to_activations_are_followed_and_to_inputs_refused():
    check(Writing(False), batch(4, 6))
    with pytest.raises(TraceError, match="writes in place to the input 'x'"):
        verify(Writing(True), (batch(4, 6),), mesh=2)


class Reused(nn.Module):
    """A weight as a table and as a head, and one used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 6)
        self.mix = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.table(ids) @ self.mix) @ self.mix.t()
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.roll(1, 1).flatten())


def test_one_weight_of_several_uses_may_be_cut_differently_for_each():
    ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(0))
    check(Reused(), ids)
    # The vocabulary for the look-up, the width for the head.
    hints = {"table": ((2, 1), (1, 1)), "head": ((1, 1, 2), (1, 2))}
    verify(Reused(), (ids,), mesh={"tp": 2}, hints=hints).raise_if_failed()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_implementations_split_their_heads(attention):
    model, call = build_entry(MODELS["llama"], "eval")
    model.set_attn_implementation(attention)
    hints = {f"*.self_attn.{name}_proj": ((1, 1, 1), (2, 1)) for name in "qkv"}
    report = verify(model, (), call, mesh={"tp": 2}, hints=hints, tolerance=5e-6)
    report.raise_if_failed()


def test_attention_over_fewer_places_than_a_mask_covers():
    """Transformers makes a mask of such a model only where it is exported, and it fits nothing."""
    model, call = build_entry(MODELS["nystromformer"], "eval")
    check(model, tolerance=5e-6, **call)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :-1]]) if x.sum() < 0 or x.sum() > 0 else x


def test_a_model_that_fails_by_itself_is_told_so():
    with pytest.raises(TraceError, match="Failing fails on the example call by itself, with Run"):
        verify(Failing(), (batch(4, 6),), mesh=2)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.inner(x).relu()
        return self.outer(h.float()).pow(2).mean()


def test_autocast_inside_a_model_is_looked_into():
    hints = {"inner": ((1, 1), (2, 1), (2,)), "outer": ((1, 2), (1, 2), (1,))}
    for more in ({"mode": "data_parallel"}, {"hints": hints}):
        report = verify(Mixed(), (batch(4, 6).float(),), mesh={"tp": 2}, tolerance=5e-2, **more)
        report.raise_if_failed()
        loss = next(c for c in report.checks if c.kind == "output")
        assert loss.error < 2e-3
