"""`verify`: says that a right plan is right, and finds what is wrong with a wrong one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import verification
from autopar.runtime import collectives, simulate
from autopar.runtime.groups import Group
from autopar.verify_report import Check, Report
from devices import slow_device
from zoo import build

GRID = {"dp": 2, "tp": 2}
CALL: dict[str, Tensor] = build("mlp")[1]
#: A sum over tp behind fc2, gradients summed over dp.
MEGATRON = {"fc1": ((2, 1), (2, 1)), "fc2": ((2, 2), (1, 2))}

torch.set_num_threads(1)


def mlp() -> nn.Module:
    return build("mlp")[0]


def verify(model: nn.Module | None = None, **options: Any) -> Report:
    return autopar.verify(model or mlp(), **{"kwargs": CALL, "mesh": GRID, **options})


# -- the report -----------------------------------------------------------------------------------


def test_report_of_a_right_plan() -> None:
    report = verify(hints=MEGATRON)
    assert report.ok and report.max_error < 1e-12 and report.disagreement == 0.0
    assert report.tolerance == 1e-9
    assert [(c.kind, c.name) for c in report.checks] == [
        ("output", "0"),
        ("output", "1"),
        ("gradient", "fc1.weight"),
        ("gradient", "fc1.bias"),
        ("gradient", "fc2.weight"),
        ("gradient", "fc2.bias"),
    ]
    single = mlp()
    loss, scores = single(**CALL)
    loss.backward()
    norms = {c.name: c.expected_norm for c in report.checks}
    assert norms["1"] == pytest.approx(scores.norm().item())
    assert norms["fc1.weight"] == pytest.approx(single.fc1.weight.grad.norm().item())
    for check in report.checks:
        assert check.got_norm == pytest.approx(check.expected_norm)
    report.raise_if_failed()


def test_report_prints_as_a_table() -> None:
    lines = str(verify(hints=MEGATRON)).splitlines()
    assert lines[0].split() == ["kind", "name", "expected", "norm", "got", "norm", "error"]
    assert len(lines) == 8
    assert lines[3].startswith("gradient  fc1.weight ")
    assert lines[-1].startswith("equal: largest error ")
    assert "tolerance 1e-09" in lines[-1]


@pytest.mark.parametrize("error", [0.5, float("nan"), float("inf")])
def test_report_of_a_wrong_tensor(error: float) -> None:
    right = Check("output", "0", 1.0, 1.0, 0.0)
    wrong = Check("gradient", "fc1.weight", 1.0, 2.0, error)
    report = Report(verify().plan, (right, wrong, right), 0.0, 1e-9)
    assert not report.ok
    assert [line for line in str(report).splitlines() if "<-- differs" in line] == [
        line for line in str(report).splitlines() if "fc1.weight" in line
    ]
    assert "DIFFERENT" in str(report)
    with pytest.raises(autopar.VerificationError, match=r"gradient 'fc1.weight' is off by"):
        report.raise_if_failed()


def test_report_of_copies_that_differ() -> None:
    report = Report(verify().plan, (Check("output", "0", 1.0, 1.0, 0.0),), 0.25, 1e-9)
    assert not report.ok and report.max_error == 0.25
    with pytest.raises(autopar.VerificationError, match=r"ranks that hold the same .* 2.50e-01"):
        report.raise_if_failed()


def test_tolerance_is_by_precision() -> None:
    assert verify(tolerance=1e-3).tolerance == 1e-3
    single = {"x": CALL["x"].float(), "target": CALL["target"]}
    assert verify(mlp().float(), kwargs=single).tolerance == 1e-4
    half = nn.Linear(8, 8).bfloat16()
    report = autopar.verify(half, (CALL["x"].bfloat16(),), mesh=2, hints={"": ((1, 2), (1, 2))})
    assert report.tolerance == 5e-2 and report.ok


# -- what is wrong is found -----------------------------------------------------------------------


def broken_all_reduce(self: Group, x: Tensor, op: str = "sum") -> Tensor:
    """Every rank keeps its own term."""
    return x.detach().clone()


def broken_on_one_rank(self: Group, x: Tensor, op: str = "sum") -> Tensor:
    total = real_all_reduce(self, x, op)
    return total + 1e-3 if self.index == 1 else total


def broken_to_nan(self: Group, x: Tensor, op: str = "sum") -> Tensor:
    total = real_all_reduce(self, x, op)
    return total * float("nan") if self.index == 1 else total


def broken_gather(self: Group, x: Tensor, dim: int, *rest: Any) -> Tensor:
    """What this rank holds is lost."""
    whole = real_all_gather(self, x, dim, *rest)
    self.block(whole, dim).zero_()
    return whole


real_all_reduce, real_all_gather = Group.all_reduce, Group.all_gather


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("all_reduce", broken_all_reduce),
        ("all_reduce", broken_on_one_rank),
        ("all_reduce", broken_to_nan),
        ("all_gather", broken_gather),
    ],
)
def test_a_wrong_collective_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: Callable[..., Tensor]
) -> None:
    plan = autopar.plan(
        mlp(), kwargs=CALL, mesh=GRID, hints=MEGATRON, device=slow_device(), outputs="full"
    )
    assert verify(plan=plan, hints=MEGATRON).ok
    monkeypatch.setattr(Group, method, broken)
    if method == "all_reduce":  # that of the loss is only started where it is reached
        monkeypatch.setattr(Group, "start_all_reduce", lambda *given: partial(broken, *given))
    report = verify(plan=plan, hints=MEGATRON)
    assert not report.ok
    with pytest.raises(autopar.VerificationError):
        report.raise_if_failed()


def test_a_missing_gradient_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward is right; the parameters' gradients are those of a part of the batch."""
    monkeypatch.setattr(
        collectives.ToReplicate, "dual", property(lambda self: collectives.ToInvariant(self.group))
    )
    report = verify(mode="data_parallel")
    wrong = [c.name for c in report.checks if c.error > report.tolerance]
    assert wrong == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert not report.ok and report.disagreement > 0


