"""The plan: readable, saved, edited, replayed, and the same every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.__main__ import main
from autopar.compiler import Request, lower_plan, trace_model
from autopar.ir.layout import Layout
from autopar.passes import pipeline, search
from autopar.passes.communication import collectives_of
from devices import slow_device
from zoo import build

TESTS = Path(__file__).parent
GRID = {"dp": 2, "tp": 2}
CALL: dict[str, Tensor] = build("mlp")[1]
#: Columns of fc1 and rows of fc2: Megatron's split, and one all-reduce behind it.
MEGATRON = {"fc1": ((2, 1), (2, 1)), "fc2": ((2, 2), (1, 2))}

torch.set_num_threads(1)


def mlp() -> nn.Module:
    return build("mlp")[0]


def make_plan(**options: Any) -> autopar.Plan:
    return autopar.plan(mlp(), **{"kwargs": CALL, "mesh": GRID, "device": slow_device(), **options})


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return make_plan(hints=MEGATRON)


# -- reading --------------------------------------------------------------------------------------


def test_a_plan_prints_as_a_table(plan: autopar.Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0].startswith("plan for slow on mesh {dp=2, tp=2}, mode semi_auto: predicted ")
    assert "ms per step" in lines[0] and "of the optimum" in lines[0]
    assert lines[1].split() == [
        "operator", "module", "strategy", "result", "forward", "backward", "time", "chosen", "by",
    ]  # fmt: skip
    assert len(lines) == 2 + len(plan.rows) + bool(plan.gradients) + len(plan.notes)
    fc2 = next(line for line in lines if " fc2 " in line)
    assert fc2.startswith("aten.linear ")
    assert "((2, 2), (1, 2), (1,))" in fc2
    assert "[@dp, -] sum(tp)" in fc2
    assert " hint 'fc2'" in fc2
    relu = next(line for line in lines if line.startswith("aten.relu"))
    assert "[@dp, @tp]" in relu and " us " in relu


def test_rows_hold_every_decision(plan: autopar.Plan) -> None:
    rows = {row.name: row for row in plan.rows}
    assert list(rows) == ["linear", "relu", "linear_1", "cross_entropy_loss", "return"]
    fc1, loss = rows["linear"], rows["cross_entropy_loss"]
    assert (fc1.operator, fc1.module) == ("aten.linear.default", "fc1")
    assert fc1.strategy == "((2, 1), (2, 1), (2,))"
    assert fc1.inputs[0] == "[@dp, -]"
    assert fc1.outputs == ("[@dp, @tp]",)
    assert all(row.seconds > 0 for name, row in rows.items() if name != "return")
    # Scores [8, 12] in float64 over dp=2: half of 768 bytes is summed over tp.
    assert any(text.endswith("[tp] 384 B") for row in plan.rows for text in row.forward)
    # The gradient of fc1's weight [16, 8] over tp=2 is a sum over dp.
    assert any("[dp] 512 B" in text for text in fc1.backward)
    assert loss.chosen_by != ""
    # The loss, 8 bytes, is a sum over all ranks; the scores stay as they are.
    assert rows["return"].forward == ("all_reduce[dp+tp] 8 B",)
    assert rows["return"].chosen_by == "outputs='auto'"
    assert plan.mode == "semi_auto" and plan.device == slow_device() and plan.training
    assert 0 <= plan.bound <= plan.seconds * (1 + 1e-9)


def test_who_chose(plan: autopar.Plan) -> None:
    rows = {row.name: row.chosen_by for row in plan.rows}
    assert rows["linear"].startswith("hint 'fc1'")
    assert "hint 'fc" in rows["relu"]
    searched = {row.chosen_by for row in make_plan().rows if row.name != "return"}
    assert searched == {"search"}
    assert {row.chosen_by for row in make_plan(mode="stand_alone").rows} == {"mode stand_alone"}


def test_layouts_of_inputs_and_parameters(plan: autopar.Plan) -> None:
    parallel = make_plan(mode="data_parallel")
    assert parallel.input_layouts == {
        "x": Layout.make([("dp", "tp"), ()]),
        "target": Layout.make([("dp", "tp")]),
    }
    assert parallel.parameter_layouts == {
        name: Layout.whole(p.dim()) for name, p in mlp().named_parameters()
    }
    assert list(plan.parameter_layouts) == [name for name, _ in mlp().named_parameters()]
    assert list(plan.input_layouts) == list(CALL)


# -- saving and replaying -------------------------------------------------------------------------


def test_a_saved_plan_is_the_same_plan(plan: autopar.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    loaded = autopar.Plan.load(path)
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert autopar.Plan.from_json(plan.to_json()) == plan
    assert json.loads(path.read_text()) == plan.to_json()


def test_saving_leaves_the_old_file_where_it_fails(
    plan: autopar.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_text()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(autopar.PlanError, match="No space left"):
        make_plan().save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_given_plan_is_used_without_a_search(
    plan: autopar.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the solver was called")

    path = tmp_path / "plan.json"
    plan.save(path)
    alone = make_plan(mesh=1)
    monkeypatch.setattr(search, "solve_overlapping", fail)
    with pytest.raises(AssertionError, match="solver"):
        make_plan()
    for given in (plan, path, str(path)):
        report = autopar.verify(mlp(), kwargs=CALL, mesh=GRID, plan=given, hints=MEGATRON)
        report.raise_if_failed()
        assert report.plan == plan
    module = autopar.autoparallelize(mlp(), kwargs=CALL, mesh=1, plan=alone)
    assert module.plan == alone
    lazy = autopar.autoparallelize(mlp(), mesh=1, plan=alone)
    lazy(**CALL)
    assert lazy.plan == alone


def test_a_replayed_plan_runs_the_collectives_it_lists(plan: autopar.Plan) -> None:
    """Though it was priced for another device than the default."""
    request = Request.make(plan.mesh, None, MEGATRON, None, plan.outputs)
    assert request.device != plan.device
    traced = trace_model(mlp(), (), CALL, request)
    graph = pipeline.partitioned(traced.graph, plan.assignment, plan.device)
    run = [str(c) for c in collectives_of(graph, traced.rules, plan.assignment)]
    assert sorted(run) == sorted(t for row in plan.rows for t in row.forward + row.backward)
    assert "all_gather[tp] 384 B" in run
    in_buckets = collectives_of(lower_plan(traced, plan, request), traced.rules, plan.assignment)
    assert len(in_buckets) < len(run)


def test_every_valid_edit_still_computes_the_same() -> None:
    """Each operator's role is changed to each other one it may have."""
    data = make_plan().to_json()
    tried = 0
    for name, roles in {
        "linear": ("b0", "i", "o", "I", "R", "P0", "P1"),
        "relu": ("b1", "b0", "I", "R"),
        "cross_entropy_loss": ("n", "c", "I", "R"),
    }.items():
        for axis, role in zip(("dp", "tp") * 4, roles, strict=False):
            edit = json.loads(json.dumps(data))
            edit["operators"][name]["roles"][axis] = role
            plan = autopar.Plan.from_json(edit)
            report = autopar.verify(mlp(), kwargs=CALL, mesh=GRID, plan=plan)
            report.raise_if_failed()
            tried += plan.assignment.strategies[name].role[axis] == role
    assert tried == 15


