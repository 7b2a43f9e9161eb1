"""`shard()` in all its forms, from the user's call to the strategies of the plan.

`outcome` also checks that the chosen strategies satisfy the hints and that the result equals the
single device's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import HintError, autoparallelize, plan, shard, verify
from autopar.compiler import Request, trace_model
from autopar.ir.mesh import Mesh
from autopar.passes.marks import MARK
from outcomes import EIGHT, Net, outcome, randn, refusal
from zoo import build

FOUR = {"dp": 2, "tp": 2}
X = randn(4, 8)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


def mlp() -> Any:
    torch.manual_seed(0)
    return Mlp().double()


def hinted(in_strategy: Any = None, out_strategy: Any = None) -> Any:
    model = mlp()
    shard(model.fc1, in_strategy, out_strategy)
    return model


def strategies(model: nn.Module, *args: torch.Tensor, mesh: Any = FOUR, **options: Any) -> Any:
    """Node name -> strategy, of a plan that was verified."""
    found = outcome(model, *args, mesh=mesh, **options)
    return {row.name: row.strategy for row in found.plan.rows}


# --- a module ---


@pytest.mark.parametrize(
    "in_strategy",
    [
        ((2, 1), (2, 1)),
        ((2, 1), (2, 1), (2,)),
        [[2, 1], [2, 1]],
        (("dp", None), ("tp", None)),
        (("dp", "None"), ("tp", "None"), ("tp",)),
        ((("dp",), ()), (("tp",), ())),
        ((2, None), ("tp", 1)),
    ],
)
def test_the_same_strategy_in_every_spelling(in_strategy: Any) -> None:
    found = strategies(hinted(in_strategy), X)
    assert found["linear"] == "((2, 1), (2, 1), (2,))"


def test_several_axes_on_one_dimension() -> None:
    found = outcome(hinted(((("tp", "dp"), None), (None, None))), X, mesh=FOUR)
    assert found.rows("aten.linear")[0].inputs[0] == "[@tp+dp, -]"


def test_an_axis_of_size_one_may_be_named() -> None:
    found = strategies(hinted((("pp", "tp"), (None, "tp"))), X, mesh={"pp": 1, "tp": 2})
    assert found["linear"] == "((1, 2), (1, 2), (1,))"


def test_out_strategy_alone_and_with_in_strategy() -> None:
    found = outcome(hinted(None, ((2, 2),)), X, mesh=FOUR)
    assert found.rows("aten.linear")[0].outputs == ("[@dp, @tp]",)
    found = outcome(hinted(((2, 2), (1, 2)), ((4, 1),)), X, mesh=FOUR)
    assert found.rows("aten.linear")[0].outputs == ("[@dp, -] sum(tp)",)
    assert found.rows("autopar")[0].outputs == ("[@dp+tp, -]",)


def test_shard_returns_the_module_and_leaves_it_as_it_was() -> None:
    model = mlp()
    before = model(X)
    keys = list(model.state_dict())
    assert shard(model.fc1, ((2, 1), (2, 1))) is model.fc1
    assert torch.equal(model(X), before)
    assert list(model.state_dict()) == keys


def test_two_entries_stand_for_three_dimensions_of_gpt2s_dense_layers() -> None:
    model, call = build("gpt2")
    for block in model.transformer.h:
        shard(block.mlp.c_fc, ((2, 4), (4, 1)))
    made = plan(model, kwargs=call, mesh={"dp": 2, "tp": 4}, mode="semi_auto")
    rows = [row for row in made.rows if row.module.endswith("mlp.c_fc")]
    assert [row.strategy for row in rows] == ["((2, 1, 4), (4, 1), (1,))"] * 2
    assert rows[0].chosen_by == "hint shard(transformer.h.0.mlp.c_fc)"


class Twice(nn.Module):
    """A module called twice, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.inner = Net(lambda net, x: shard(torch.matmul, ((2, 2), (2, 1)))(x, net.w), w=(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.first(x)))
        return self.inner(self.inner(x))


@pytest.mark.parametrize("name", ["first", "second"])
def test_every_call_of_a_module_has_its_hint_under_any_name(name: str) -> None:
    model = Twice().double()
    found = outcome(model, X, mesh=FOUR, hints={name: ((2, 2), (1, 2))})
    assert found.strategies("aten.linear") == ["((2, 2), (1, 2), (1,))"] * 3
    assert found.strategies("aten.matmul") == ["((2, 2), (2, 1))"] * 2


# --- name patterns ---


