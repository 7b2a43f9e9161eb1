"""Whatever a user gets wrong ends in an error of ours that names it, before any communication."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import (
    HintError,
    InputError,
    MeshError,
    NotCompiledError,
    NoValuesError,
    PlanError,
)
from ranks import run_ranks
from zoo import Mlp, build

GRID = {"dp": 2, "tp": 2}
CALL: dict[str, Tensor] = build("mlp")[1]

torch.set_num_threads(1)


def mlp() -> nn.Module:
    return build("mlp")[0]


def make_plan(model: nn.Module | None = None, **options: Any) -> autopar.Plan:
    return autopar.plan(model or mlp(), **{"kwargs": CALL, "mesh": GRID, **options})


def parallelize(model: nn.Module | None = None, **options: Any) -> autopar.ParallelModule:
    return autopar.autoparallelize(model or mlp(), **{"kwargs": CALL, **options})


def check(run: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """`run` raises this kind of error with all these words; nothing was started."""
    with pytest.raises(kind) as caught:
        run()
    assert isinstance(caught.value, autopar.AutoparError)
    for word in words:
        assert word in str(caught.value)
    assert not dist.is_initialized()


# -- mesh -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (4, ("{dp=4}", "4 ranks", "1 process is running", "torchrun --nproc-per-node 4")),
        (GRID, ("{dp=2, tp=2}", "4 ranks")),
        (0, ("'dp'", "positive int", "0")),
        ({"dp": -1}, ("'dp'", "-1")),
        ({"d p": 1}, ("'d p'", "identifier")),
        ({3: 1}, ("3", "identifier")),
        ("2x2", ("count", "dict", "str")),
    ],
)
def test_mesh(mesh: Any, words: tuple[str, ...]) -> None:
    check(lambda: parallelize(mesh=mesh), MeshError, *words)


# -- hints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"fc1": ((2, 1, 1), (2, 1))}, ("fc1", "input 0", "2 entries", "(2, 1, 1)")),
        ({"fc1": ((3, 1), (1, 1))}, ("fc1", "split counts (3,)", "{dp=2, tp=2}")),
        ({"fc1": ((8, 1), (1, 1))}, ("fc1", "8", "{dp=2, tp=2}")),
        ({"fc1": ((1, 1), (1, 1), (1,), (1,))}, ("fc1", "3 tensor operands", "has 4")),
        ({"fc1": (("rows", None),)}, ("fc1", "unknown mesh axis 'rows'", "{dp=2, tp=2}")),
        ({"fc1": (("dp", "dp"),)}, ("fc1", "'dp'", "two different loops")),
        ({"fc1": ((0, 1),)}, ("fc1", "1 or more", "0")),
        ({"fc1": ((2.0, 1),)}, ("fc1", "2.0")),
        ({"fc1": (2, 1)}, ("fc1", "tuple of such tuples")),
        ({"fc1": 3}, ("fc1", "must be a tuple", "3")),
        ({"fc1": {"in": ((2, 1),)}}, ("fc1", "unknown keys", "'in'")),
        ({"fc3": ((2, 1),)}, ("'fc3'", "no module", "'fc1'", "'fc2'")),
        ({"layers.*": ((2, 1),)}, ("'layers.*'", "no module")),
        ({"": ((2, 1),)}, ("several operators", "relu")),
        ({3: ((2, 1),)}, ("hints", "3")),
        ([((2, 1),)], ("hints", "dict")),
        ("fc1", ("hints", "dict", "'fc1'")),
    ],
)
def test_hint(hints: Any, words: tuple[str, ...]) -> None:
    check(lambda: make_plan(hints=hints), HintError, *words)


def test_hint_on_a_module_without_an_operator() -> None:
    class Unused(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4)
            self.group = nn.ModuleList([nn.Linear(4, 4)])

    model = Unused().double()
    check(lambda: make_plan(model, hints={"spare": ((2, 1),)}), HintError, "'spare'", "no operator")
    check(
        lambda: make_plan(model, hints={"group": ((2, 1),)}),
        HintError,
        "'group'",
        "no operator",
        "group.0",
    )


def test_conflicting_hints_are_both_named() -> None:
    model = mlp()
    autopar.shard(model.fc1, ((2, 1), (2, 1)))  # type: ignore[union-attr]
    check(
        lambda: make_plan(model, hints={"fc*": ((4, 1), (1, 1))}),
        HintError,
        "shard(fc1)",
        "'fc*'",
        "conflicts",
        "((2, 1), (2, 1))",
        "((4, 1), (1, 1))",
    )


@pytest.mark.parametrize("target", ["fc1", 3, None])
def test_what_cannot_be_sharded(target: Any) -> None:
    check(lambda: autopar.shard(target, ((2, 1),)), HintError, type(target).__name__)


# -- the plan file --------------------------------------------------------------------------------


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


# -- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": CALL["x"][:4]}, ("x: expected shape (8, 8), got (4, 8)",)),
        ({"x": CALL["x"].float()}, ("x: expected dtype torch.float64, got torch.float32",)),
        ({"target": CALL["target"].int()}, ("target: expected dtype torch.int64",)),
        ({"x": [1.0]}, ("x: expected a tensor of shape (8, 8)", "got a list")),
        ({"target": None}, ("target: expected a tensor", "got None")),
        ({"mask": CALL["x"]}, ("unexpected keyword argument 'mask'",)),
    ],
)
def test_call(change: dict[str, Any], words: tuple[str, ...]) -> None:
    parallel = parallelize(shapes="error")
    check(lambda: parallel(**{**CALL, **change}), InputError, *words)
    parallel(**CALL)
    check(lambda: parallel(**{**CALL, **change}), InputError, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": CALL["x"][:4]}, ("x (float64[8, 8], now float64[4, 8])", "batch")),
        ({"x": CALL["x"].float()}, ("x (float64[8, 8], now float32[8, 8])", "dtype")),
        ({"target": CALL["target"].int()}, ("target (int64[8], now int32[8])",)),
        ({"x": [1.0]}, ("x (float64[8, 8], now a list of ['0'])",)),
        ({"target": None}, ("target (int64[8], now None)",)),
        ({"mask": CALL["x"]}, ("unexpected keyword argument 'mask'",)),
    ],
)
def test_call_that_the_model_cannot_take(change: dict[str, Any], words: tuple[str, ...]) -> None:
    """With shapes="recompile" the model is asked; its refusal is told with what changed."""
    parallel = parallelize()
    for _ in range(2):
        check(lambda: parallel(**{**CALL, **change}), InputError, *words)
        parallel(**CALL)


def test_missing_argument() -> None:
    check(lambda: parallelize()(CALL["x"]), InputError, "'target'", "missing")
    check(lambda: make_plan(kwargs={"x": CALL["x"]}), InputError, "'target'", "missing")
    check(lambda: make_plan(kwargs={**CALL, "y": 1}), InputError, "unexpected", "'y'")


def test_example_call_that_is_not_spelled_as_one() -> None:
    x = CALL["x"]
    check(lambda: autopar.plan(nn.Linear(8, 8).double(), x, mesh=2), InputError, "args", "(x,)")
    check(lambda: autopar.autoparallelize(nn.Linear(8, 8).double(), x), InputError, "args", "(x,)")
    check(lambda: make_plan(kwargs=[x]), InputError, "kwargs", "list")
    check(lambda: make_plan(kwargs={"x": object(), "target": x}), InputError, "x", "object")


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mode": "fast"}, PlanError, ("mode", "'semi_auto'", "'fast'")),
        ({"outputs": "some"}, PlanError, ("outputs", "'sharded'", "'some'")),
        ({"inputs": "mine"}, PlanError, ("inputs", "'local'", "'mine'")),
        ({"shapes": "any"}, PlanError, ("shapes", "'recompile'", "'any'")),
        ({"check": "never"}, PlanError, ("check", "'every'", "'never'")),
        ({"inputs": "local", "kwargs": None}, PlanError, ("inputs='local'", "example")),
        ({"device": "abacus"}, PlanError, ("device 'abacus'", "h100")),
        ({"device": "none.json"}, PlanError, ("none.json",)),
        ({"hints": ["fc1"]}, HintError, ("hints", "dict")),
    ],
)
def test_option(options: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    check(lambda: parallelize(**options), kind, *words)


@pytest.mark.parametrize("model", [lambda x: x, None, {"fc1": 1}])
def test_what_is_no_model(model: Any) -> None:
    check(lambda: autopar.autoparallelize(model, mesh=1), PlanError, "model", "Module")
    check(lambda: autopar.plan(model, mesh=2), PlanError, "model", "Module")
    check(lambda: autopar.verify(model, mesh=2), PlanError, "model", "Module")


def test_model_on_the_meta_device() -> None:
    parallel = parallelize(mlp().to("meta"))
    check(lambda: parallel(**CALL), NoValuesError, "'fc1.bias'", "meta", "load_pretrained")


def test_batch_that_does_not_divide() -> None:
    odd = {name: x[:6] for name, x in CALL.items()}
    layout = make_plan(kwargs=odd, mode="data_parallel").input_layouts["x"]
    assert layout.split_axes
    one = {name: x[:1] for name, x in CALL.items()}
    check(lambda: make_plan(kwargs=one, mode="data_parallel"), PlanError, "batch of 1", "4 ranks")


# -- tracing and lazy compilation -----------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = y * 2
        return y


def test_branch_on_data_is_frozen_and_checked() -> None:
    x = torch.ones(4, 8)
    model = Branching()
    with torch.no_grad():
        model.layer.weight.fill_(1.0)
    parallel = autopar.autoparallelize(model, (x,), mesh=1)
    assert torch.equal(parallel(x), model.layer(x) * 2)
    words = ("test_bad_input.py", "`if y.sum() > 0:`", "torch.where")
    check(lambda: parallel(-x), InputError, *words)


@pytest.mark.parametrize(
    "use",
    [
        lambda m: next(m.parameters()),
        lambda m: dict(m.named_parameters()),
        lambda m: list(m.buffers()),
        lambda m: torch.optim.SGD(m.parameters()),
        lambda m: m.state_dict(),
        lambda m: m.zero_grad(),
        lambda m: m.get_parameter("fc1.weight"),
        lambda m: m.plan,
        lambda m: m.graph_module,
        lambda m: m.partitioned_graph(),
    ],
)
def test_what_a_module_lacks_before_its_first_call(use: Callable[[Any], Any]) -> None:
    lazy = autopar.autoparallelize(mlp(), mesh=1)
    check(lambda: use(lazy), NotCompiledError, "first call", "example")
    check(lambda: lazy.load_state_dict({}), NotCompiledError, "first call")
    lazy(**CALL)
    use(lazy)


def test_a_module_can_be_moved_before_its_first_call() -> None:
    lazy = autopar.autoparallelize(nn.Linear(8, 4), mesh=1).double()
    assert lazy(CALL["x"]).dtype == torch.float64


# -- ranks that do not agree ----------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_do_not_agree() -> None:
    """Two processes: plans, models, weights, inputs, calls; see `desync_worker.py`."""
    checks = ("mesh", "plans", "models", "inputs", "binding", "shapes", "planning", "alone")
    run_ranks(
        Path(__file__).with_name("desync_worker.py"),
        2,
        *checks,
        "no_sync",
        "still_works",
        limit_s=120,
    )
