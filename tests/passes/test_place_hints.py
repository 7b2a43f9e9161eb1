"""Which operators hints mean, and what becomes of the markers in the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from autopar.ir.errors import HintError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.passes.choices import WHOLE
from autopar.passes.hints import Hint
from autopar.passes.place_hints import Placed, place_hints

FOUR = Mesh.of({"dp": 2, "tp": 2})

TWO_LAYERS = """
%x  : f32[8, 16] = input "x"
%w1 : f32[32, 16] grad = param "net.fc1.weight"
%b1 : f32[32] grad = param "net.fc1.bias"
%w2 : f32[16, 32] grad = param "net.fc2.weight"
%h  : f32[8, 32] grad = aten.linear.default(%x, %w1, %b1)  # net.fc1 (model.py:3)
%r  : f32[8, 32] grad = aten.relu.default(%h)  # net (model.py:4)
%v  : f32[8, 32] grad = aten.view.default(%r, [8, 32])  # net.fc2 (model.py:5)
%y  : f32[8, 16] grad = aten.linear.default(%v, %w2)  # net.fc2 (model.py:5)
%z  : f32[8, 16] grad = aten.softmax.int(%y, -1)  # net (model.py:6)
return %z
"""

MODULES = ("", "net", "net.fc1", "net.fc2", "net.drop")


def place(
    text: str,
    *,
    modules: Mapping[str, Any] | None = None,
    patterns: Mapping[str, Any] | None = None,
    paths: Mapping[str, str] | None = None,
    mesh: Mesh = FOUR,
) -> Placed:
    """`modules` and `patterns` map to an in_strategy, or to a Hint."""

    def hints(given: Mapping[str, Any] | None) -> dict[str, Hint]:
        return {
            name: spec if isinstance(spec, Hint) else Hint(repr(name), spec)
            for name, spec in (given or {}).items()
        }

    graph = parse_graph(text, origins=True)
    known = paths or {path: path for path in MODULES}
    return place_hints(graph, mesh, hints(modules), hints(patterns), known)


def message(text: str, **options: Any) -> str:
    with pytest.raises(HintError) as caught:
        place(text, **options)
    return str(caught.value)


def calls(graph: Graph) -> list[str]:
    return [
        f"{node.name} = {node.op}({', '.join(v.name for v in node.operands)})"
        for node in graph.calls
    ]


# --- modules and patterns ---


def test_a_module_hint_goes_to_its_own_operator_and_not_to_what_only_moves_data() -> None:
    placed = place(TWO_LAYERS, modules={"net.fc2": ((2, 2), (1, 2))})
    assert list(placed.fixes) == ["y"]
    assert placed.fixes["y"].exact == {"b0": ("dp",), "i": ("tp",), "o": ()}
    assert calls(placed.graph) == calls(parse_graph(TWO_LAYERS))


def test_a_pattern_reaches_every_module_it_matches_and_says_so() -> None:
    placed = place(TWO_LAYERS, patterns={"net.fc?": ((2, 1),)})
    assert list(placed.fixes) == ["h", "y"]
    assert str(placed.hints["y"]) == "hint 'net.fc2' (pattern 'net.fc?')"


def test_a_name_in_full_is_not_called_a_pattern() -> None:
    placed = place(TWO_LAYERS, patterns={"net.fc1": ((2, 1),)})
    assert str(placed.hints["h"]) == "hint 'net.fc1'"


def test_a_module_called_twice_has_its_hint_at_both_calls() -> None:
    text = """
