"""Plan files that cannot be read, do not fit, or were edited into something that cannot run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import PlanError
from refusals import CALL, GRID, check, make_plan, mlp, parallelize
from zoo import Mlp

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return make_plan().to_json()


@pytest.fixture
def use(tmp_path: Path) -> Callable[..., Any]:
    """Verify a model under a plan file of the given content."""

    def run(content: Any, model: nn.Module | None = None, mesh: Any = GRID) -> Any:
        path = tmp_path / "plan.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return autopar.verify(model or mlp(), kwargs=CALL, mesh=mesh, plan=path)

    return run


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("plan.json", "not valid JSON", "cut short")),
        (b"\xff\xfe\x00", ("plan.json", "not valid JSON")),
        ("[1, 2]", ("plan.json", "'autopar_plan' is missing")),
        ("null", ("plan.json", "'autopar_plan' is missing")),
    ],
)
def test_unreadable_plan(use: Callable[..., Any], content: Any, words: tuple[str, ...]) -> None:
    check(lambda: use(content), PlanError, *words)


def test_plan_cut_in_half(use: Callable[..., Any], saved: dict[str, Any]) -> None:
    text = json.dumps(saved)
    for part in (text[: len(text) // 2], text[:-1]):
        check(lambda part=part: use(part), PlanError, "plan.json", "cut short")


def test_plan_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    check(lambda: parallelize(plan=path), PlanError, str(path), "No such file")
    check(lambda: parallelize(plan=tmp_path), PlanError, str(tmp_path), "cannot be read")
    check(lambda: parallelize(plan=3), PlanError, "plan", "3")
    check(lambda: make_plan().save(tmp_path / "no" / "plan.json"), PlanError, "cannot be written")


def test_plan_of_another_version(use: Callable[..., Any], saved: dict[str, Any]) -> None:
    check(lambda: use({**saved, "autopar_plan": 99}), PlanError, "version 99", "version 4")


#: For each field of a plan file, a value that it cannot have.
WRONG: dict[str, Any] = {
    "autopar_plan": "one", "torch": 2.13, "mesh": {"dp": "two"}, "mode": 3, "outputs": None,
    "device": {"name": "h100"}, "training": 1, "fingerprint": {}, "seconds": "fast",
    "bound": True, "gradients": "none", "hidden": [], "operators": {"linear": {"roles": 3}},
    "sources": {"x": {"dims": [["dp"], 3]}}, "relays": {"linear_1": {"dims": "dp"}},
    "returned": [{"dims": [[1]]}], "signature": {"param x": 3}, "labels": {"x": None},
    "rows": [{"name": "linear"}], "notes": [3], "policies": {"forms": {}},
    "mixed_precision": 3,
    "kept": [{"place": "linear"}],
    "meshes": [{"mesh": {"x": 2}, "links": ["intra"], "seconds": "fast", "reason": ""}],
}  # fmt: skip


def test_fields_of_a_plan(use: Callable[..., Any], saved: dict[str, Any]) -> None:
    assert set(WRONG) == set(saved)
    for field, value in WRONG.items():
        name = "version" if field == "autopar_plan" else field
        check(lambda f=field, v=value: use({**saved, f: v}), PlanError, "plan.json", name)
        rest = {key: kept for key, kept in saved.items() if key != field}
        check(lambda r=rest: use(r), PlanError, "plan.json", f"'{field}' is missing")


def edited(saved: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a plan with one entry changed; `path` is separated by slashes."""
    data = json.loads(json.dumps(saved))
    *parents, last = path.split("/")
    place = data
    for key in parents:
        place = place[key]
    place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("operators/linear/roles/dp", "q", ("'linear'", "'dp'", "'q'", "'o'")),
        ("operators/relu/roles/tp", "P0", ("'relu'", "'tp'", "'P0'")),
        ("operators/linear/roles", {"dp": "I"}, ("'linear'", "['dp']", "['dp', 'tp']")),
        ("operators/linear/roles", {"dp": "I", "tp": "I", "pp": "I"}, ("'linear'", "'pp'")),
        ("sources/fc1_weight", {"dims": [["dp"]]}, ("fc1.weight", "2")),
        ("sources/fc1_weight", {"dims": [["rows"], []]}, ("fc1.weight", "'rows'")),
        ("sources/fc1_weight", {"dims": [["tp", "dp"], []]}, ("fc1.weight", "order of the mesh")),
        ("sources/fc1_weight", {"dims": [[], []], "partial": ["dp"]}, ("fc1.weight", "sum(dp)")),
        ("sources/fc1_weight", {"dims": [["dp"], ["dp"]]}, ("fc1_weight", "once")),
        ("relays/linear_1", {"dims": [["rows"], []]}, ("'linear_1'", "'rows'")),
        ("relays/nothing", {"dims": []}, ("'nothing'", "lacks")),
        ("returned", [], ("'returned'", "0 layouts", "2 values")),
        ("returned", [{"dims": []}, None], ("'returned'", "output 1", "a layout")),
        ("returned", [{"dims": []}, {"dims": [["rows"], []]}], ("output 1", "'rows'")),
    ],
)
def test_edited_plan(
    use: Callable[..., Any], saved: dict[str, Any], path: str, value: Any, words: tuple[str, ...]
) -> None:
    check(lambda: use(edited(saved, path, value)), PlanError, "plan.json", *words)


