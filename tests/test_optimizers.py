"""An optimizer that was made from the model does not train the parallel module in silence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from ranks import run_ranks
from recompile_worker import batch, close

torch.set_num_threads(1)


def linear() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    return model, copy.deepcopy(model)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_of_the_model_is_told(lazy: bool, first: bool) -> None:
    (model, _), (x, _) = linear(), batch(8)
    before = torch.optim.SGD(model.parameters(), lr=0.5)
    parallel = autopar.autoparallelize(model, None if lazy else (x,), mesh=1)
    optimizer = before if first else torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(parallel, x).backward()
    with pytest.raises(autopar.OptimizerError, match=r"SGD.*'weight'.*hand_over"):
        optimizer.step()


def test_the_model_may_be_trained_beside_the_parallel_one() -> None:
    (model, _), (x, _) = linear(), batch(8)
    parallel = autopar.autoparallelize(model, (x,), mesh=1)
    ours = torch.optim.SGD(parallel.parameters(), lr=0.5)
    theirs = torch.optim.SGD(model.parameters(), lr=0.5)
    theirs.step()  # not run yet: nothing to object to
    for _ in range(2):
        for module, optimizer in ((parallel, ours), (model, theirs)):
            optimizer.zero_grad()
            loss_of(module, x).backward()
            optimizer.step()
    close(parallel.get_parameter("weight"), model.get_parameter("weight"))
    lbfgs = torch.optim.LBFGS(model.parameters())
    model.zero_grad()

    def closure() -> Any:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    lbfgs.step(closure)


@pytest.mark.parametrize("steps", [0, 2])
def test_hand_over(steps: int) -> None:
    """Groups, options and the state of earlier steps go with it."""
    (model, single), (x, _) = linear(), batch(8)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.2}]
        return torch.optim.AdamW(groups)

    optimizer, theirs = make(model), make(single)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss_of(module, x).backward()
        optimizer.step()

    for _ in range(steps):
        train(model, optimizer)
        train(single, theirs)
    parallel = autopar.autoparallelize(model, (x,), mesh=1)
    assert autopar.hand_over(optimizer, parallel) is optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for _ in range(2):
        train(parallel, optimizer)
        train(single, theirs)
    for name, parameter in single.named_parameters():
        close(parallel.get_parameter(name), parameter)


def test_hand_over_of_a_strange_optimizer() -> None:
    (model, other), (x, _) = linear(), batch(8)
    parallel = autopar.autoparallelize(model, (x,), mesh=1)
    optimizer = torch.optim.SGD(other.parameters())
    with pytest.raises(autopar.OptimizerError, match="none of the parameters"):
        autopar.hand_over(optimizer, parallel)
    lazy = autopar.autoparallelize(linear()[0], mesh=1)
    with pytest.raises(autopar.NotCompiledError, match="first call"):
        autopar.hand_over(optimizer, lazy)


def test_steps_that_see_whole_tensors() -> None:
    run_ranks(
        Path(__file__).with_name("whole_steps_worker.py"), 2, "steps", "closure", limit_s=480.0
    )
