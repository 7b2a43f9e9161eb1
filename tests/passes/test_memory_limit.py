"""Plans under a memory limit: they fit, they compute the same, and what can't fit is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from zoo import build

MESH = {"dp": 2, "tp": 2}


class Wide(nn.Module):
    """Weights that outweigh the activations, so that splitting them is what saves memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


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


def test_a_limit_nothing_meets_says_what_is_needed() -> None:
    model, call = Wide(), {"x": torch.randn(8, 64)}
    with pytest.raises(autopar.MemoryLimitError, match=r"1000 B.*at least \d"):
        plan(model, call, memory=1000)


@pytest.mark.parametrize("size", ["80 parsecs", 0, -1, 1.5, "GB"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    model, call = build("mlp")
    with pytest.raises(autopar.PlanError, match="memory size"):
        plan(model, call, memory=size)


def test_an_optimizer_nobody_knows_is_refused() -> None:
    model, call = build("mlp")
    with pytest.raises(autopar.PlanError, match="optimizer"):
        plan(model, call, memory="1GB", optimizer="lion")
