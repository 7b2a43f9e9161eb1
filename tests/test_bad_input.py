"""Whatever a user gets wrong ends in an error of ours that names it, before any communication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
from refusals import CALL, GRID, check, make_plan, mlp, parallelize
from zoo import Mlp

torch.set_num_threads(1)


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