def test_a_pattern_hints_every_module_it_matches() -> None:
    found = outcome(mlp(), X, mesh=FOUR, hints={"fc?": ((2, 1), (1, 1))})
    assert found.strategies("aten.linear") == ["((2, 1), (1, 1), (1,))"] * 2


def test_a_pattern_with_both_strategies() -> None:
    hints = {"fc1": {"in_strategy": ((2, 2), (1, 2)), "out_strategy": ((4, 1),)}}
    found = outcome(mlp(), X, mesh=FOUR, hints=hints)
    assert found.rows("aten.linear")[0].strategy == "((2, 2), (1, 2), (1,))"
    assert found.rows("aten.relu")[0].strategy == "((4, 1),)"


def test_hints_reach_autoparallelize_and_verify() -> None:
    hints = {"fc3": ((2, 1), (1, 1))}
    expected = "hint 'fc3': no module has this name; the nearest are "
    with pytest.raises(HintError, match=expected):
        verify(mlp(), (X,), mesh=FOUR, hints=hints)
    with pytest.raises(HintError, match=expected):
        autoparallelize(mlp(), (X,), mesh=1, hints=hints)
    assert verify(mlp(), (X,), mesh=FOUR, hints={"fc1": ((2, 2), (1, 2))}).ok


# --- a function ---


def test_a_function_in_mindspores_own_example() -> None:
    net = Net(lambda net, x: shard(torch.matmul, ((2, 4), (4, 1)))(x, net.w), w=(8, 8))
    assert strategies(net, X, mesh=EIGHT)["matmul"] == "((2, 4), (4, 1))"


def test_a_function_sharded_once_and_called_twice() -> None:
    product = shard(torch.matmul, ((4, 1), (1, 1)))
    net = Net(lambda net, x: product(product(x, net.w), net.v), w=(8, 8), v=(8, 8))
    found = outcome(net, X, mesh=FOUR)
    assert found.strategies("aten.matmul") == ["((4, 1), (1, 1))"] * 2


def test_a_function_in_a_loop_has_its_own_hint_each_time() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        for strategy in (((2, 2), (2, 1)), ((4, 1), (1, 1)), ((1, 4), (4, 1))):
            x = shard(torch.matmul, strategy)(x, net.w)
        return x

    found = outcome(Net(forward, w=(8, 8)), X, mesh=FOUR)
    assert found.strategies("aten.matmul") == [
        "((2, 2), (2, 1))",
        "((4, 1), (1, 1))",
        "((1, 4), (4, 1))",
    ]


@pytest.mark.parametrize(
    ("forward", "op", "expected"),
    [
        (
            lambda net, x: shard(torch.softmax, ((4, 1),))(input=x @ net.w, dim=-1),
            "aten.softmax",
            "((4, 1),)",
        ),
        (
            lambda net, x: shard(torch.mul, ((2, 2), (2, 2)))(x, x) @ net.w,
            "aten.mul",
            "((2, 2), (2, 2))",
        ),
        (
            lambda net, x: shard(torch.cat, ((1, 4), (1, 4)))([x, x @ net.w]),
            "aten.cat",
            "((1, 4), (1, 4))",
        ),
        (
            lambda net, x: shard(lambda h: h @ net.w, ((2, 1), (1, 2)))(x),
            "aten.matmul",
            "((2, 1), (1, 2))",
        ),
        (
            lambda net, x: shard(F.dropout, ((2, 2),))(x @ net.w, 0.5),
            "aten.dropout",
            "((2, 2),)",
        ),
        (
            lambda net, x: torch.cat(
                shard(torch.chunk, ((4, 1),), ((4, 1), (2, 1)))(x @ net.w, 2, 1)
            ),
            "aten.chunk",
            "((4, 1),)",
        ),
        (
            lambda net, x: shard(torch.where, ((2, 2), None, (2, 2)))(x > 0, x @ net.w, x),
            "aten.where",
            "((2, 2), (2, 2), (2, 2))",
        ),
        (
            lambda net, x: shard(torch.transpose, ((2, 2),))(x @ net.w, 0, 1),
            "aten.transpose",
            "((2, 2),)",
        ),
    ],
    ids=["kwargs", "same", "list", "closure", "random", "results", "mask", "view"],
)
def test_functions_of_many_kinds(forward: Any, op: str, expected: str) -> None:
    found = outcome(Net(forward, w=(8, 8)), X, mesh=FOUR)
    assert expected in found.strategies(op)


