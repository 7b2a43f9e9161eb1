"""Models whose sizes do not divide: right under plans drawn at random, hinted and searched."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

import autopar
from autopar.compiler import Request, Traced, lower_plan, trace_model
from autopar.ir.local import is_uniform
from autopar.ir.mesh import Mesh
from autopar.verification import verify_plan
from random_plans import random_plan
from ranks import run_ranks
from uneven_zoo import build
from zoo import Example

WORKER = Path(__file__).with_name("uneven_worker.py")
MESHES = (Mesh.of({"x": 3}), Mesh.of({"dp": 2, "tp": 2}), Mesh.of({"x": 4}))
#: Llama's RMS norm and GPT-2's loss compute in float32 by their own code.
TOLERANCES = {"mlp": 1e-9, "conv": 1e-9, "gpt2": 1e-6, "llama": 1e-6}
CASES = [(name, mesh) for name in TOLERANCES for mesh in MESHES]


@lru_cache(maxsize=1)
def _traced(name: str) -> tuple[Example, Traced]:
    torch.set_num_threads(1)
    model, call = build(name)
    request = Request.make(MESHES[0], None, None, None, "sharded")
    return (model, call), trace_model(model, (), call, request)


def check_plans(name: str, mesh: Mesh, seeds: range) -> None:
    (model, call), traced = _traced(name)
    request = Request.make(mesh, None, None, None, "sharded")
    uneven = 0
    for seed in seeds:
        plan = random_plan(traced, request, seed)
        uneven += not is_uniform(lower_plan(traced, plan, request))
        report = verify_plan(model, (), call, traced, plan, request, TOLERANCES[name])
        assert report.ok, f"seed {seed} of {name} on {mesh}:\n{report}"
    assert uneven > len(seeds) // 2


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_a_few_random_plans(name: str, mesh: Mesh) -> None:
    check_plans(name, mesh, range(4 if name in ("mlp", "conv") else 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_many_random_plans(name: str, mesh: Mesh, thorough: bool) -> None:
    check_plans(name, mesh, range(10, 26 if thorough else 15))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", ["columns and rows", "batch", "data parallel", "search"])
def test_five_hidden_units_and_a_batch_of_seven(ranks: int, kind: str) -> None:
    model, call = build("mlp")
    options = {
        "columns and rows": {
            "hints": {"fc1": ((1, 1), (ranks, 1)), "fc2": ((1, ranks), (1, ranks))}
        },
        "batch": {"hints": {"fc1": ((ranks, 1),)}},
        "data parallel": {"mode": "data_parallel"},
        "search": {},
    }[kind]
    report = autopar.verify(model, kwargs=call, mesh={"x": ranks}, **options)
    report.raise_if_failed()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_batch_smaller_than_the_mesh_leaves_ranks_with_nothing(ranks: int) -> None:
    torch.manual_seed(2)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 3)
    ).double()

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.model(x), y)

    x, y = torch.randn(3, 4).double(), torch.tensor([0, 2, 1])
    hints = {"model.0": ((ranks, 1),)}
    autopar.verify(Loss(), (x, y), mesh={"dp": ranks}, hints=hints).raise_if_failed()
    autopar.verify(Loss(), (x, y), mesh={"dp": ranks}, mode="data_parallel").raise_if_failed()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_batch_norm_over_an_uneven_batch(ranks: int) -> None:
    model, call = build("conv")
    autopar.verify(model, kwargs=call, mesh={"dp": ranks}, mode="data_parallel").raise_if_failed()


def test_the_largest_shard_is_what_memory_and_time_count() -> None:
    model, call = build("mlp")
    hints = {"fc1": ((1, 1), (2, 1)), "fc2": ((1, 2), (1, 2))}
    odd = autopar.plan(model, kwargs=call, mesh={"tp": 2}, hints=hints)
    # Rank 0 holds three of the five hidden units.
    parameters = odd.memory("none").timeline.kind_peaks["parameters"]
    assert parameters == 8 * (3 * 9 + 3 + 3 * 3 + 3)


@pytest.mark.slow
def test_training_on_three_real_ranks() -> None:
    """Losses, `full_tensor()` of parameters and gradients, local inputs, state, over gloo."""
    run_ranks(WORKER, 3, "steps", "mlp", "random_plans", "local_inputs", "tools")
