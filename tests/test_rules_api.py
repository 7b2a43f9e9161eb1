"""Rules for users: declared by hand, checked, kept in files; models with operators of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import custom_operators as ops
from autopar.compiler import Request, trace_model
from autopar.ir import discovered as kept
from autopar.ir.rules.registry import register_users
from random_plans import random_plan

ENERGY = "autopar_test.energy.default"


@pytest.fixture(autouse=True)
def _rules_forgotten() -> Iterator[None]:
    yield
    for op in (ops.energy, ops.fused_gate, ops.windowed_attention, ops.echo, ops.jitter):
        register_users(str(op._opoverload), None)


class Gated(nn.Module):
    """One layer around operators that the compiler does not know."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.decay = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y, deviation = ops.row_norm(x, self.norm_weight, self.norm_bias, 1e-5)
        q, k, v = self.qkv(y).chunk(3, -1)
        x = x + self.out(ops.windowed_attention(q, k, v, self.heads, 3))
        x = ops.fused_gate(x, self.gate(x), self.scale)
        # Not contiguous, and a list of tensors.
        scanned = ops.decaying_scan([x, x.flip(-1).mT.mT], self.decay)
        return ops.energy(scanned, x).square().mean() + deviation.mean()


def _model() -> tuple[Gated, Tensor]:
    torch.manual_seed(0)
    return Gated(), torch.randn(4, 8, 16)


def _notes(plan: autopar.Plan, op: str) -> list[str]:
    return [note for note in plan.notes if note.startswith(f"autopar_test.{op}")]


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_with_its_own_operators_is_split_and_equal(mesh: dict[str, int]) -> None:
    model, x = _model()
    report = autopar.verify(
        model, (x,), mesh=mesh, mode="data_parallel" if len(mesh) == 1 else None
    )
    report.raise_if_failed()
    (note,) = _notes(report.plan, "energy")
    assert "may be split by a rule that is not the compiler's" in note
    assert 'discovered: "a b c, a b c -> a b"' in note


