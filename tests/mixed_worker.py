"""One rank of `test_mixed_training.py`: loss scaling, what is sent, `torch.compile`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.module import ParallelModule
from autopar.passes.communication import collectives_of
from autopar.runtime.counting import Sent, count_communication
from ranks import main

STEPS = 4

#: The scale after each step: halved by the overflow of the second, doubled after two good ones.
SCALES = (256.0, 128.0, 128.0, 256.0)


class Layers(nn.Module):
    """The first parameter is whole on every rank, the second is split: see `HINTS`."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.first, self.second = nn.Parameter(torch.ones(())), nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.second(self.drop(x) * self.first)
        return nn.functional.cross_entropy(scores, target), scores


HINTS = {"second": ((1, 1), (2, 1))}


def call(step: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=random), torch.randint(12, (4,), generator=random)


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Layers(dropout)


def check_overflow(rank: int, world: int) -> None:
    """Infinities in the piece of one rank skip the step everywhere; training goes on as one."""
    parallel = autopar.autoparallelize(
        model(), call(), mesh={"tp": 2}, mode="auto", hints=HINTS, mixed_precision="fp16"
    )
    layouts = parallel.plan.parameter_layouts
    assert not layouts["first"].split_axes and layouts["second.weight"].split_axes
    single = model()
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (parallel, single))
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    for step in range(STEPS):
        loss, _ = parallel(*call(step))
        with torch.autocast("cpu", torch.float16):
            expected, _ = single(*call(step))
        torch.testing.assert_close(loss, expected, rtol=2e-3, atol=1e-3)
        scalers[0].scale(loss).backward()
        scalers[1].scale(expected).backward()
        if step == 1:
            # The last rank's piece of the second gradient, which ends the single device's, too.
            single.second.weight.grad[-1, 0] = torch.inf
            if rank == world - 1:
                grad = parallel.get_parameter("second.weight").grad
                grad.to_local()[-1, 0] = torch.inf
        for scaler, optimizer in zip(scalers, (mine, theirs), strict=True):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == SCALES[step], step
        same_parameters(parallel, single, f"after step {step}")


def check_beside_plain_parameters(rank: int, world: int) -> None:
    """One optimizer for a parallel module and a plain one: overflows of either skip the step."""
    head, x = nn.Linear(1, 1), torch.ones(4, 1)
    for of_head in (True, False, None):
        parallel = autopar.autoparallelize(
            model(), call(), mesh={"tp": 2}, hints=HINTS, mixed_precision="fp16"
        )
        optimizer = torch.optim.SGD([*parallel.parameters(), *head.parameters()], 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scaler.scale(parallel(*call())[0] + head(x).sum()).backward()
        grads = [head.weight.grad, parallel.get_parameter("second.weight").grad.to_local()]
        if of_head is not None and rank == world - 1:
            grads[not of_head][-1, 0] = torch.inf
        before = [p.detach().clone() for p in (head.weight, parallel.get_parameter("first"))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (256.0 if of_head is None else 128.0)
        after = [head.weight, parallel.get_parameter("first")]
        for old, new in zip(before, after, strict=True):
            assert bool((old == new).all()) == (of_head is not None)


def check_terms(rank: int, world: int) -> None:
    """Gradients that are terms of a sum yet are not looked at for infinities."""
    parallel = autopar.autoparallelize(
        model(), call(), mesh=world, mode="data_parallel", mixed_precision="fp16"
    )
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with parallel.no_sync():
        scaler.scale(parallel(*call())[0]).backward()
    try:
        scaler.step(optimizer)
    except autopar.OptimizerError as error:
        assert "'first' is not summed over the ranks" in str(error), error
    else:
        raise AssertionError("no error")
    scaler.scale(parallel(*call())[0]).backward()
    scaler.step(optimizer)
    scaler.update()


def check_training(rank: int, world: int) -> None:
    """bf16 data parallel and FSDP: the model's own steps, and the bytes that were planned."""
    for zero in (0, 3):
        parallel = autopar.autoparallelize(
            model(), call(), mesh=world, mode="data_parallel", zero=zero, mixed_precision="bf16"
        )
        single = model()
        mine, theirs = (torch.optim.Adam(m.parameters(), 1e-3) for m in (parallel, single))
        parallel(*call())  # before the first step the ranks compare what they hold
        for step in range(STEPS):
            with count_communication() as sent:
                loss, _ = parallel(*call(step))
                loss.backward()
            with torch.autocast("cpu", torch.bfloat16):
                expected, _ = single(*call(step))
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
            assert totals(sent.sent) == planned(parallel), (zero, step)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert all(p.dtype == torch.float32 for p in parallel.parameters())
        # Adam's first steps are of one size whatever the gradient: signs may differ near zero.
        same_parameters(parallel, single, f"zero={zero}", 2 * STEPS * 1e-3)


def check_compiled(rank: int, world: int) -> None:
    """`torch.compile` gives the module's own values and gradients, whatever crosses ranks."""
    for options in (
        {"mode": "data_parallel"},
        {"mode": "data_parallel", "zero": 3, "mixed_precision": "bf16"},
        {"mode": "auto", "hints": HINTS},
    ):
        mine, plain = (
            autopar.autoparallelize(model(0.25), call(), mesh={"tp": world}, **options)
            for _ in range(2)
        )
        run = torch.compile(mine, fullgraph=True, backend="aot_eager")
        for step in range(2):
            torch.manual_seed(10 * rank + step)
            got = run(*call(step))
            torch.manual_seed(10 * rank + step)
            want = plain(*call(step))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b.full_tensor() if isinstance(b, DTensor) else b)
            got[0].backward()
            want[0].backward()
            for name, parameter in plain.named_parameters():
                grad = mine.get_parameter(name).grad
                assert grad.placements == parameter.grad.placements
                torch.testing.assert_close(grad.to_local(), parameter.grad.to_local())


def totals(sent: list[Sent]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in sent:
        found[each.kind] += each.nbytes
    return dict(found)


def planned(parallel: ParallelModule) -> dict[str, int]:
    compiled = parallel._current("the graph")
    found: Counter[str] = Counter()
    for each in collectives_of(compiled.graph, compiled.traced.rules, compiled.plan.assignment):
        found[each.kind] += each.nbytes
    return dict(found)


def same_parameters(
    parallel: ParallelModule, single: nn.Module, what: str, tolerance: float = 1e-3
) -> None:
    for name, parameter in single.named_parameters():
        got: Any = parallel.get_parameter(name)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        error = float((got - parameter).detach().abs().max())
        assert error <= tolerance, f"{what}: {name} differs by {error}"


CHECKS = {
    "beside_plain_parameters": check_beside_plain_parameters,
    "compiled": check_compiled,
    "overflow": check_overflow,
    "terms": check_terms,
    "training": check_training,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    autopar.plan(model(), call(), mesh=1)
    main(CHECKS)
