"""Plans under a memory limit: they fit, they compute the same, and what can't fit is said."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import Request, trace_model
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.baselines import baseline_assignments
from autopar.passes.memory.limit import timeline_of
from autopar.passes.place_hints import Placed
from autopar.passes.prices import DevicePrices
from zoo import build

MESH = {"dp": 2, "tp": 2}


class Wide(nn.Module):
    """Weights that outweigh the activations, so that splitting them is what saves memory."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Lookup(nn.Module):
    """An embedding whose result is larger than what follows needs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(ids)))).square().mean()


def plan(model: nn.Module, call: dict[str, Any], **options: Any) -> autopar.Plan:
    return autopar.plan(model, (), call, mesh=MESH, device="cpu", **options)


def test_a_limit_that_the_cheapest_plan_meets_changes_nothing() -> None:
    model, call = build("mlp")
    free = plan(model, call)
    held = plan(model, call, memory=free.memory().peak)
    assert held.assignment.strategies == free.assignment.strategies
    assert held.seconds == free.seconds


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_plan_under_a_limit_fits_and_computes_the_same(share: float) -> None:
    torch.manual_seed(0)
    model, call = Wide(), {"x": torch.randn(8, 64)}
    free = plan(model, call)
    limit = int(free.memory("momentum").peak * share)
    held = plan(model, call, memory=limit, optimizer="momentum")
    assert held.memory("momentum").peak <= limit
    assert held.seconds >= free.seconds
    assert held.bound <= held.seconds
    autopar.verify(model, (), call, mesh=MESH, plan=held).raise_if_failed()


def test_an_embedding_that_outgrows_the_limit_is_not_gathered() -> None:
    call = {"ids": torch.zeros(32, 512, dtype=torch.long)}
    mesh = {"x": 4}

    def planned(**options: Any) -> autopar.Plan:
        return autopar.plan(Lookup(), (), call, mesh=mesh, device="h100", **options)

    split = planned(mode="data_parallel").memory()
    held = planned(memory=int(split.peak * 1.01))
    report = held.memory()
    assert report.peak <= split.peak * 1.01
    assert report.timeline.kind_peaks["activations"] > 0
    whole = 32 * 512 * 64 * 4
    looked_up = [
        item
        for item in report.timeline.held
        if item.module == "embed" and item.kind in ("activations", "gathered")
        and item.name.startswith("embedding")
    ]  # fmt: skip
    assert looked_up and all(item.nbytes < whole for item in looked_up)


def test_no_expert_that_fits_is_cheaper() -> None:
    model, call = Wide(), {"x": torch.randn(64, 64)}
    request = Request.make(Mesh.of(MESH), "auto", None, "h100", "auto")
    traced = trace_model(model, (), call, request)
    free = autopar.plan(model, (), call, mesh=MESH, device="h100")
    limit = int(free.memory().peak * 0.7)
    held = autopar.plan(model, (), call, mesh=MESH, device="h100", memory=limit)
    prices = DevicePrices(request.mesh, request.device)
    experts = baseline_assignments(Placed(traced.graph), traced.rules, request.mesh, prices)
    asked = Request.make(Mesh.of(MESH), "auto", None, "h100", "auto", limit).limit
    assert asked is not None
    for found in experts.found.values():
        graph = pipeline.lower(traced.graph, found.assignment, request.device)
        if timeline_of(graph, asked).peak <= limit:
            assert held.seconds <= found.solution.cost * (1 + 1e-9)


def test_a_limit_nothing_meets_says_what_is_needed_and_what_would_help() -> None:
    model, call = Wide(), {"x": torch.randn(8, 64)}
    said = r"1000 B: no plan.*smallest peak found is .* of layers\.\d.*would help: an optimizer"
    with pytest.raises(autopar.MemoryLimitError, match=said):
        plan(model, call, memory=1000)


def test_the_smallest_peak_an_error_names_can_be_had() -> None:
    model, call = Wide(), {"x": torch.randn(8, 64)}
    free = plan(model, call).memory().peak
    low, high = 1000, free  # refused, and granted
    for _ in range(4):
        limit = (low + high) // 2
        try:
            assert plan(model, call, memory=limit).memory().peak <= limit
            high = limit
        except autopar.MemoryLimitError:
            low = limit
    assert low < high < free


@pytest.mark.slow
def test_a_limit_does_not_make_planning_long() -> None:
    model, call = build("gpt2")
    free = plan(model, call).memory().peak
    began = time.perf_counter()
    with pytest.raises(autopar.MemoryLimitError):
        plan(model, call, memory=free // 50)
    assert time.perf_counter() - began < 120  # a budget of 20 s, on a busy machine


@pytest.mark.parametrize("size", ["80 parsecs", 0, -1, 1.5, "GB"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    model, call = build("mlp")
    with pytest.raises(autopar.PlanError, match="memory size"):
        plan(model, call, memory=size)


def test_an_optimizer_nobody_knows_is_refused() -> None:
    model, call = build("mlp")
    with pytest.raises(autopar.PlanError, match="optimizer"):
        plan(model, call, memory="1GB", optimizer="lion")
