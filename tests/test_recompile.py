"""Calls unlike the first one: shapes, arguments, modes, autocast, what is trained, dtypes."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import module as module_file
from ranks import run_ranks
from recompile_worker import Net, batch, close, pair, step

WORKER = Path(__file__).with_name("recompile_worker.py")

torch.set_num_threads(1)


@pytest.mark.slow
def test_on_real_processes() -> None:
    run_ranks(WORKER, 2, "last_batch", "labels_and_modes", "late_argument", "seeds", limit_s=200)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_more_on_real_processes(world: int) -> None:
    checks = ("state", "local_inputs") if world == 2 else ("last_batch", "state", "local_inputs")
    run_ranks(WORKER, world, *checks, limit_s=300)


def test_a_new_kind_of_call_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    parallel, single = pair(mesh=1)
    x, labels = batch(5)
    with caplog.at_level(logging.WARNING, "autopar"):
        for _ in range(2):
            step(parallel, single, lambda model: model(x, labels)[0])
            step(parallel, single, lambda model: model(x).sum())
    said = [record.message for record in caplog.records if record.name == "autopar"]
    assert said == [
        "Net: compiling another graph, for a call that differs in "
        "x (float64[8, 8], now float64[5, 8]), labels (int64[8], now int64[5])",
        "Net: compiling another graph, for a call that differs in labels (int64[5], now None)",
    ]


def test_a_call_is_the_same_however_it_is_spelled() -> None:
    parallel, single = pair(mesh=1)
    x, labels = batch(8)
    for call in (
        lambda m: m(x, labels),
        lambda m: m(x, labels=labels),
        lambda m: m(labels=labels, x=x),
    ):
        step(parallel, single, lambda m: call(m)[0])  # noqa: B023
    assert len(parallel._compiled) == 1
    parallel(x), parallel(x, None), parallel(x=x, labels=None)
    assert len(parallel._compiled) == 2


def test_the_oldest_graph_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module_file, "MAX_GRAPHS", 2)
    parallel, single = pair(mesh=1)
    plan = str(parallel.plan)
    parallel.eval(), single.eval()
    for rows in (8, 3, 8, 5, 8, 3):
        x, _ = batch(rows)
        close(parallel(x), single(x))
    shapes = [dict(key.entries)["x"].shape[0] for key in parallel._compiled]
    assert shapes == [8, 3]
    dropped = [r for r in caplog.records if "more than 2 graphs" in r.message]
    assert len(dropped) == 3
    assert str(parallel.plan) == plan


def test_frozen_values_of_the_call() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any], scale: float = 1.0) -> Tensor:
            return self.fc(batch["x"][0]) * scale + batch["shift"]

    model, x = Scaled(), torch.randn(2, 4)
    parallel = autopar.autoparallelize(model, mesh=1)
    for given, scale in (
        ({"x": [x], "shift": 1}, 1.0),
        ({"shift": 1, "x": [x]}, 1.0),
        ({"x": [x], "shift": 2}, 1.0),
        ({"x": (x, x), "shift": 2}, 3.0),
    ):
        close(parallel(given, scale), model(given, scale))
    assert len(parallel._compiled) == 3


def test_gradients_of_inputs() -> None:
    """A graph that gives a gradient serves calls that want none, not the other way round."""
    parallel, single = pair(mesh=1)
    parallel.eval(), single.eval()
    x, _ = batch(8)
    wanting = x.clone().requires_grad_()
    close(parallel(x), single(x))
    with torch.no_grad():
        close(parallel(wanting), single(x))
    parallel(wanting).sum().backward()
    got, wanting.grad = wanting.grad, None
    single(wanting).sum().backward()
    assert got is not None
    close(got, wanting.grad)
    before = len(parallel._compiled)
    other, _ = batch(3)
    parallel(other.clone().requires_grad_())
    parallel(other)
    assert len({id(compiled) for compiled in parallel._compiled.values()}) == before + 1


def test_inference_mode_around_the_first_call() -> None:
    torch.manual_seed(0)
    single = Net().double().eval()
    parallel = autopar.autoparallelize(copy.deepcopy(single), mesh=1, exact_rng=True)
    x, labels = batch(8)
    with torch.inference_mode():
        close(parallel(x), single(x))
        inside = torch.randn(3, 8, dtype=torch.float64)
        close(parallel(inside), single(inside))
    parallel.train(), single.train()
    step(parallel, single, lambda model: model(x, labels)[0])


def test_autocast_of_the_caller() -> None:
    parallel, single = pair(mesh=1)
    parallel.float(), single.float()
    x, labels = batch(8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            results = [model.eval()(x.float(), labels) for model in (parallel, single)]
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert parallel(x.float()).dtype == torch.float32


def test_a_region_without_autocast_stays_without() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.outer(x)
            with torch.autocast("cpu", enabled=False):
                return self.inner(y.float())

    model, x = Guarded(), torch.randn(4, 8)
    parallel = autopar.autoparallelize(model, mesh=1)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = parallel(x), model(x)
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got, want)


def test_the_model_is_freed() -> None:
    """Only its structure stays, which later graphs are traced from."""
    parallel, single = pair(mesh=1)
    model = copy.deepcopy(single)
    values = [weakref.ref(parameter) for parameter in model.parameters()]
    parallel = autopar.autoparallelize(model, batch(8), mesh=1, exact_rng=True)
    del model
    gc.collect()
    assert all(value() is None for value in values)
    x, labels = batch(5)
    step(parallel, single, lambda m: m(x, labels)[0])


def test_a_model_that_refers_to_itself_is_kept() -> None:
    """A copy would go on calling the original's modules."""

    class Patched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.twice = lambda x: self.fc(x) * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(x)

    model = Patched().double()
    single = copy.deepcopy(model)
    parallel = autopar.autoparallelize(model, (batch(8)[0],), mesh=1)
    single.twice = lambda x: single.fc(x) * 2
    for rows in (8, 5):
        x, _ = batch(rows)
        step(parallel, single, lambda m: m(x).square().mean())  # noqa: B023
    assert parallel._skeleton is not None and parallel._skeleton.module is model
    assert all(p.grad is None for p in model.parameters())