def test_the_order_of_axes_may_be_edited() -> None:
    """Two axes on one dimension, the minor one first."""
    data = make_plan(mode="data_parallel").to_json()
    data["operators"]["linear"]["roles"] = {"tp": "b0", "dp": "b0"}
    plan = autopar.Plan.from_json(data)
    assert plan.assignment.strategies["linear"].axes_of("b0") == ("tp", "dp")
    autopar.verify(mlp(), kwargs=CALL, mesh=GRID, plan=plan).raise_if_failed()


# -- planning needs nothing but the model ---------------------------------------------------------


def test_planning_needs_no_process_group_and_no_memory() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.ReLU(), nn.Linear(1 << 20, 8))
        x = torch.empty(64, 1 << 20)
    plan = autopar.plan(huge, (x,), mesh={"dp": 8, "tp": 8}, device="h100")
    assert plan.parameter_layouts["0.weight"].split_axes
    assert not dist.is_initialized()
    assert all(p.is_meta for p in huge.parameters())


def test_a_meta_model_gets_the_plan_of_the_real_one(plan: autopar.Plan) -> None:
    meta = mlp().to("meta")
    planned = autopar.plan(meta, kwargs=CALL, mesh=GRID, device=slow_device(), hints=MEGATRON)
    assert planned.to_json() == plan.to_json()


def plans_as_text() -> list[str]:
    """The plans of an MLP and of a transformer block."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(4, 8, 16)
    plans = (make_plan(), autopar.plan(block, (x,), mesh=GRID, device=slow_device()))
    return [json.dumps(plan.to_json()) for plan in plans]


def test_planning_twice_gives_the_same_plan() -> None:
    """In this process, and in another one that hashes differently."""
    here = plans_as_text()
    assert plans_as_text() == here
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(TESTS)}
    there = subprocess.run(
        [sys.executable, "-c", "import test_plan\nprint(*test_plan.plans_as_text(), sep='\\n')"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert there.returncode == 0, there.stderr[-2000:]
    assert there.stdout.splitlines() == here


# -- the command line -----------------------------------------------------------------------------


def test_show_prints_a_plan(
    plan: autopar.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["show", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{plan}\n"
    assert captured.err == ""


def test_show_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    for arguments, words in (
        (["show", str(path)], "not valid JSON"),
        (["show", str(tmp_path / "none.json")], "No such file"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("autopar: plan file ")
        assert words in captured.err


def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "autopar", "show", str(tmp_path / "none.json")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr and "No such file" in run.stderr
    with pytest.raises(SystemExit) as stopped:
        main(["no such command"])
    assert stopped.value.code == 2