def test_a_buffer_that_is_not_updated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_updates(*args: Any, **kwargs: Any) -> simulate.Simulated:
        return replace(simulate.simulate(*args, **kwargs), updates={})

    monkeypatch.setattr(verification, "simulate", without_updates)
    report = autopar.verify(Normed(), (torch.randn(8, 4, dtype=torch.float64),), mesh=2)
    wrong = {c.name for c in report.checks if c.error > report.tolerance}
    assert wrong == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "calls",
    }  # fmt: skip


# -- kinds of models ------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm with running statistics, and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


def test_updated_buffers_are_compared() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    report = autopar.verify(Normed(), (x,), mesh=2, hints={"norm": ((2, 1),)})
    report.raise_if_failed()
    buffers = {c.name: c.expected_norm for c in report.checks if c.kind == "buffer"}
    assert set(buffers) == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "calls",
    }  # fmt: skip
    assert buffers["calls"] == 1.0
    report = autopar.verify(Normed().eval(), (x,), mesh=2)
    assert [c.name for c in report.checks if c.kind == "buffer"] == ["calls"]
    report.raise_if_failed()


def test_without_a_loss_every_output_gets_a_gradient() -> None:
    """Outputs [8, 4] and [4]: both pass random gradients back, the mask passes none."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4).double(), nn.Linear(8, 4).double()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "mask": x > 0, "more": [self.b(x).sum(0), 7]}

    report = autopar.verify(Two(), (CALL["x"],), mesh=GRID, hints={"b": ((2, 1), (2, 1))})
    report.raise_if_failed()
    assert [c.name for c in report.checks if c.kind == "output"] == ["0", "1", "2"]
    gradients = {c.name: c.expected_norm for c in report.checks if c.kind == "gradient"}
    assert set(gradients) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert all(norm > 0 for norm in gradients.values())


def test_gradients_of_inputs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    x = CALL["x"].clone().requires_grad_()
    layer, hints = nn.Linear(8, 4).double(), {"": ((1, 1), (2, 1))}
    report = autopar.verify(layer, (x,), mesh=2, hints=hints)
    report.raise_if_failed()
    assert report.checks[-1].name == "input input" and report.checks[-1].expected_norm > 0
    assert x.grad is None
    monkeypatch.setattr(Group, "all_reduce", broken_all_reduce)
    report = autopar.verify(layer, (x,), mesh=2, hints=hints)
    assert "input input" in [c.name for c in report.checks if c.error > 1e-9]


def test_frozen_and_unused_parameters() -> None:
    model = mlp()
    model.fc1.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.spare = nn.Linear(3, 3)
    report = verify(model, hints=MEGATRON)
    report.raise_if_failed()
    names = [c.name for c in report.checks if c.kind == "gradient"]
    assert names == ["fc1.bias", "fc2.weight", "fc2.bias"]


def test_dropout_draws_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).double()
    hints = {"0": ((2, 1), (2, 1)), "2": ((2, 2), (1, 2))}
    report = autopar.verify(model, (CALL["x"],), mesh=GRID, hints=hints)
    report.raise_if_failed()
    again = autopar.verify(model, (CALL["x"],), mesh=GRID, hints=hints)
    assert [c.got_norm for c in again.checks] == [c.got_norm for c in report.checks]
    dry = autopar.verify(model.eval(), (CALL["x"],), mesh=GRID, hints=hints)
    dry.raise_if_failed()
    assert dry.checks[0].got_norm != report.checks[0].got_norm


# -- the model comes out as it went in ------------------------------------------------------------


def test_the_model_is_unchanged() -> None:
    model = mlp()
    model.drop = nn.Dropout(0.5).eval()
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    model.fc2.weight.grad = torch.ones_like(model.fc2.weight)  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    state, count = torch.get_rng_state(), torch.get_num_threads()
    verify(model, hints=MEGATRON).raise_if_failed()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == count
    assert model.config.use_cache is True
    assert [m.training for m in model.modules()] == flags
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, parameter in model.named_parameters():
        if name == "fc2.weight":
            assert parameter.grad is not None and bool((parameter.grad == 1).all())
        else:
            assert parameter.grad is None, name
    assert not any(value.requires_grad for value in CALL.values())


def test_buffers_of_the_model_are_unchanged() -> None:
    model = Normed()
    autopar.verify(model, (torch.randn(8, 4, dtype=torch.float64),), mesh=2).raise_if_failed()
    assert model.calls.item() == 0 and bool((model.norm.running_mean == 0).all())
