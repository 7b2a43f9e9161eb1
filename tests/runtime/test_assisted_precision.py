"""Half precision: splitting an assisted dimension loses no more than the unsplit operator does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.rule import strategies
from autopar.ir.rules import rule_for
from harness import gather, make_case, make_trial, run_trials
from samples.sample import Sample, integers, normal, positive

MESH = Mesh.of({"a": 2})

_X = (normal(16, 256, grad=False) * 3 + 5).requires_grad_()
_W, _B = positive(256), normal(256)
_IDS = integers(256, 16)

_CALLS = {
    "layer_norm": ("aten.layer_norm.default", (_X, [256], _W, _B), "d0"),
    "rms_norm": ("aten.rms_norm.default", (_X, [256], _W), "d0"),
    "softmax": ("aten.softmax.int", (_X, 1), "c"),
    "log_softmax": ("aten.log_softmax.int", (_X, 1), "c"),
    "logsumexp": ("aten.logsumexp.default", (_X, [1]), "r1"),
    "std": ("aten.std.dim", (_X, [1]), "r1"),
    "var": ("aten.var.dim", (_X, [1]), "r1"),
    "class-split loss": ("aten.cross_entropy_loss.default", (_X, _IDS), "c"),
    "batch-split loss": ("aten.cross_entropy_loss.default", (_X, _IDS, _W.detach()), "n"),
    "batch_norm": (
        "aten.batch_norm.default", (_X, _W, _B, None, None, True, 0.1, 1e-5, False), "b",
    ),
}  # fmt: skip


def _results(sample: Sample, factor: str) -> tuple[Tensor, Tensor]:
    """The first result of the call with `factor` split over two ranks, joined, and unsplit."""
    case = make_case(sample)
    rule = rule_for(case.node)
    (strategy,) = (s for s in strategies(rule, MESH, grad=True) if s.role["a"] == factor)
    trial = make_trial(case, rule, strategy, MESH)
    ranks = run_trials(case, [trial], MESH)
    pieces = {(rank,): results[0] for rank, [(results, _)] in enumerate(ranks)}
    return gather(pieces, trial.result_layouts[0], MESH, sample.name), case.results[0]


def _to(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        a.detach().to(dtype).requires_grad_(a.requires_grad)
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for a in args
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _CALLS)
def test_splitting_is_as_precise_as_not_splitting(name: str, dtype: torch.dtype) -> None:
    op, args, factor = _CALLS[name]
    low = _to(args, dtype)
    exact = make_case(Sample(op, _to(low, torch.float64))).results[0]
    split, unsplit = _results(Sample(op, low), factor)
    assert split.dtype == unsplit.dtype == dtype

    def error(y: Tensor) -> float:
        return (y.double() - exact).abs().max().item()

    # One rounding to the result's own type is allowed for, where the unsplit operator is lucky.
    step = torch.finfo(dtype).eps * exact.abs().max().item()
    assert error(split) <= 1.5 * error(unsplit) + step
