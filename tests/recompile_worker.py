"""One rank of `test_recompile.py`: calls of many kinds, on real processes, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

import autopar
from devices import slow_device
from ranks import main

CLASSES = 12


class Net(nn.Module):
    """Two layers and dropout; a mean loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.fc2(self.drop(torch.relu(self.fc1(x))))
        if labels is None:
            return scores
        return nn.functional.cross_entropy(scores, labels), scores


def batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def pair(rows: int = 8, **options: Any) -> tuple[autopar.ParallelModule, nn.Module]:
    torch.manual_seed(0)
    single = Net().double()
    options = {"device": slow_device(), "exact_rng": True, "outputs": "full", **options}
    return autopar.autoparallelize(copy.deepcopy(single), batch(rows), **options), single


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(whole(got).detach(), want.detach(), rtol=1e-9, atol=1e-9)


def step(parallel: nn.Module, single: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
    """One SGD step of both on the loss that `call` gives; loss, gradients, weights agree."""
    losses = []
    for model in (parallel, single):
        torch.manual_seed(7)
        loss = call(model)
        losses.append(loss)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
    close(*losses)
    for (name, ours), (other, theirs) in zip(
        parallel.named_parameters(), single.named_parameters(), strict=True
    ):
        assert name == other and (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            close(ours.grad, theirs.grad)
        close(ours, theirs)


def check_last_batch(rank: int, world: int) -> None:
    """Smaller batches after the example's: equal to one device, compiled once each."""
    parallel, single = pair()
    for rows in (8, 5, 8, 5, 1):
        x, labels = batch(rows)
        step(parallel, single, lambda model: model(x, labels)[0])  # noqa: B023
    assert len(parallel._compiled) == 3


def check_labels_and_modes(rank: int, world: int) -> None:
    """Training and evaluation, with and without labels, alternate."""
    parallel, single = pair()
    x, labels = batch(8)
    for _ in range(2):
        step(parallel, single, lambda model: model(x, labels)[0])
        step(parallel, single, lambda model: model(x).square().mean())
        parallel.eval(), single.eval()
        with torch.no_grad():
            close(parallel(x), single(x))
            for ours, theirs in zip(parallel(x, labels=labels), single(x, labels), strict=True):
                close(ours, theirs)
        parallel.train(), single.train()
    assert len(parallel._compiled) == 4


def check_state(rank: int, world: int) -> None:
    """Parameters frozen and thawed, another dtype, autocast."""
    parallel, single = pair()
    x, labels = batch(8)
    step(parallel, single, lambda model: model(x, labels)[0])
    for model in (parallel, single):
        model.get_parameter("fc1.weight").requires_grad_(False)
    step(parallel, single, lambda model: model(x, labels)[0])
    assert parallel.get_parameter("fc1.weight").grad is None
    for model in (parallel, single):
        model.get_parameter("fc1.weight").requires_grad_(True)
    step(parallel, single, lambda model: model(x, labels)[0])
    held = {name: id(p) for name, p in parallel.named_parameters()}
    parallel.float(), single.float()
    assert held == {name: id(p) for name, p in parallel.named_parameters()}
    assert parallel.get_parameter("fc1.weight").dtype == torch.float32
    losses = []
    for model in (parallel, single):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(x.float(), labels)[0])
        assert losses[-1].dtype == torch.float32
    torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-3)
    parallel.double(), single.double()
    step(parallel, single, lambda model: model(x, labels)[0])


def check_local_inputs(rank: int, world: int) -> None:
    """Pieces serve the example's shapes in every mode; DTensors any shape and layout."""
    parallel, single = pair(mode="data_parallel", inputs="local")
    mesh = parallel.get_parameter("fc1.weight").device_mesh
    x, labels = batch(8)
    here = (x.chunk(world)[rank], labels.chunk(world)[rank])
    step(parallel, single, lambda m: m(*(here if m is parallel else (x, labels)))[0])
    parallel.eval(), single.eval()
    close(parallel(*here)[0], single(x, labels)[0])
    close(parallel(here[0]), single(x))
    parallel.train(), single.train()
    try:
        parallel(here[0][:1], here[1][:1])
    except autopar.InputError as error:
        assert "x: expected shape" in str(error) and "DTensor" in str(error)
    else:
        raise AssertionError("a piece of another size was taken")
    for rows in (8, 5):
        x, labels = batch(rows)
        for placement in (Shard(0), Replicate()):
            given = [distribute(t, mesh, [placement]) for t in (x, labels)]
            step(parallel, single, lambda m: m(*(given if m is parallel else (x, labels)))[0])  # noqa: B023


def check_late_argument(rank: int, world: int) -> None:
    """With shapes="error" another kind of call is refused everywhere alike, and nothing hangs."""
    parallel, single = pair(shapes="error")
    x, labels = batch(5)
    for _ in range(2):
        try:
            parallel(x, labels)
        except autopar.InputError as error:
            assert "x: expected shape (8, 8), got (5, 8)" in str(error)
        else:
            raise AssertionError("a smaller batch was taken")
        x8, labels8 = batch(8)
        step(parallel, single, lambda model: model(x8, labels8)[0])  # noqa: B023
    parallel.eval(), single.eval()
    close(parallel(x), single(x))


def check_seeds(rank: int, world: int) -> None:
    """Exact random numbers need ranks that are seeded alike."""
    parallel, _ = pair()
    torch.manual_seed(rank)
    try:
        parallel(*batch(8))
    except autopar.DesyncError as error:
        assert "random number generator" in str(error) and "torch.manual_seed" in str(error)
    else:
        raise AssertionError("ranks that were seeded apart drew for one tensor")


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ranks inherit what is loaded here: the compiler that tracing needs.
    autopar.plan(Net().double(), batch(8), mesh=1)
    main(CHECKS)
