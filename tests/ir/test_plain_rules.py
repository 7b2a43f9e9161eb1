"""What the plain rules say, beyond what running their strategies can show."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.graph import Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Strategy
from autopar.ir.rules import rule_for
from autopar.ir.rules.reshape import common_factors
from autopar.passes.localise import local_call

FLOAT = torch.float32


def value(name: str, *shape: int, dtype: torch.dtype = FLOAT) -> Value:
    return Value(name, shape, dtype, dtype.is_floating_point)


def call(op: str, *args: object, result: Value | None = None, **kwargs: object) -> Node:
    results = (result,) if result is not None else ()
    return Node(op=op, args=args, kwargs=kwargs, results=results)


# --- reshape ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((8, 16, 768), (8, 16, 12, 64), ("d0 d1 d2·d3", "d0 d1 d2 d3")),
        ((8, 16, 12, 64), (128, 768), ("d0 d1 d2 d3", "d0·d1 d2·d3")),
        ((1, 12, 1), (12, 1), ("- d0 -", "d0 -")),
        ((6, 4), (4, 6), ("d0·d1! d4!", "d0·d2! d3!")),
        ((3, 4), (4, 3), ("d0! d2!", "d1! d3!")),
        ((2, 3, 4), (2, 4, 3), ("d0 d1! d3!", "d0 d2! d4!")),
        ((), (1,), ("", "-")),
    ],
)
def test_a_reshape_is_written_in_common_factors(before, after, expected) -> None:
    source, result, _, whole = common_factors(before, after)

    def text(side: list[list[str]]) -> str:
        return " ".join("·".join(n + "!" * (n in whole) for n in dim) or "-" for dim in side)

    assert (text(source), text(result)) == (expected[0], expected[1])


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same number of elements."""
    parts = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=6))

    def grouped(order: list[int]) -> tuple[int, ...]:
        cuts = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
        shape = [1]
        for part, cut in zip(order, cuts, strict=True):
            shape = [*shape, part] if cut else [*shape[:-1], shape[-1] * part]
        return tuple(shape)

    return grouped(parts), grouped(draw(st.permutations(parts)))


@given(regroupings())
def test_common_factors_multiply_to_every_dimension(shapes) -> None:
    before, after = shapes
    source, result, sizes, whole = common_factors(before, after)
    for side, shape in ((source, before), (result, after)):
        assert [math.prod(sizes[n] for n in dim) for dim in side] == list(shape)
    shared = [[n for dim in side for n in dim if n not in whole] for side in (source, result)]
    assert shared[0] == shared[1]


# --- pointwise ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "groups"),
    [
        ("add.Tensor", ("x", "y"), ((0, 1),)),
        ("add.Tensor", ("x", 1.5), ()),
        ("add.Tensor", ("x", "ids"), ()),
        ("mul.Tensor", ("x", "y"), ((0,), (1,))),
        ("mul.Tensor", ("x", 2.0), ((0,),)),
        ("mul.Tensor", ("x", "ids"), ((0,),)),
        ("mul.Tensor", ("ids", "ids"), ()),
        ("div.Tensor", ("x", "y"), ((0,),)),
        ("where.self", ("mask", "x", "y"), ((1, 2),)),
        ("where.ScalarOther", ("mask", "x", 0.0), ((1,),)),
        ("where.ScalarOther", ("mask", "x", -1e9), ()),
        ("masked_fill.Scalar", ("x", "mask", 0), ((0,),)),
        ("masked_fill.Scalar", ("x", "mask", -1e9), ()),
        ("addcmul.default", ("x", "y", "y"), ((0, 1), (0, 2))),
        ("relu.default", ("x",), ()),
    ],
)
def test_a_pointwise_operator_is_linear_only_where_it_is(op, args, groups) -> None:
    known = {
        "x": value("x", 4, 6),
        "y": value("y", 6),
        "ids": value("ids", 6, dtype=torch.int64),
        "mask": value("mask", 4, 6, dtype=torch.bool),
    }
    values = [known.get(a, a) for a in args]
    integers = all(v is known["ids"] for v in values)
    result = value("r", 6, dtype=torch.int64) if integers else value("r", 4, 6)
    rule = rule_for(call(f"aten.{op}", *values, result=result))
    assert rule.linear == groups
    assert not rule.opaque


@pytest.mark.parametrize("op", ["aten.rrelu.default", "aten.equal.default", "aten.relu_.default"])
def test_random_and_in_place_operators_are_not_taken_for_pointwise(op: str) -> None:
    x = value("x", 4, 6)
    args = (x, x) if "equal" in op else (x,)
    assert rule_for(call(op, *args, result=value("y", 4, 6))).opaque


def test_an_operator_nobody_knows_is_opaque() -> None:
    node = call("elsewhere.mystery.default", value("x", 4), result=value("y", 4))
    assert rule_for(node).opaque


# --- products -----------------------------------------------------------------------------------


def test_flops_of_products_count_each_multiplication_and_addition() -> None:
    x, w = value("x", 2, 8, 16), value("w", 32, 16)
    linear = call("aten.linear.default", x, w, result=value("y", 2, 8, 32))
    assert rule_for(linear).flops == 2 * (2 * 8) * 16 * 32
    image, kernel = value("i", 2, 4, 8, 8), value("k", 6, 4, 3, 3)
    convolution = call("aten.conv2d.default", image, kernel, result=value("y", 2, 6, 6, 6))
    assert rule_for(convolution).flops == 2 * (2 * 6 * 6 * 6) * (4 * 3 * 3)


def test_split_groups_of_a_convolution_are_counted_locally() -> None:
    x, w = value("x", 2, 12, 5), value("w", 12, 1, 3)
    node = call("aten.conv1d.default", x, w, None, [1], [1], [1], 12, result=value("y", 2, 12, 5))
    mesh = Mesh.of({"tp": 4})
    rule = rule_for(node)
    local = local_call(node, rule, Strategy((("tp", "g"),)), mesh)
    assert local.args[6] == 3
    assert local.args[:6] == node.args[:6]