def test_inputs_stand_as_the_function_takes_them() -> None:
    ids = torch.arange(8).reshape(4, 2)
    net = Net(lambda net, i: shard(F.embedding, ((4, 1), (1, 1)))(i, net.table), table=(16, 8))
    assert outcome(net, ids, mesh=FOUR).rows("aten.embedding")[0].inputs[1] == "[@dp+tp, -]"


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, w: torch.relu(x @ w), "aten.matmul.default, aten.relu.default"),
        (lambda x, w: x @ w.t(), "aten.matmul.default, aten.t.default"),
        (lambda x, w: x, "none"),
    ],
)
def test_a_function_that_is_not_one_operator_is_refused(function: Any, found: str) -> None:
    net = Net(lambda net, x: shard(function, ((2, 1), (1, 1)))(x, net.w) @ net.w, w=(8, 8))
    told = refusal(net, X, mesh=FOUR)
    assert "shard() takes a function that is one operator of all its tensor arguments" in told
    assert f"this one is {found}; hint the functions or tensors inside it" in told


# --- a tensor ---


@pytest.mark.parametrize("layout", [(2, 2), ((2, 2),), ("dp", "tp"), (("dp",), "tp"), [2, "tp"]])
def test_a_tensor_constraint_in_every_spelling(layout: Any) -> None:
    found = outcome(Net(lambda net, x: shard(x @ net.w, layout), w=(8, 8)), X, mesh=FOUR)
    assert found.rows("autopar")[0].outputs == ("[@dp, @tp]",)


def test_a_tensor_constraint_says_that_other_axes_keep_the_tensor_whole() -> None:
    net = Net(lambda net, x: torch.relu(shard(x @ net.w, ("dp", None))), w=(8, 8))
    (row,) = outcome(net, X, mesh=FOUR).rows("autopar")
    assert row.outputs[0].startswith("[@dp, -]")
    assert "sum" not in row.outputs[0]


def test_constraints_one_after_the_other_are_a_redistribution() -> None:
    net = Net(lambda net, x: shard(shard(x @ net.w, (4, 1)), (1, 4)), w=(8, 8))
    found = outcome(net, X, mesh=FOUR)
    assert [row.outputs for row in found.rows("autopar")] == [("[@dp+tp, -]",), ("[-, @dp+tp]",)]
    assert [c.kind for c in found.forward] == ["all_to_all"]


def test_an_input_and_a_parameter_may_be_constrained() -> None:
    net = Net(lambda net, x: shard(x, (4, 1)) @ shard(net.w, (4, 1)), w=(8, 8))
    found = outcome(net, X, mesh=FOUR)
    assert str(found.plan.parameter_layouts["w"]) == "[@dp+tp, -]"
    assert [str(layout) for layout in found.plan.input_layouts.values()] == ["[@dp+tp, -]"]


# --- outside a compiled module, and on the way through export ---


def test_nothing_changes_outside_a_compiled_module() -> None:
    w = randn(8, 8, seed=1).requires_grad_()
    product = shard(torch.matmul, ((2, 2), (2, 1)))
    y = product(X, w)
    assert torch.equal(y, X @ w)
    assert shard(y, (2, 2)) is y
    y.sum().backward()
    assert torch.equal(w.grad, X.sum(0)[:, None].expand(8, 8))
    assert product.__name__ == "matmul"


def test_a_hinted_model_still_compiles_with_torch() -> None:
    net = Net(
        lambda net, x: shard(shard(torch.matmul, ((2, 2), (2, 1)))(x, net.w), (2, 2)), w=(8, 8)
    )
    assert torch.equal(torch.compile(net, backend="eager")(X), net(X))


@pytest.mark.parametrize("grad", [True, False])
def test_the_marks_survive_export_and_are_gone_from_the_graph(grad: bool) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return shard(shard(torch.matmul, ((2, 2), (2, 1)))(x, net.w), (4, 1))

    net = Net(forward, w=(8, 8)).requires_grad_(grad)
    request = Request.make(Mesh.of(FOUR), None, None, None, "full")
    with torch.no_grad():
        traced = trace_model(net, (X,), {}, request)
    assert [node.op for node in traced.graph.calls] == ["aten.matmul.default", "autopar.constrain"]
    assert MARK not in str(traced.graph)
    assert len(traced.placed.fixes) == 2


def test_the_hints_are_part_of_the_plans_fingerprint() -> None:
    prints = {
        plan(hinted(hint), (X,), mesh=FOUR).fingerprint
        for hint in (((2, 1), (2, 1)), ((2, 2), (1, 2)), ((("dp", "tp"), None), (None, None)))
    }
    assert len(prints) == 3