def test_data_parallelism_splits_the_batch_of_every_operator() -> None:
    model, x = _model()
    plan = autopar.plan(model, (x,), mesh={"dp": 2}, mode="data_parallel")
    rows = [row for row in plan.rows if row.operator.startswith("autopar_test.")]
    assert len(rows) == 5
    assert all("@dp" in row.inputs[0] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_of_a_model_with_its_own_operators_are_equal(seed: int) -> None:
    model, x = _model()
    mesh = autopar.Mesh.of({"a": 2, "b": 2})
    request = Request.make(mesh, None, None, None, "full")
    plan = random_plan(trace_model(model, (x,), {}, request), request, seed)
    autopar.verify(model, (x,), mesh=mesh, plan=plan).raise_if_failed()


def test_an_operator_that_is_not_split_is_noted_with_the_reason() -> None:
    class Jittered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.jitter(x)

    plan = autopar.plan(Jittered(), (torch.randn(4, 6),), mesh={"dp": 2})
    (note,) = _notes(plan, "jitter")
    assert "it runs whole on every rank (1 calls, first in the model itself" in note
    assert note.endswith("called again with the same operands it gives other results")


# --- declaring -----------------------------------------------------------------------------------


def test_a_declared_rule_is_used() -> None:
    autopar.register_rule(ops.energy, "b* i, b* i -> b*")
    model, x = _model()
    report = autopar.verify(model, (x,), mesh={"dp": 2, "tp": 2})
    report.raise_if_failed()
    assert 'declared: "b* i, b* i -> b*"' in _notes(report.plan, "energy")[0]


@pytest.mark.parametrize("op", ["autopar_test::energy", "autopar_test.energy", ENERGY])
def test_an_operator_may_be_named(op: str) -> None:
    autopar.register_rule(op, "b i, b i -> b")


def test_an_operator_may_be_given_as_pytorch_has_it() -> None:
    autopar.register_rule(torch.ops.autopar_test.energy, "b i, b i -> b")
    autopar.register_rule(torch.ops.autopar_test.energy.default, "b i, b i -> b")


_Q = torch.randn(2, 6, 8, dtype=torch.float64)

_WRONG: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "a summed dimension that is not a sum": (
        ops.fused_gate,
        "b i, b i, i -> b",
        {},
        "does not fit shape",
    ),
    "a result that lacks a dimension": (
        ops.energy,
        "b i, b i -> i",
        {},
        "dimensions? .*give|factors",
    ),
    "a window that is cut": (
        ops.windowed_attention,
        "b s (h d), b s (h d), b s (h d) -> b s (h d)",
        {"whole": ["d"], "sizes": {3: "h"}, "example": (_Q, _Q, _Q, 2, 3)},
        r"splitting 's' into \d \+ \d, normal inputs: result 0 differs by",
    ),
    "linear in what is squashed": (
        ops.energy,
        "b i, b i -> b",
        {"linear": [(0,)]},
        "giving each rank a term of linear group 0",
    ),
    "a bias that is not added": (
        ops.energy,
        "b i, b i -> b",
        {"joins": [1], "linear": [(1,)]},
        "linear group 0",
    ),
    "a distance that is not seen": (
        ops.echo,
        "b s d -> b s d",
        {"example": (torch.randn(2, 64, 4, dtype=torch.float64), 40)},
        "splitting 's'",
    ),
    "an operator that is no function": (ops.jitter, "b -> b", {}, "gives other results"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_rule_is_refused_with_what_differs(name: str) -> None:
    op, declaration, options, said = _WRONG[name]
    with pytest.raises(autopar.RuleError, match=said) as caught:
        autopar.register_rule(op, declaration, **options)
    assert str(op._opoverload) in str(caught.value)


def test_a_rule_may_be_taken_unchecked() -> None:
    autopar.register_rule(ops.jitter, "b* -> b*", check=False)
    plan = autopar.plan(_Jitter(), (torch.randn(4, 6),), mesh={"dp": 2})
    assert "declared" in _notes(plan, "jitter")[0]


class _Jitter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.jitter(x)


def test_a_call_for_which_a_rule_does_not_hold_stays_whole() -> None:
    class Echo(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.echo(x, 3)

    x = torch.randn(2, 8, 4, dtype=torch.float64)
    autopar.register_rule(ops.echo, "b s d -> b s d", example=(x, 100))  # nothing is so far
    report = autopar.verify(Echo(), (x,), mesh={"dp": 2})
    report.raise_if_failed()
    (note,) = _notes(report.plan, "echo")
    assert "its declared rule does not hold for this call: splitting 's'" in note


def test_an_operator_may_be_declared_never_to_be_split() -> None:
    autopar.register_rule(ops.energy, None)
    model, x = _model()
    (note,) = _notes(autopar.plan(model, (x,), mesh={"dp": 2}), "energy")
    assert note.endswith("register_rule says that it is not split")


def test_rules_that_cannot_be_declared_are_refused() -> None:
    with pytest.raises(autopar.RuleError, match="has a rule for this operator"):
        autopar.register_rule("aten::linear", "b i, o i -> b o")
    with pytest.raises(autopar.RuleError, match="PyTorch has no operator of this name"):
        autopar.register_rule("nowhere::nothing", "b -> b")
    with pytest.raises(autopar.RuleError, match="expected an operator"):
        autopar.register_rule(3, "b -> b")
    with pytest.raises(autopar.RuleError, match="'limit'; give a call of it as example="):
        autopar.register_rule(ops.batch_clip, "b 1 -> b 1")
    with pytest.raises(autopar.RuleError, match="has no '->'"):
        autopar.register_rule(ops.energy, "b i, b i")


# --- files ---------------------------------------------------------------------------------------


def test_discovered_rules_are_written_read_and_used(tmp_path: Path, monkeypatch: Any) -> None:
    model, x = _model()
    before = autopar.plan(model, (x,), mesh={"dp": 2})
    found = autopar.discovered_rules()
    path = tmp_path / "rules.json"
    autopar.save_rules(path)
    monkeypatch.setattr(kept, "_FOUND", {})
    monkeypatch.setattr(kept, "discover", lambda node: pytest.fail(f"tried {node.op} again"))
    assert autopar.load_rules(path) == len(found)
    assert autopar.discovered_rules() == found
    assert autopar.plan(model, (x,), mesh={"dp": 2}).rows == before.rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a file of discovered rules"),
        ('{"autopar_rules": 1}', "'rules' is missing"),
        ('{"autopar_rules": 1, "rules": [{"op": 1}]}', "not a discovered rule"),
        (
            json.dumps({"autopar_rules": 1, "rules": [{"op": "a", "call": "()", "rule": {}}]}),
            "not the declaration of a rule",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(autopar.RuleError, match=said) as caught:
        autopar.load_rules(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with pytest.raises(autopar.RuleError, match="cannot be read"):
        autopar.load_rules(tmp_path / "none.json")
    with pytest.raises(autopar.RuleError, match="cannot be written"):
        autopar.save_rules(tmp_path / "no" / "rules.json")