%x : f32[8, 16] = input "x"
%w : f32[16, 16] grad = param "net.fc1.weight"
%h : f32[8, 16] grad = aten.linear.default(%x, %w)  # net.fc1 (model.py:3)
%y : f32[8, 16] grad = aten.linear.default(%h, %w)  # net.fc1 (model.py:4)
return %y
"""
    placed = place(text, modules={"net.fc1": ((2, 1), (2, 1))})
    assert placed.fixes["h"] == placed.fixes["y"]


def test_a_module_with_two_names_is_hinted_by_either_at_all_its_calls() -> None:
    paths = {"": "", "net": "net", "net.fc1": "net.fc1", "net.fc2": "net.fc1"}
    for name in ("net.fc1", "net.fc2"):
        placed = place(TWO_LAYERS, patterns={name: ((2, 1),)}, paths=paths)
        assert list(placed.fixes) == ["h", "y"]
    placed = place(TWO_LAYERS, patterns={"net.*": ((2, 1),)}, paths=paths)
    assert list(placed.fixes) == ["h", "y"]


def test_an_unknown_name_lists_its_neighbours() -> None:
    told = message(TWO_LAYERS, patterns={"net.fc3": ((2, 1),)})
    assert told.startswith("hint 'net.fc3': no module has this name; the nearest are ")
    assert "'net.fc1'" in told and "'net.fc2'" in told


def test_a_module_without_an_operator_of_its_own_names_its_submodules() -> None:
    assert message(TWO_LAYERS, patterns={"": ((2, 1),)}) == (
        "hint '': module '' calls no operator of its own in this model; hint one of its "
        "submodules, e.g. ['net', 'net.fc1', 'net.fc2']"
    )
    assert message(TWO_LAYERS, patterns={"net.drop": ((2, 1),)}) == (
        "hint 'net.drop': module 'net.drop' calls no operator of its own in this model"
    )


def test_a_module_with_several_operators_is_refused() -> None:
    assert message(TWO_LAYERS, modules={"net": ((2, 1),)}) == (
        "hint 'net': module 'net' calls several operators ['aten.relu.default', "
        "'aten.softmax.int']; hint a submodule, or call shard() on the function or tensor inside "
        "its forward"
    )


def test_the_operator_with_the_parameters_is_the_modules_own() -> None:
    text = TWO_LAYERS.replace("# net (model.py:4)", "# net.fc1 (model.py:4)")
    assert list(place(text, modules={"net.fc1": ((2, 1),)}).fixes) == ["h"]


def test_an_operator_without_a_rule_cannot_be_hinted() -> None:
    text = """
%x : f32[8, 8] = input "x"
%y : f32[8, 8] = aten.linalg_inv.default(%x)  # net.fc1 (model.py:3)
return %y
"""
    assert message(text, modules={"net.fc1": ((2, 1),)}) == (
        "hint 'net.fc1': aten.linalg_inv.default in net.fc1 (model.py:3) has no rule, so it "
        "cannot be split"
    )


def test_conflicting_hints_are_both_named() -> None:
    told = message(
        TWO_LAYERS, modules={"net.fc1": ((2, 1),)}, patterns={"net.fc*": ((1, 2), (1, 2))}
    )
    assert told == (
        "hint 'net.fc1' (pattern 'net.fc*') conflicts with hint 'net.fc1': ((1, 2), (1, 2)) "
        "against ((2, 1),)"
    )


def test_equal_hints_do_not_conflict() -> None:
    placed = place(TWO_LAYERS, modules={"net.fc1": ((2, 1),)}, patterns={"net.fc*": ((2, 1),)})
    assert list(placed.fixes) == ["h", "y"]


# --- outputs ---


def test_an_out_strategy_becomes_a_constraint_on_the_result_for_all_its_users() -> None:
    placed = place(TWO_LAYERS, modules={"net.fc1": Hint("'net.fc1'", None, ((4, 1),))})
    assert calls(placed.graph)[:3] == [
        "h = aten.linear.default(x, w1, b1)",
        "h_constrained = autopar.constrain(h)",
        "r = aten.relu.default(h_constrained)",
    ]
    assert placed.fixes["h_constrained"].exact == {"d1": ("dp", "tp"), "d0": ()}
    assert placed.fixes["h_constrained"].roles == {}


def test_axes_an_out_strategy_does_not_name_are_whole() -> None:
    placed = place(TWO_LAYERS, modules={"net.fc1": Hint("'net.fc1'", None, (("dp", None),))})
    assert placed.fixes["h_constrained"].roles == {"tp": WHOLE}


@pytest.mark.parametrize(
    "outputs",
    [((2, 2),), (2, 2), (("dp", "tp"),), ("dp", "tp"), (("dp",), "tp"), (("dp",), ("tp",))],
)
def test_the_tuple_of_a_single_result_may_stand_alone(outputs: Any) -> None:
    placed = place(TWO_LAYERS, modules={"net.fc1": Hint("'net.fc1'", None, outputs)})
    assert placed.fixes["h_constrained"].exact == {"d1": ("dp",), "d0": ("tp",)}


def test_out_strategies_of_several_results_go_to_each() -> None:
    text = """
