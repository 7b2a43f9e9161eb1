"""What operators and parameter updates cost, by strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assist, Rule, Strategy, strategies
from autopar.ir.rules.registry import rule_for
from autopar.passes.collective_cost import collective_time
from autopar.passes.compute_cost import (
    ADAM_BYTES_PER_ELEMENT,
    call_times,
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
    assert one(node, rule, device) == pytest.approx(expected + bias_gradient(device))


def bias_gradient(device: Device) -> float:
    """Summing the gradient of `linear` over its rows."""
    return (8192 + 1) * 16384 * 2 / device.memory_bandwidth + device.launch


@pytest.mark.parametrize(
    ("grads", "products"),
    [([False, False, False], 1), ([True, False, False], 2), ([False, True, False], 2)],
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
    device = replace(device, launch=0.0, memory_bandwidth=1e30)
    whole = one(node, rule, device)
    assert one(node, rule, device, tp=factor) == pytest.approx(whole / 4)
    assert one(node, rule, device, dp=factor, tp=factor) == pytest.approx(whole / 8)


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


def test_a_view_of_a_part_is_given_a_whole_gradient(device: Device) -> None:
    part = call("aten.slice.Tensor", [(4096, 4096)], [(1024, 4096)])
    rule = declare(part, "a b -> c b", whole=("a", "c"))
    expected = (1024 + 4096) * 4096 * 2 / device.memory_bandwidth + device.launch
    assert one(part, rule, device) == pytest.approx(expected)
    copies = call("aten.expand.default", [(1, 4096)], [(64, 4096)])
    rule = declare(copies, "a b -> a b")
    expected = (64 + 1) * 4096 * 2 / device.memory_bandwidth + device.launch
    assert one(copies, rule, device) == pytest.approx(expected)


def test_special_functions_take_their_time(device: Device) -> None:
    """Twice as long as the memory, so that nothing else is seen; both are divided by a split."""
    tensor = 4096 * 4096 * 2 / device.memory_bandwidth
    slow = replace(device, special_rate=4096 * 4096 / (10 * tensor))
    node = call("aten.exp.default", [(4096, 4096)], [(4096, 4096)])
    rule = declare(node, "a b -> a b", special_per_point=(1, 0))
    backward = 3 * tensor
    assert one(node, rule, slow) == pytest.approx(10 * tensor + backward + 2 * slow.launch)
    local = one(node, rule, slow, dp="a", tp="b")
    assert local == pytest.approx((10 * tensor + backward) / 8 + 2 * slow.launch)
    rule = declare(node, "a b -> a b", special_per_point=(1, 1))
    assert one(node, rule, slow) == pytest.approx(20 * tensor + 2 * slow.launch)


def test_what_is_not_hidden_adds_up(device: Device) -> None:
    """A thin product: few operations per byte attain less of the rate."""
    node = call("aten.mm.default", [(4096, 64), (64, 4096)], [(4096, 4096)], grads=[False, False])
    rule = declare(node, "m k, k n -> m n", linear=((0,), (1,)), flops_per_point=2)
    computing = rule.flops / device.flop_rate(HALF)
    memory = (4096 * 4096 + 2 * 64 * 4096) * 2 / device.memory_bandwidth
    for share in (0.0, 0.5, 1.0):
        expected = max(computing, memory) + share * min(computing, memory) + device.launch
        assert one(node, rule, replace(device, unhidden=share)) == pytest.approx(expected)


def test_inner_tensors_are_written_and_their_gradients_too(device: Device) -> None:
    node = call("aten.cross_entropy_loss.default", [(512, 4096)], [()])
    rule = declare(node, "n c ->")
    inner = declare(node, "n c ->", inner=(("n", "c"),))
    tensor = 512 * 4096 * 2 / device.memory_bandwidth
    assert one(node, inner, device) - one(node, rule, device) == pytest.approx(4 * tensor)
    split = one(node, inner, device, tp="n") - one(node, rule, device, tp="n")
    assert split == pytest.approx(tensor)


def test_forward_and_backward_are_told_apart(device: Device) -> None:
    node, rule = linear()
    strategy = [Strategy(tuple((axis, "I") for axis in MESH.names))]
    times = call_times(node, rule, strategy, MESH, device)
    assert times.forward + times.backward + times.assist == times.total
    assert times.total == strategy_times(node, rule, strategy, MESH, device)
    assert 2 * times.forward < times.backward and not times.assist


@pytest.mark.parametrize(
    ("op", "args", "special"),
    [
        ("aten.exp.default", (), (1, 0)),
        ("aten.tanh.default", (), (3, 0)),
        ("aten.gelu.default", (), (1, 2)),
        ("aten.relu.default", (), (0, 0)),
        ("aten.pow.Tensor_Scalar", (3.0,), (0, 0)),
        ("aten.pow.Tensor_Scalar", (1.7,), (5, 5)),
        ("aten.softmax.int", (1,), (1, 0)),
        ("aten.log_softmax.int", (1,), (1, 1)),
    ],
)
def test_which_operators_take_exponentials(
    op: str, args: tuple[Any, ...], special: tuple[int, int]
) -> None:
    x, y = (Value(name, (8, 16), torch.float32, True) for name in "xy")
    rule = rule_for(Node(op, (x, *args), {}, (y,)))
    assert rule.special == (128 * special[0], 128 * special[1])


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