# --- who chose what ---


def test_every_strategy_says_which_hint_or_search_chose_it() -> None:
    made = outcome(hinted(((2, 1), (2, 1))), X, mesh=FOUR).plan
    assert {row.name: row.chosen_by for row in made.rows if row.name != "return"} == {
        "linear": "hint shard(fc1)",
        "relu": "spread from hint shard(fc1)",
        "linear_1": "spread from hint shard(fc1)",
    }
    made = outcome(hinted((("dp", None), (None, None))), X, mesh=FOUR).plan
    assert [row.chosen_by for row in made.rows if row.name != "return"] == [
        "hint shard(fc1)",
        "dp: spread from hint shard(fc1); tp: search",
        "dp: spread from hint shard(fc1); tp: search",
    ]


def test_without_hints_the_search_chose() -> None:
    assert {row.chosen_by for row in outcome(mlp(), X, mesh=FOUR, mode="auto").plan.rows} == {
        "search"
    }


@pytest.mark.parametrize("mode", ["auto", "semi_auto", "data_parallel", None])
def test_hints_bind_in_every_mode_that_splits(mode: str | None) -> None:
    found = outcome(hinted(((1, 4), (1, 4))), X, mesh=FOUR, mode=mode)
    (row, *_) = found.rows("aten.linear")
    assert row.strategy == "((1, 4), (1, 4), (1,))"
    assert row.chosen_by == "hint shard(fc1)"


def test_stand_alone_says_that_it_uses_no_hint() -> None:
    made = plan(hinted(((1, 4), (1, 4))), (X,), mesh=FOUR, mode="stand_alone")
    assert "mode 'stand_alone' splits nothing: not used are hint shard(fc1)" in made.notes


def test_an_unhinted_operator_says_where_its_split_comes_from() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(shard(torch.matmul, ((4, 1), (1, 1)))(x, net.w))

    row = outcome(Net(forward, w=(8, 8)), X, mesh=FOUR).rows("aten.relu")[0]
    assert row.chosen_by.startswith("spread from hint shard(matmul) in the model itself")


# --- refusals before planning ---


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: shard(3, ((1, 1),)),
            "shard(): expected a module, a function or a tensor, got int",
        ),
        (lambda: shard(nn.Linear(2, 2)), "shard(Linear): give in_strategy, out_strategy or both"),
        (
            lambda: shard(nn.Linear(2, 2), 4),
            "shard(Linear): in_strategy must be a tuple with one tuple per tensor, got 4",
        ),
        (
            lambda: shard(torch.matmul, None, "dp"),
            "shard(matmul): out_strategy must be a tuple with one tuple per tensor, got 'dp'",
        ),
        (
            lambda: shard(nn.Linear(2, 2), ((2.0, 1),)),
            "shard(Linear): in_strategy: expected counts, axis names, None or tuples of them, "
            "got 2.0",
        ),
        (
            lambda: shard(X, (1, 1), (1, 1)),
            "shard(tensor): give its layout as the one strategy, a tuple",
        ),
    ],
)
def test_what_is_no_hint_is_refused_at_once(call: Any, expected: str) -> None:
    with pytest.raises(HintError) as caught:
        call()
    assert str(caught.value) == expected


def test_a_wrong_hint_inside_forward_is_a_hint_error() -> None:
    told = refusal(Net(lambda net, x: shard(x @ net.w, None), w=(8, 8)), X, mesh=FOUR)
    assert "shard(tensor): give its layout as the one strategy" in told


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ([("fc1", ((2, 1),))], "hints: expected a dict of module name pattern -> strategy"),
        ({"fc1": {"in": ((2, 1),)}}, "hint 'fc1': unknown keys ['in']"),
        ({"fc1": 2}, "'fc1': in_strategy must be a tuple"),
    ],
)
def test_hints_of_the_wrong_shape_are_refused(hints: Any, expected: str) -> None:
    assert expected in refusal(mlp(), X, mesh=FOUR, hints=hints)


def test_conflicting_hints_name_both() -> None:
    told = refusal(hinted(((2, 1), (1, 1))), X, mesh=FOUR, hints={"fc1": ((1, 2), (1, 2))})
    assert told == (
        "hint 'fc1' conflicts with hint shard(fc1): ((1, 2), (1, 2)) against ((2, 1), (1, 1))"
    )
