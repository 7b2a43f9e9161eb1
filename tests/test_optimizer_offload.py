"""Optimizer state in the host's memory: the same steps bit for bit, and less on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autopar
from autopar.plans import Plan
from pretend_host import pretend_host
from ranks import run_ranks

torch.set_num_threads(1)

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Make = Callable[[Any], Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def in_groups(parameters: Any) -> Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.1}])


def step(module: nn.Module, optimizer: Optimizer, closure: bool) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        found: Tensor = module(X).square().mean()
        found.backward()
        return found

    if closure:
        optimizer.step(loss)  # type: ignore[arg-type]
    else:
        loss()
        optimizer.step()


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "groups": in_groups,
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "radam": lambda p: torch.optim.RAdam(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(model(), (X,), mesh=1, offload_optimizer=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_before(name: str, plan: Plan) -> None:
    parallel, single = autopar.autoparallelize(model(), (X,), mesh=1, plan=plan), model()
    mine, theirs = OPTIMIZERS[name](parallel.parameters()), OPTIMIZERS[name](single.parameters())
    with pretend_host(step_bytes=16 * 16 * 4) as host:
        for _ in range(4):
            groups = [list(group["params"]) for group in mine.param_groups]
            for module, optimizer in ((parallel, mine), (single, theirs)):
                step(module, optimizer, name == "lbfgs")
            assert host.holds_all(mine)
            for group, before in zip(mine.param_groups, groups, strict=True):
                assert all(a is b for a, b in zip(group["params"], before, strict=True))
            assert mine.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    for key, parameter in single.named_parameters():
        assert torch.equal(parallel.get_parameter(key), parameter), key
    if name == "adam":
        # Three tensors of state for 1 kB of parameters at a time, instead of for all of them.
        assert 0 < host.most <= 3 * 16 * 16 * 4


def test_a_step_that_fails_leaves_the_groups_whole(plan: Plan) -> None:
    parallel = autopar.autoparallelize(model(), (X,), mesh=1, plan=plan)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    before = list(optimizer.param_groups[0]["params"])
    with pretend_host(step_bytes=64):
        step(parallel, optimizer, False)
        optimizer.param_groups[0]["lr"] = "nonsense"
        with pytest.raises(TypeError):
            step(parallel, optimizer, False)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))


def test_a_run_goes_on(plan: Plan, tmp_path: Path) -> None:
    """What is saved is what the host holds, and what is loaded goes there."""
    parallel, single = autopar.autoparallelize(model(), (X,), mesh=1, plan=plan), model()
    mine, theirs = in_groups(parallel.parameters()), in_groups(single.parameters())
    with pretend_host(step_bytes=64) as host:
        for _ in range(3):
            step(parallel, mine, False)
            step(single, theirs, False)
        autopar.save_checkpoint(tmp_path / "run", parallel, mine)
        other = autopar.autoparallelize(model(), (X,), mesh=1, plan=plan)
        again = in_groups(other.parameters())
        autopar.load_checkpoint(tmp_path / "run", other, again)
        assert host.holds_all(again)
        twice = in_groups(other.parameters())
        twice.load_state_dict(again.state_dict())  # PyTorch's own way
        for _ in range(2):
            step(other, twice, False)
            step(single, theirs, False)
        assert host.holds_all(twice)
    for key, parameter in single.named_parameters():
        assert torch.equal(other.get_parameter(key), parameter), key


def test_others_are_left_alone() -> None:
    parallel = autopar.autoparallelize(model(), (X,), mesh=1)
    optimizer = torch.optim.Adam(parallel.parameters())
    with pretend_host(step_bytes=64) as host:
        step(parallel, optimizer, False)
    assert not len(host.held)


def test_the_plan_says_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mesh": {"dp": 2}, "mode": "data_parallel", "device": "h100"}
    plain = autopar.plan(model(), (X,), **options)
    plan = autopar.plan(model(), (X,), offload_optimizer=True, **options)
    nbytes = 2 * sum(p.numel() * 4 for p in model().parameters())
    (row,) = plan.kept
    assert (row.saves, row.host) == (nbytes, nbytes) and row.seconds > 0
    assert "between steps: offload optimizer state (adam): saves 3.5 KiB" in str(plan)
    before, after = plain.memory(), plan.memory()
    assert (before.host, after.host) == (0, nbytes)
    assert "optimizer state" in str(after)
    # Between forward and backward the state is gone; in the step the part that it needs is there.
    end = before.timeline.nodes
    assert before.timeline.profile["optimizer"][end] == nbytes
    assert after.timeline.profile["optimizer"][end] == 0
    assert after.timeline.profile["optimizer"][-1] == nbytes  # one part is all, of so few
    assert plan.memory("sgd").host == 0
    here = autopar.plan(model(), (X,), offload_optimizer=True, **{**options, "device": "cpu"})
    (row,) = here.kept
    assert (row.saves, row.host, row.seconds) == (0, nbytes, 0), "a CPU's memory is the host's"
    assert here.memory().peak == before.peak
    assert "in the host's memory, which is the device's: 3.5 KiB" in str(here.memory())
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").policies == plan.policies
    limit = before.peak - 1
    with pytest.raises(autopar.PlanError, match="offload_optimizer: expected True or False"):
        autopar.plan(model(), (X,), offload_optimizer=1, **options)  # type: ignore[arg-type]
    large = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64)))
    batch = (torch.randn(512, 512),)
    whole = autopar.plan(large, batch, **options).memory()
    limit = int(whole.peak * 0.8)
    with pytest.raises(autopar.MemoryLimitError):
        autopar.plan(large, batch, memory=limit, **options)
    fits = autopar.plan(large, batch, memory=limit, offload_optimizer=True, **options)
    assert fits.memory().peak <= limit


def test_on_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_TEST_FOLDER", str(tmp_path))
    run_ranks(Path(__file__).with_name("state_worker.py"), 2, "offloaded")