%x : f32[8, 16] = input "x"
%a : f32[8, 8], %b : f32[8, 8] = aten.chunk.default(%x, 2, 1)  # net.fc1 (model.py:3)
return %a, %b
"""
    placed = place(text, modules={"net.fc1": Hint("'c'", None, (None, (2, 2)))})
    assert list(placed.fixes) == ["b_constrained"]
    assert [v.name for v in placed.graph.outputs] == ["a", "b_constrained"]
    told = message(text, modules={"net.fc1": Hint("'c'", None, ((2, 2), None, None))})
    assert told.endswith(
        "aten.chunk.default has 2 results, the out_strategy ((2, 2), None, None) has 3"
    )


def test_an_out_strategy_that_does_not_fit_names_the_output() -> None:
    told = message(TWO_LAYERS, modules={"net.fc1": Hint("'net.fc1'", None, ((8, 1),))})
    assert told.startswith(
        "hint 'net.fc1': output 0 of aten.linear.default, shape (8, 32): no assignment of mesh "
        "axes gives the split counts (8,)"
    )


def test_conflicting_out_strategies_are_refused() -> None:
    told = message(
        TWO_LAYERS,
        modules={"net.fc1": Hint("'net.fc1'", None, ((2, 1),))},
        patterns={"net.fc1": Hint("'net.fc1'", None, ((1, 2),))},
    )
    assert "(1, 2) against (2, 1) for output 0 of aten.linear.default" in told


# --- stored parameters ---


def test_a_parameter_is_constrained_once_for_all_calls_that_want_it_stored_so() -> None:
    text = """
%x : f32[8, 16] = input "x"
%w : f32[16, 16] grad = param "net.fc1.weight"
%h : f32[8, 16] grad = aten.linear.default(%x, %w)  # net.fc1 (model.py:3)
%y : f32[8, 16] grad = aten.linear.default(%h, %w)  # net.fc1 (model.py:4)
return %y
"""
    placed = place(text, modules={"net.fc1": ((4, 1), (1, 4))})
    assert calls(placed.graph) == [
        "w_stored = autopar.constrain(w)",
        "h = aten.linear.default(x, w_stored)",
        "y = aten.linear.default(h, w_stored)",
    ]
    assert placed.fixes["w_stored"].exact == {"d1": (), "d0": ("dp", "tp")}
    assert placed.notes == [
        "hint 'net.fc1': parameter 'net.fc1.weight' is stored split as (1, 4) and gathered for "
        "aten.linear.default, whose other inputs keep that loop whole"
    ]


# --- markers ---


def mark(**spec: Any) -> str:
    """The marker's argument as it is written in a graph."""
    return json.dumps(json.dumps(spec))


def marked_product(body: str, result: str = "y", **spec: Any) -> str:
    """A function of %x and %w whose result is `result`, hinted ((2, 2), (2, 1))."""
    end = {"kind": "operator", "call": 7, "function": "f", "arguments": 2}
    end |= {"inputs": ((2, 2), (2, 1)), "outputs": None, **spec}
    return f"""
%x  : f32[8, 16] = input "x"
%w  : f32[16, 16] grad = param "w"
%xm : f32[8, 16] = autopar.mark.default(%x, {mark(kind="argument", call=7, index=0)})
%wm : f32[16, 16] grad = autopar.mark.default(%w, {mark(kind="argument", call=7, index=1)})
{body}
%ym : f32[8, 16] grad = autopar.mark.default(%{result}, {mark(**end)})  # net (model.py:9)
%z  : f32[8, 16] grad = aten.relu.default(%ym)
return %z
"""


