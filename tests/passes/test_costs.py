"""What operators and parameter updates cost, by strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assist, Rule, Strategy, strategies
from autopar.passes.collective_cost import collective_time
from autopar.passes.compute_cost import (
    ADAM_BYTES_PER_ELEMENT,
    is_view,
    parameter_times,
    strategy_times,
)
from autopar.passes.device import Device, device_for

MESH = Mesh.of({"dp": 2, "tp": 4})
HALF = torch.bfloat16


@pytest.fixture
def device() -> Device:
    return device_for("h100", MESH)


def call(
    op: str,
    operands: list[tuple[int, ...]],
    results: list[tuple[int, ...]],
    *,
    grads: list[bool] | None = None,
    dtype: torch.dtype = HALF,
) -> Node:
    grads = [True] * len(operands) if grads is None else grads
    args = tuple(
        Value(f"x{i}", shape, dtype, grad)
        for i, (shape, grad) in enumerate(zip(operands, grads, strict=True))
    )
    made = tuple(Value(f"y{i}", shape, dtype, any(grads)) for i, shape in enumerate(results))
    return Node(op, args, {}, made)


def linear(*, grads: list[bool] | None = None) -> tuple[Node, Rule]:
    shapes = [(8192, 4096), (16384, 4096), (16384,)]
    node = call("aten.linear.default", shapes, [(8192, 16384)], grads=grads)
    rule = declare(
        node, "b* i, o i, o -> b* o", linear=((0, 2), (1, 2)), joins=(2,), flops_per_point=2
    )
    return node, rule


def one(node: Node, rule: Rule, device: Device, **roles: str) -> float:
    strategy = Strategy(tuple((axis, roles.get(axis, "I")) for axis in MESH.names))
    (seconds,) = strategy_times(node, rule, [strategy], MESH, device)
    return seconds


def test_a_large_product_takes_its_operations_forward_and_twice_backward(device: Device) -> None:
    node, rule = linear()
    flops = 2 * 8192 * 4096 * 16384
    expected = 3 * flops / device.flop_rate(HALF) + 3 * device.launch
    assert one(node, rule, device) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("grads", "products"),
    [([False, False, False], 1), ([True, False, False], 2), ([False, True, True], 2)],
)
def test_only_operands_with_a_gradient_cost_a_product_backward(
    grads: list[bool], products: int, device: Device
) -> None:
    flops = 2 * 8192 * 4096 * 16384
    expected = products * (flops / device.flop_rate(HALF) + device.launch)
    assert one(*linear(grads=grads), device) == pytest.approx(expected)


@pytest.mark.parametrize("factor", ["b0", "i", "o"])
def test_splitting_any_factor_divides_the_operations(factor: str, device: Device) -> None:
    node, rule = linear()
    launches = 3 * device.launch
    whole = one(node, rule, device) - launches
    assert one(node, rule, device, tp=factor) - launches == pytest.approx(whole / 4)
    assert one(node, rule, device, dp=factor, tp=factor) - launches == pytest.approx(whole / 8)


@pytest.mark.parametrize("role", ["I", "R", "P0"])
def test_copies_compute_everything_again(role: str, device: Device) -> None:
    node, rule = linear()
    assert one(node, rule, device, tp=role) == one(node, rule, device)


def test_the_order_of_axes_in_a_strategy_does_not_matter(device: Device) -> None:
    node, rule = linear()
    orders = [(("dp", "o"), ("tp", "b0")), (("tp", "b0"), ("dp", "o"))]
    times = strategy_times(node, rule, [Strategy(roles) for roles in orders], MESH, device)
    assert times[0] == times[1]


def pointwise(op: str, **rule: Any) -> tuple[Node, Rule]:
    node = call(op, [(4096, 4096), (4096, 4096)], [(4096, 4096)])
    return node, declare(node, "a b, a b -> a b", **rule)


def test_a_pointwise_operator_takes_its_memory_traffic(device: Device) -> None:
    # mul reads 2 and writes 1; backward it reads the gradient and both operands, writes 2.
    tensor = 4096 * 4096 * 2 / device.memory_bandwidth
    node, rule = pointwise("aten.mul.Tensor", linear=((0,), (1,)))
    assert one(node, rule, device) == pytest.approx((3 + 5) * tensor + 2 * device.launch)
    local = one(node, rule, device, dp="a", tp="b")
    assert local == pytest.approx((3 + 5) * tensor / 8 + 2 * device.launch)


def test_a_jointly_linear_operator_saves_no_operands(device: Device) -> None:
    tensor = 4096 * 4096 * 2 / device.memory_bandwidth
    node, rule = pointwise("aten.sub.Tensor", linear=((0, 1),))
    assert one(node, rule, device) == pytest.approx((3 + 3) * tensor + 2 * device.launch)


def test_an_addition_hands_its_gradient_on(device: Device) -> None:
    tensor = 4096 * 4096 * 2 / device.memory_bandwidth
    node, rule = pointwise("aten.add.Tensor", linear=((0, 1),))
    assert one(node, rule, device) == pytest.approx(3 * tensor + device.launch)
    broadcast = call("aten.add.Tensor", [(4096, 4096), (4096,)], [(4096, 4096)])
    rule = declare(broadcast, "a b, b -> a b", linear=((0, 1),))
    assert one(broadcast, rule, device) > 2 * (2 * tensor + device.launch)


def test_a_look_up_reads_the_rows_it_needs_and_writes_the_whole_gradient(device: Device) -> None:
    args = (
        Value("w", (50304, 4096), HALF, True),
        Value("ids", (16, 1024), torch.int64),
    )
    node = Node("aten.embedding.default", args, {}, (Value("y", (16, 1024, 4096), HALF, True),))
    rule = declare(node, "v d, b* -> b* d", assisted={"v": Assist()}, assist="autopar.embedding")
    rows, table, ids = 16 * 1024 * 4096 * 2, 50304 * 4096 * 2, 16 * 1024 * 8
    forward = 2 * rows + ids
    backward = rows + rows + ids + table
    expected = (forward + backward) / device.memory_bandwidth + 2 * device.launch
    assert one(node, rule, device) == pytest.approx(expected)


def test_views_are_free(device: Device) -> None:
    view = call("aten.view.default", [(64, 64)], [(4096,)])
    rule = declare(view, "a b -> (a b)")
    times = strategy_times(view, rule, strategies(rule, MESH, grad=True), MESH, device)
    assert len(times) > 3 and not times.any()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten.view.default", True),
        ("aten.transpose.int", True),
        ("aten.slice.Tensor", True),
        ("aten.expand.default", True),
        ("aten.reshape.default", True),
        ("aten._unsafe_view.default", True),
        ("aten.clone.default", False),
        ("aten.contiguous.default", False),
        ("aten.relu.default", False),
        ("autopar.embedding", False),
        ("unknown.op.default", False),
    ],
)
def test_which_operators_are_views(op: str, expected: bool) -> None:
    assert is_view(call(op, [(4, 4)], [(4, 4)])) is expected


def test_a_cast_is_no_view() -> None:
    x, y = Value("x", (4,), torch.float32), Value("y", (4,), HALF)
    assert not is_view(Node("aten.to.dtype", (x, HALF), {}, (y,)))
    assert not is_view(Node("aten.zeros.default", ([4],), {}, (y,)))


def softmax(assist: Assist) -> tuple[Node, Rule]:
    node = call("aten.softmax.int", [(1024, 4096)], [(1024, 4096)], dtype=torch.float32)
    rule = declare(node, "b n -> b n", assisted={"n": assist}, assist="autopar.softmax")
    return node, rule


def test_an_assisted_factor_pays_for_its_all_reduces(device: Device) -> None:
    node, assisted = softmax(Assist(forward=2, backward=1, over=("b",)))
    _, silent = softmax(Assist(over=("b",)))
    extra = one(node, assisted, device, dp="b", tp="n") - one(node, silent, device, dp="b", tp="n")
    nbytes = 1024 / 2 * 4
    expected = 3 * collective_time(device, MESH, "all_reduce", ("tp",), nbytes)
    assert extra == pytest.approx(expected)
    assert one(node, assisted, device, dp="b") == one(node, silent, device, dp="b")


def test_an_assisted_factor_over_both_axes_is_one_group(device: Device) -> None:
    node, assisted = softmax(Assist(forward=1, over=("b",)))
    _, silent = softmax(Assist(over=("b",)))
    roles = {"dp": "n", "tp": "n"}
    extra = one(node, assisted, device, **roles) - one(node, silent, device, **roles)
    expected = collective_time(device, MESH, "all_reduce", ("dp", "tp"), 1024 * 4)
    assert extra == pytest.approx(expected)


def test_the_backward_all_reduces_need_a_gradient(device: Device) -> None:
    node = call("aten.softmax.int", [(64, 64)], [(64, 64)], grads=[False])
    assist = {"n": Assist(forward=1, backward=5, over=("b",))}
    rule = declare(node, "b n -> b n", assisted=assist, assist="autopar.softmax")
    silent = declare(node, "b n -> b n", assisted={"n": Assist()}, assist="autopar.softmax")
    extra = one(node, rule, device, tp="n") - one(node, silent, device, tp="n")
    expected = collective_time(device, MESH, "all_reduce", ("tp",), 64 * 2)
    assert extra == pytest.approx(expected)


def test_every_strategy_of_a_rule_is_priced_at_once(device: Device) -> None:
    node, rule = linear()
    found = strategies(rule, MESH, grad=True)
    times = strategy_times(node, rule, found, MESH, device)
    assert times.shape == (len(found),)
    alone = [strategy_times(node, rule, [s], MESH, device)[0] for s in found]
    np.testing.assert_array_equal(times, alone)


def test_operators_without_operands_or_strategies(device: Device) -> None:
    node = call("aten.zeros.default", [], [(1024, 1024)])
    rule = declare(node, "-> a b")
    expected = 1024 * 1024 * 2 / device.memory_bandwidth + device.launch
    assert one(node, rule, device) == pytest.approx(expected)
    assert strategy_times(node, rule, [], MESH, device).shape == (0,)


def test_a_parameter_update_costs_the_local_shard(device: Device) -> None:
    weight = Value("w", (4096, 4096), torch.float32, True)
    layouts = [
        Layout.whole(2),
        Layout.make([["tp"], []]),
        Layout.make([["tp", "dp"], []]),
        Layout.make([[], []], replicate=["dp"]),
    ]
    times = parameter_times(weight, layouts, MESH, device) - device.launch
    whole = 4096 * 4096 * ADAM_BYTES_PER_ELEMENT / device.memory_bandwidth
    np.testing.assert_allclose(times, [whole, whole / 4, whole / 8, whole])


def test_a_frozen_parameter_is_not_updated(device: Device) -> None:
    frozen = Value("w", (4, 4), torch.float32, False)
    assert not parameter_times(frozen, [Layout.whole(2)], MESH, device).any()
