"""Mistakes in loss scaling end in errors that name them, with every gradient as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import autopar

torch.set_num_threads(1)


class Run:
    """A module with scaled gradients, its optimizer and its scaler."""

    def __init__(self, mixed: str | None = "fp16", optimizer: Any = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(8, 4)
        self.model = nn.Linear(4, 2)
        self.parallel = autopar.autoparallelize(
            self.model, (self.x,), mesh=1, mixed_precision=mixed
        )
        self.optimizer = optimizer(self.parallel.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def backward(self) -> Run:
        self.scaler.scale(self.parallel(self.x).float().square().mean()).backward()
        return self

    def unscaled(self) -> Run:
        self.backward().scaler.unscale_(self.optimizer)
        return self

    def stepped(self) -> Run:
        self.backward().scaler.step(self.optimizer)
        return self

    def cleared(self) -> Run:
        self.optimizer.zero_grad()
        return self

    def state(self) -> list[Tensor]:
        parameters = list(self.parallel.parameters())
        return [t.detach().clone() for p in parameters for t in (p, p.grad) if t is not None]


def in_no_sync(run: Run) -> None:
    with run.parallel.no_sync(), run.parallel.no_sync():
        pass


@pytest.mark.parametrize(
    ("make", "do", "words"),
    [
        (lambda: Run().backward(), lambda r: r.optimizer.step(), r"SGD.step.*still multiplied"),
        (
            lambda: Run().backward(),
            lambda r: clip_grad_norm_(r.parallel.parameters(), 1.0),
            "clipping: .*scaler.unscale_",
        ),
        (
            lambda: Run().backward(),
            lambda r: nn.utils.clip_grad_value_(r.parallel.parameters(), 1.0),
            "clipping: .*scaler.unscale_",
        ),
        (lambda: Run().unscaled(), lambda r: r.scaler.unscale_(r.optimizer), "divided .*already"),
        (lambda: Run().stepped(), lambda r: r.scaler.step(r.optimizer), r"step: .*scaler.update"),
        (lambda: Run().stepped(), lambda r: r.scaler.unscale_(r.optimizer), "unscale_: .*update"),
        (lambda: Run().backward(), lambda r: r.scaler.update(), "update: no optimizer has stepped"),
        (Run, lambda r: r.scaler.step(r.optimizer), "step: nothing was scaled"),
        (Run, lambda r: r.scaler.update(), "no optimizer has stepped"),
        (
            lambda: Run().backward().cleared(),
            lambda r: r.scaler.step(r.optimizer),
            "none of the parameters .* has a gradient",
        ),
        (lambda: Run("bf16").backward(), lambda r: r.scaler.step(r.optimizer), "need no scaling"),
        (
            lambda: Run().backward(),
            lambda r: r.scaler.step(torch.optim.SGD(r.model.parameters())),
            "'weight' is one of its parameters.*hand_over",
        ),
    ],
)
def test_mistakes(make: Callable[[], Run], do: Callable[[Run], Any], words: str) -> None:
    run = make()
    before = run.state()
    with pytest.raises(autopar.OptimizerError, match=words):
        do(run)
    assert all(torch.equal(a, b) for a, b in zip(run.state(), before, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_right_is_left_alone(fused: bool) -> None:
    """Accumulation, clipping after `unscale_`, skipped steps and fused steps go on as ever."""
    run = Run(optimizer=lambda p, lr: torch.optim.Adam(p, lr=lr, fused=fused))
    single = nn.Linear(4, 2)
    single.load_state_dict(run.model.state_dict())
    theirs = torch.optim.Adam(single.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        for module, optimizer, scaling in (
            (run.parallel, run.optimizer, run.scaler),
            (single, theirs, scaler),
        ):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.float16):
                    loss = module(run.x).float().square().mean()
                scaling.scale(loss).backward()
            if step:
                scaling.unscale_(optimizer)
                clip_grad_norm_(module.parameters(), 0.1)
                clip_grad_value_(module.parameters(), 0.05)
            scaling.step(optimizer)
            scaling.update()
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(run.parallel.get_parameter(name), parameter)
    run.optimizer.step()  # nothing is scaled after the update


def test_other_models_are_not_looked_at() -> None:
    Run()
    model, scaler = nn.Linear(4, 2), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_an_optimizer_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = autopar.autoparallelize(model, (torch.ones(3, 4),), mesh=1)
    autopar.initialise(parallel)
    parallel(torch.ones(3, 4)).sum().backward()
    with pytest.raises(autopar.OptimizerError, match=r"'weight'.*hand_over"):
        early.step()
    before = parallel.get_parameter("weight").detach().clone()
    autopar.hand_over(early, parallel).step()
    assert not torch.equal(parallel.get_parameter("weight"), before)


def test_no_sync_twice() -> None:
    with pytest.raises(autopar.AutoparError, match="inside one already"):
        in_no_sync(Run())