def test_edited_plan_that_does_not_divide() -> None:
    """12 classes over 8 ranks: six hold two each, two hold nothing."""
    mesh = {"dp": 8}
    data = make_plan(mesh=mesh).to_json()
    for path, value in (
        ("operators/linear_1/roles/dp", "o"),
        ("sources/fc2_bias", {"dims": [["dp"]]}),
    ):
        plan = autopar.Plan.from_json(edited(data, path, value))
        assert autopar.verify(mlp(), kwargs=CALL, mesh=mesh, plan=plan).ok


def test_edited_plan_that_stores_units() -> None:
    """A DTensor cannot say that elements of a dimension stay together."""
    data = make_plan(mesh={"dp": 2}).to_json()
    layout = {"dims": [["dp"]], "units": [4]}
    plan = autopar.Plan.from_json(edited(data, "sources/fc2_bias", layout))
    run = lambda: autopar.verify(mlp(), kwargs=CALL, mesh={"dp": 2}, plan=plan)  # noqa: E731
    check(run, PlanError, "fc2.bias", "@dp/4")


def test_edited_plan_that_lacks_an_operator(use: Callable[..., Any], saved: dict[str, Any]) -> None:
    rest = {name: entry for name, entry in saved["operators"].items() if name != "relu"}
    check(lambda: use({**saved, "operators": rest}), PlanError, "plan.json", "'relu'", "missing")


def test_a_buffer_cannot_be_split(use: Callable[..., Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8, dtype=torch.float64))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return x * self.scale

    plan = autopar.plan(Scaled(), kwargs=CALL, mesh=2)
    data = edited(plan.to_json(), "sources/scale", {"dims": [["dp"]]})
    check(lambda: use(data, Scaled(), 2), PlanError, "buffer scale", "whole")


def test_plan_of_another_mesh(use: Callable[..., Any], saved: dict[str, Any]) -> None:
    check(lambda: use(saved, mesh={"dp": 4}), PlanError, "plan.json", "{dp=2, tp=2}", "{dp=4}")
    plan = autopar.Plan.from_json(saved)
    check(lambda: parallelize(plan=plan), PlanError, "{dp=2, tp=2}", "{dp=1}")


def test_plan_of_another_model(use: Callable[..., Any], saved: dict[str, Any]) -> None:
    larger = mlp()
    larger.fc1, larger.fc2 = nn.Linear(8, 32), nn.Linear(32, 12)
    check(
        lambda: use(saved, larger.double()),
        PlanError,
        "plan.json",
        "another model",
        "param fc1.weight is float64[32, 8] here, float64[16, 8] in the plan",
    )

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 12)

        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.fc2(torch.relu(self.up(x)))
            return nn.functional.cross_entropy(scores, target), scores

    check(
        lambda: use(saved, Renamed().double()),
        PlanError,
        "param up.weight is float64[16, 8] here, absent in the plan",
        "param fc1.weight is absent here",
    )

    class Smooth(Mlp):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.fc2(torch.tanh(self.fc1(x)))
            return nn.functional.cross_entropy(scores, target), scores

    check(lambda: use(saved, Smooth().double()), PlanError, "another model", "operators")
    older = {**saved, "torch": "2.0"}
    words = ("another model", "operators", "made with torch 2.0, this is 2.")
    check(lambda: use(older, Smooth().double()), PlanError, *words)


def test_plan_of_the_other_mode(use: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    plan = autopar.plan(model, (x,), mesh=2)
    run = lambda: autopar.verify(model.eval(), (x,), mesh=2, plan=plan)  # noqa: E731
    check(run, PlanError, "training mode")
