"""Rules found by trying: right for every operator, and none where nothing is certain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import custom_operators as ops
from autopar.ir.declaration import Declaration
from autopar.ir.discovered import discovered, discovered_rule
from autopar.ir.errors import RuleError
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument
from autopar.ir.rules import rule_for
from harness import check_sample, make_case
from samples.sample import Sample, integers, normal

_NAME = "autopar_test.{}.default"


def _sample(op: Any, *args: Any) -> Sample:
    return Sample(str(op._opoverload), args)


def _x(*shape: int) -> Tensor:
    return normal(*shape)


#: Operator -> a call, and the declaration that says all that may be split.
_SPLIT = {
    "fused_gate": (
        _sample(ops.fused_gate, _x(4, 6, 12), _x(4, 6, 12), _x(12), 0.5),
        Declaration("a b c, a b c, c -> a b c", linear=((0,),)),
    ),
    "energy": (
        _sample(ops.energy, _x(4, 6, 12), _x(4, 6, 12)),
        Declaration("a b c, a b c -> a b"),
    ),
    "ridge_solve": (
        _sample(ops.ridge_solve, _x(4, 8, 3), _x(4, 8, 6), 0.1),
        Declaration("a 1 1, a 1 b -> a 1 b", linear=((1,),)),
    ),
    "windowed_attention": (
        _sample(ops.windowed_attention, _x(4, 9, 12), _x(4, 9, 12), _x(4, 9, 12), 4, 4),
        Declaration(
            "a 1 (b rest0), a 1 (b rest1), a 1 (b rest2) -> a 1 (b rest3)",
            whole=("rest",),
            linear=((2,),),
            sizes=(SizeArgument(3, factor="b"),),
        ),
    ),
    "read_rows": (
        _sample(ops.read_rows, _x(10, 12), integers(10, 4, 6), _x(12)),
        Declaration("1 a, b c, a -> b c a", linear=((0, 2),)),
    ),
    "grouped_product": (
        _sample(ops.grouped_product, _x(9, 6), _x(3, 6, 12), torch.tensor([2, 3, 4])),
        Declaration("1 a, 1 a b, 1 -> 1 b", linear=((0,), (1,))),
    ),
    "row_norm": (
        _sample(ops.row_norm, _x(4, 6, 12), _x(12), _x(12), 1e-5),
        Declaration("a b 1, 1, 1 -> a b 1, a b"),
    ),
    "decaying_scan": (
        _sample(ops.decaying_scan, [_x(4, 6, 5), _x(4, 6, 5)], _x(6)),
        Declaration("a b 1, a b 1, b -> a b 1", linear=((0, 1),)),
    ),
}

#: Operator -> a call of which nothing may be split, and a part of the reason.
_WHOLE = {
    "batch_clip": (_sample(ops.batch_clip, _x(12, 6), 3.0), "no dimension was found"),
    "jitter": (_sample(ops.jitter, _x(4, 12)), "it gives other results"),
    "clip_gradient": (_sample(ops.clip_gradient, _x(4, 12), 1.0), "backward is not linear"),
}


def _node(sample: Sample) -> Node:
    return make_case(sample).node


def _spec(rule: Rule) -> tuple[Any, ...]:
    """What a rule says of the splittable factors, whatever they are called."""
    splittable = {f.name for f in rule.factors if f.splittable}
    sides = [
        [[[n for n in dim if n in splittable] for dim in dims] for dims in side]
        for side in (rule.operands, rule.results)
    ]
    return sides, rule.linear, rule.joins, rule.sizes


@pytest.mark.parametrize("name", _SPLIT)
def test_a_custom_operator_is_split_where_it_may_be(name: str) -> None:
    sample, declaration = _SPLIT[name]
    node = _node(sample)
    rule = rule_for(node)
    assert not rule.opaque, rule.note
    assert _spec(rule) == _spec(declaration.rule(node))
    assert rule.note == f"discovered: {declaration}"


@pytest.mark.slow
@pytest.mark.parametrize("name", _SPLIT)
def test_every_strategy_of_a_discovered_rule_reproduces_the_operator(name: str) -> None:
    assert check_sample(_SPLIT[name][0]) > 3


@pytest.mark.parametrize("name", _WHOLE)
def test_an_operator_that_is_not_certain_stays_whole(name: str) -> None:
    sample, reason = _WHOLE[name]
    rule = rule_for(_node(sample))
    assert rule.opaque
    assert reason in rule.note


def test_a_window_is_seen_on_any_size_of_the_sequence() -> None:
    for length in (3, 16):
        x = _x(2, length, 6)
        rule = rule_for(_node(_sample(ops.windowed_attention, x, x, x, 2, 4)))
        assert [len(dim) for dim in rule.operands[0]] == [1, 0, 2]


@pytest.mark.parametrize(("distance", "apart"), [(100, False), (128, True)])
def test_rows_that_depend_on_far_ones_are_not_split(distance: int, apart: bool) -> None:
    """The dependence does not show on small sizes: the traced one is tried as well."""
    rule = rule_for(_node(_sample(ops.echo, _x(2, 128, 6), distance)))
    assert [bool(dim) for dim in rule.operands[0]] == [True, apart, True]


def test_a_limit_that_few_rows_cannot_reach_is_seen_on_more() -> None:
    """Of six rows none can outweigh their mean ten times; of twenty one can."""
    few, many = (rule_for(_node(_sample(ops.batch_clip, _x(n, 6), 10.0))) for n in (6, 40))
    assert many.opaque, many.note
    assert few.linear == ((0,),)


def test_equal_calls_are_tried_once_and_listed() -> None:
    node = _node(_SPLIT["energy"][0])
    discovered_rule(node)
    before = discovered()
    discovered_rule(node)
    assert discovered() == before
    (found,) = (d for d in before if d.op == node.op and "[4, 6, 12]" in d.call)
    assert str(found).startswith('autopar.register_rule("autopar_test.energy", "a b c, a b c ->')


def test_discovery_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    discovered_rule(_node(_sample(ops.energy, _x(3, 5), _x(3, 5))))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", _SPLIT)
def test_a_declaration_survives_being_written_down(name: str) -> None:
    declaration = _SPLIT[name][1]
    assert Declaration.from_json(declaration.to_json()) == declaration


@pytest.mark.parametrize(
    "data", [None, {}, {"spec": 3}, {"spec": "a", "hole": []}, {"spec": "a", "joins": ["x"]}]
)
def test_a_malformed_declaration_is_refused(data: Any) -> None:
    with pytest.raises(RuleError, match="not the declaration of a rule"):
        Declaration.from_json(data)