PRODUCT = "%y : f32[8, 16] grad = aten.matmul.default(%xm, %wm)"


def test_a_functions_hint_goes_to_the_operator_between_its_markers() -> None:
    placed = place(marked_product(PRODUCT))
    assert calls(placed.graph) == ["y = aten.matmul.default(x, w)", "z = aten.relu.default(y)"]
    assert placed.fixes["y"].exact == {"m": ("dp",), "k": ("tp",), "n": ()}
    assert str(placed.hints["y"]) == "hint shard(f) in net (model.py:9)"


def test_a_cast_before_the_operator_does_not_matter() -> None:
    body = """%c : f32[8, 16] = aten.clone.default(%xm)
%y : f32[8, 16] grad = aten.matmul.default(%c, %wm)"""
    assert list(place(marked_product(body)).fixes) == ["y"]


def test_inputs_stand_in_the_order_of_the_functions_arguments() -> None:
    """Argument 0 is the right operand [k, n] here, argument 1 the left one [m, k]."""
    body = "%y : f32[8, 16] grad = aten.matmul.default(%wm, %xm)"
    text = marked_product(body, inputs=((2, 2), (1, 2))).replace("8, 16", "16, 16")
    assert place(text).fixes["y"].exact == {"k": ("dp",), "n": ("tp",), "m": ()}


@pytest.mark.parametrize(
    ("body", "result", "found"),
    [
        (
            f"{PRODUCT}\n%r : f32[8, 16] grad = aten.relu.default(%y)",
            "r",
            "aten.matmul.default, aten.relu.default",
        ),
        (
            "%t : f32[16, 16] grad = aten.t.default(%wm)\n"
            "%y : f32[8, 16] grad = aten.matmul.default(%xm, %t)",
            "y",
            "aten.matmul.default, aten.t.default",
        ),
        ("%y : f32[8, 16] grad = aten.neg.default(%xm)", "y", "aten.neg.default"),
    ],
)
def test_a_function_of_several_operators_or_unused_arguments_is_refused(
    body: str, result: str, found: str
) -> None:
    assert message(marked_product(body, result)) == (
        "hint shard(f) in net (model.py:9): shard() takes a function that is one operator of all "
        f"its tensor arguments, this one is {found}; hint the functions or tensors inside it"
    )


def test_a_functions_out_strategy_is_a_constraint() -> None:
    placed = place(marked_product(PRODUCT, outputs=((4, 1),)))
    assert calls(placed.graph) == [
        "y = aten.matmul.default(x, w)",
        "y_constrained = autopar.constrain(y)",
        "z = aten.relu.default(y_constrained)",
    ]


def test_a_tensors_marker_becomes_a_constraint_in_its_place() -> None:
    text = f"""
%x : f32[8, 16] = input "x"
%m : f32[8, 16] = autopar.mark.default(%x, {mark(kind="layout", outputs=("dp", None))})  # net
%y : f32[8, 16] = aten.relu.default(%m)
%u : f32[8, 16] = aten.neg.default(%x)
return %y, %u, %m
"""
    placed = place(text)
    assert calls(placed.graph) == [
        "m = autopar.constrain(x)",
        "y = aten.relu.default(m)",
        "u = aten.neg.default(x)",
    ]
    assert placed.fixes["m"].exact == {"d1": ("dp",), "d0": ()}
    assert str(placed.hints["m"]) == "hint shard(tensor) in net"


def test_a_tensors_marker_that_does_not_fit_names_shape_and_dimension() -> None:
    text = f"""
%x : f32[8, 1] = input "x"
%m : f32[8, 1] = autopar.mark.default(%x, {mark(kind="layout", outputs=(1, 2))})  # net
return %m
"""
    assert message(text) == (
        "hint shard(tensor) in net: tensor, shape (8, 1), dimension 1: size 1 does not divide "
        "into 2 pieces; it can be split into 1"
    )
