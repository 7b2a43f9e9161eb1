"""Rules: the notation, the strategies that follow, and the layouts each strategy asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ir.declare import declare
from autopar.ir.errors import GraphError
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import (
    Assist,
    Factor,
    Rule,
    Strategy,
    is_valid,
    local_factor_size,
    opaque_rule,
    operand_layout,
    result_layout,
    strategies,
)

MESH = Mesh.of({"dp": 2, "tp": 4})
ONE_AXIS = Mesh.of({"tp": 4})


def call(operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> Node:
    """A call of ``a.b`` on tensors of these shapes."""
    ins = tuple(Value(f"x{k}", s, torch.float32, True) for k, s in enumerate(operands))
    outs = tuple(Value(f"y{k}", s, torch.float32, True) for k, s in enumerate(results))
    return Node("a.b", ins, {}, outs)


def linear(batch: int = 8) -> Rule:
    node = call([(batch, 4, 12), (16, 12), (16,)], [(batch, 4, 16)])
    return declare(
        node, "b* i, o i, o -> b* o", linear=[[0, 2], [1, 2]], joins=[2], flops_per_point=2
    )


def strategy(**roles: str) -> Strategy:
    return Strategy(tuple(roles.items()))


def layouts(rule: Rule, chosen: Strategy, grad: bool = True) -> tuple[list[str], list[str]]:
    ins = [operand_layout(rule, chosen, k, grad, MESH) for k in range(len(rule.operands))]
    outs = [result_layout(rule, chosen, k, grad, MESH) for k in range(len(rule.results))]
    return [str(x) for x in ins], [str(x) for x in outs]


# The notation ----------------------------------------------------------------------------------


def test_linear_is_declared_from_its_notation() -> None:
    rule = linear()
    assert rule.factors == (
        Factor("b1", 8),
        Factor("b0", 4),
        Factor("i", 12),
        Factor("o", 16),
    )
    assert rule.operands == (
        (("b1",), ("b0",), ("i",)),
        (("o",), ("i",)),
        (("o",),),
    )
    assert rule.results == ((("b1",), ("b0",), ("o",)),)
    assert rule.flops == 2 * 8 * 4 * 12 * 16
    assert rule.is_reduced("i") and not rule.is_reduced("o")


def test_stars_align_to_the_right_and_broadcasts_have_no_factor() -> None:
    rule = declare(call([(3, 1, 5), (4, 5)], [(3, 4, 5)]), "b*, b* -> b*")
    assert rule.operands == ((("b2",), (), ("b0",)), (("b1",), ("b0",)))
    assert rule.results == ((("b2",), ("b1",), ("b0",)),)


def test_a_dimension_of_size_one_keeps_a_factor_of_size_one() -> None:
    rule = declare(call([(1, 5)], [(1, 5)]), "a b -> a b")
    assert rule.operands == ((("a",), ("b",)),)
    assert rule.by_name["a"].size == 1
    assert {role for s in strategies(rule, ONE_AXIS, grad=False) for _, role in s.roles} == {"I"}


@pytest.mark.parametrize("shapes", [[(0,), (1,)], [(1,), (0,)]])
def test_empty_tensors_broadcast_too(shapes: list[tuple[int, ...]]) -> None:
    rule = declare(call(shapes, []), "b*, b* ->")
    assert rule.by_name["b0"].size == 0
    assert rule.operands[shapes.index((1,))] == ((),)


def test_a_composite_dimension_gives_the_missing_size() -> None:
    rule = declare(call([(2, 12)], [(2, 3, 4)]), "b (h d) -> b h d")
    assert rule.operands == ((("b",), ("h", "d")),)
    rule = declare(call([(2, 12)], [(2, 12)]), "b (h d) -> b (h d)", factor_sizes={"h": 3})
    assert rule.by_name["d"].size == 4


def test_scalars_and_calls_without_tensors() -> None:
    assert declare(call([(3,)], [()]), "b* ->").results == ((),)
    assert declare(call([], [(3,)]), "-> n").operands == ()
    assert declare(call([(3,), ()], [(3,)]), "n, -> n").operands == ((("n",),), ())
    assert declare(call([(3, 1)], [(3,)]), "n 1 -> n").operands == ((("n",), ()),)


def test_whole_and_assisted_name_the_factors_of_a_star_at_once() -> None:
    assist = Assist(forward=1)
    node = call([(2, 3, 4)], [(2, 3, 4)])
    rule = declare(node, "b* s -> b* s", whole=["b"], assisted={"s": assist}, assist="autopar.f")
    assert [f.splittable for f in rule.factors] == [False, False, True]
    assert [f.assist for f in rule.factors] == [None, None, assist]
    rule = declare(node, "b* s -> b* s", whole=["b0"], assisted={"b": assist}, assist="autopar.f")
    assert [f.splittable for f in rule.factors] == [True, False, True]
    assert [f.assist for f in rule.factors] == [assist, assist, None]


@pytest.mark.parametrize(
    ("operands", "results", "spec", "problem"),
    [
        ([(2,)], [(2,)], "b b", "rule 'b b' has no '->'"),
        ([(2,)], [(2,)], "b, b -> b", "rule 'b, b -> b' has 2 operands, the call has 1"),
        ([(2,)], [(2,)], "b -> b, b", "rule 'b -> b, b' has 2 results, the call has 1"),
        ([(2, 3)], [(2,)], "b -> b", "the term 'b' does not fit shape (2, 3)"),
        ([(2,)], [(2,)], "b* c d -> b", "the term 'b* c d' does not fit shape (2,)"),
        ([(2, 3)], [(2,)], "b* c* -> b", "the term 'b* c*' does not fit shape (2, 3)"),
        ([(2,)], [(2,)], "b -> @b", "rule 'b -> @b': cannot read '@'"),
        ([(6,)], [(6,)], "(a b) -> (a b)", "no dimension gives the size of ['a', 'b']"),
        (
            [(6,), (4,)],
            [(6,)],
            "b, b -> b",
            "rule 'b, b -> b': factors ('b',) give 6, the dimension has 4",
        ),
        (
            [(6,)],
            [(4, 2)],
            "(a b) -> a b",
            "rule '(a b) -> a b': factors ('a', 'b') give 8, the dimension has 6",
        ),
    ],
)
def test_notation_that_does_not_fit(
    operands: list[Any], results: list[Any], spec: str, problem: str
) -> None:
    with pytest.raises(GraphError) as error:
        declare(call(operands, results), spec)
    assert str(error.value).startswith("a.b: ")
    assert problem in str(error.value)


def test_malformed_rules() -> None:
    with pytest.raises(GraphError, match=r"factors \['n'\] are used but not declared"):
        Rule((), ((("n",),),), ())
    with pytest.raises(GraphError, match="assisted factors need the name of a runtime operator"):
        Rule((Factor("n", 2, assist=Assist()),), ((("n",),),), ())
    for name in ("I", "R", "P0"):
        with pytest.raises(GraphError, match=f"a factor cannot be called '{name}', it is a role"):
            Rule((Factor(name, 2),), (), ())
    twice = ((("n",), ("n",)),)
    with pytest.raises(GraphError, match="a splittable factor is used twice in one tensor"):
        Rule((Factor("n", 2),), twice, ())
    assert Rule((Factor("n", 2, splittable=False),), twice, ()).operands == twice


# Strategies ------------------------------------------------------------------------------------


def test_strategies_of_linear_on_one_axis() -> None:
    roles = [s.role["tp"] for s in strategies(linear(), ONE_AXIS, grad=True)]
    assert roles == ["b1", "b0", "i", "o", "I", "R", "P0", "P1"]
    assert [s.role["tp"] for s in strategies(linear(), ONE_AXIS, grad=False)] == [
        r for r in roles if r != "R"
    ]


def test_strategies_on_two_axes_are_the_valid_pairs() -> None:
    rule = linear()
    found = strategies(rule, MESH, grad=True)
    assert len(set(found)) == len(found)
    pairs = {(s.role["dp"], s.role["tp"]) for s in found}
    names = ["b1", "b0", "i", "o", "I", "R", "P0", "P1"]
    # b0 has 4 and i has 12: neither divides by 2 * 4.
    assert pairs == {(a, b) for a in names for b in names} - {("b0", "b0"), ("i", "i")}
    assert all(is_valid(rule, s, MESH) for s in found)


def test_a_factor_that_does_not_divide_is_not_split() -> None:
    roles = {s.role["tp"] for s in strategies(linear(batch=6), ONE_AXIS, grad=False)}
    assert "b1" not in roles and "b0" in roles


def test_whole_factors_are_not_split() -> None:
    rule = declare(call([(8, 8)], [(8, 8)]), "b s -> b s", whole=["s"])
    assert [str(s) for s in strategies(rule, ONE_AXIS, grad=False)] == ["tp:b", "tp:I"]
    assert not is_valid(rule, strategy(tp="s"), ONE_AXIS)


@pytest.mark.parametrize(
    ("heads", "valid"),
    [
        # Only where one axis splits the heads into single ones may the other split a head.
        (2, {("h", "d"), ("h", "I"), ("I", "I")}),
        (4, {("h", "I"), ("I", "h"), ("d", "h"), ("I", "I")}),
        (8, {("h", "h"), ("h", "I"), ("I", "h"), ("I", "I")}),
        (1, {("d", "d"), ("d", "I"), ("I", "d"), ("I", "I")}),
    ],
)
def test_a_minor_factor_is_split_only_within_single_majors(
    heads: int, valid: set[tuple[str, str]]
) -> None:
    node = call([(heads * 16,)], [(heads, 16)])
    rule = declare(node, "(h d) -> h d")
    assert {(s.role["dp"], s.role["tp"]) for s in strategies(rule, MESH, grad=False)} == valid


def test_axes_of_a_composite_dimension_are_listed_major_first() -> None:
    rule = declare(call([(2 * 16,)], [(2, 16)]), "(h d) -> h d")
    chosen = strategy(dp="h", tp="d")
    assert layouts(rule, chosen) == (["[@dp+tp]"], ["[@dp, @tp]"])
    swapped = Mesh.of({"tp": 4, "dp": 2})
    chosen = strategy(tp="d", dp="h")
    assert is_valid(rule, chosen, swapped)
    assert layouts(rule, chosen) == (["[@dp+tp]"], ["[@dp, @tp]"])


def test_axis_orders_swap_only_axes_that_share_a_factor() -> None:
    rule = declare(call([(8, 8)], [(8, 8)]), "a b -> a b", linear=[[0]])
    plain = strategies(rule, MESH, grad=True)
    ordered = strategies(rule, MESH, grad=True, axis_orders=True)
    extra = [str(s) for s in ordered if s not in plain]
    assert extra == ["tp:a dp:a", "tp:b dp:b"]
    assert len(ordered) == len(set(ordered)) == len(plain) + 2
    chosen = next(s for s in ordered if str(s) == "tp:a dp:a")
    assert layouts(rule, chosen) == (["[@tp+dp, -]"], ["[@tp+dp, -]"])


def test_axis_orders_of_three_axes() -> None:
    mesh = Mesh.of({"x": 2, "y": 2, "z": 2})
    rule = declare(call([(8, 8)], [(8, 8)]), "a b -> a b")
    ordered = strategies(rule, mesh, grad=False, axis_orders=True)
    assert len([s for s in ordered if [r for _, r in s.roles] == ["a"] * 3]) == 6
    shared = {str(s) for s in ordered if {r for _, r in s.roles} == {"a", "b"}}
    assert {"x:a y:b z:a", "z:a y:b x:a"} <= shared
    assert len(shared) == 2 * 6


def test_local_factor_sizes() -> None:
    rule = linear()
    assert local_factor_size(rule, strategy(dp="o", tp="o"), "o", MESH) == 2
    assert local_factor_size(rule, strategy(dp="o", tp="i"), "i", MESH) == 3
    assert local_factor_size(rule, strategy(dp="I", tp="R"), "i", MESH) == 12


def test_opaque_rules_have_one_strategy() -> None:
    rule = opaque_rule([2, 0], [1])
    assert strategies(rule, MESH, grad=True) == (Strategy.invariant(MESH),)
    assert layouts(rule, Strategy.invariant(MESH)) == (["[-, -]", "[]"], ["[-]"])


# Layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "operands", "result"),
    [
        ("b1", ["[@tp, -, -]", "[-, -] rep(tp)", "[-] rep(tp)"], "[@tp, -, -]"),
        ("o", ["[-, -, -] rep(tp)", "[@tp, -]", "[@tp]"], "[-, -, @tp]"),
        ("i", ["[-, -, @tp]", "[-, @tp]", "[-] sum(tp)"], "[-, -, -] sum(tp)"),
        ("I", ["[-, -, -]", "[-, -]", "[-]"], "[-, -, -]"),
        ("R", ["[-, -, -] rep(tp)", "[-, -] rep(tp)", "[-] rep(tp)"], "[-, -, -] rep(tp)"),
        ("P0", ["[-, -, -] sum(tp)", "[-, -] rep(tp)", "[-] sum(tp)"], "[-, -, -] sum(tp)"),
        ("P1", ["[-, -, -] rep(tp)", "[-, -] sum(tp)", "[-] sum(tp)"], "[-, -, -] sum(tp)"),
    ],
)
def test_layouts_of_linear(role: str, operands: list[str], result: str) -> None:
    assert layouts(linear(), strategy(tp=role)) == (operands, [result])
    plain = [x.replace(" rep(tp)", "") for x in operands]
    assert layouts(linear(), strategy(tp=role), grad=False) == (
        plain,
        [result.replace(" rep(tp)", "")],
    )


def test_every_axis_plays_its_own_role() -> None:
    rule = linear()
    assert layouts(rule, strategy(dp="b1", tp="i")) == (
        ["[@dp, -, @tp]", "[-, @tp] rep(dp)", "[-] rep(dp) sum(tp)"],
        ["[@dp, -, -] sum(tp)"],
    )
    assert layouts(rule, strategy(dp="o", tp="o"))[1] == ["[-, -, @dp+tp]"]


def test_a_broadcast_operand_gets_terms_of_its_gradient() -> None:
    rule = declare(call([(8, 4), (1, 4)], [(8, 4)]), "a b, a b -> a b")
    assert layouts(rule, strategy(tp="a")) == (
        ["[@tp, -]", "[-, -] rep(tp)"],
        ["[@tp, -]"],
    )


@pytest.mark.parametrize(("absent", "result"), [("P", "[-] sum(tp)"), ("I", "[-]")])
def test_a_result_without_an_assisted_factor(absent: str, result: str) -> None:
    rule = declare(
        call([(8, 4), (4,)], [(8,)]),
        "b v, v -> b",
        assisted={"v": Assist(forward=1, absent=absent)},
        assist="autopar.f",
    )
    assert layouts(rule, strategy(tp="v")) == (["[-, @tp]", "[@tp]"], [result])


def test_a_result_that_lacks_the_factor_of_another_is_partial() -> None:
    rule = declare(call([(8, 4)], [(8, 4), (4,)]), "b c -> b c, c")
    assert not rule.is_reduced("b")
    assert layouts(rule, strategy(tp="b")) == (["[@tp, -]"], ["[@tp, -]", "[-] sum(tp)"])


def test_operands_without_gradient_are_never_replicate() -> None:
    rule = linear()
    for chosen in strategies(rule, MESH, grad=True):
        for k in range(3):
            layout = operand_layout(rule, chosen, k, False, MESH)
            assert layout.replicate == ()
            assert layout == operand_layout(rule, chosen, k, True, MESH).without_gradient()


def test_strategies_give_layouts_that_divide() -> None:
    rule = linear()
    shapes = [(8, 4, 12), (16, 12), (16,)]
    for chosen in strategies(rule, MESH, grad=True, axis_orders=True):
        for k, shape in enumerate(shapes):
            assert operand_layout(rule, chosen, k, True, MESH).divides(shape, MESH)
        assert result_layout(rule, chosen, 0, True, MESH).divides((8, 4, 16), MESH)


def test_strategies_print_axis_and_role() -> None:
    assert str(strategy(dp="b1", tp="P0")) == "dp:b1 tp:P0"
    assert Strategy.invariant(MESH).role == {"dp": "I", "tp": "I"}
    assert result_layout(linear(), Strategy.invariant(MESH), 0, True, MESH) == Layout.whole(3)
