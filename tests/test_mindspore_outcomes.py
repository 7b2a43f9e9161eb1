"""The outcomes of MindSpore's own tests, met or beaten.

Each test is one row of what MindSpore runs for an operator under a strategy: the collectives of
ours are stated exactly, must send no more than theirs, and the result must equal one device
(`outcome` checks that, and that the hints hold).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from autopar import shard
from autopar.ir.mesh import Mesh
from autopar.passes.device import device_for
from outcomes import (
    EIGHT,
    Net,
    Ran,
    all_gather,
    all_reduce,
    all_to_all,
    moved,
    outcome,
    randn,
    reduce_scatter,
    refusal,
    seconds,
)

SIXTEEN = {**EIGHT, "d": 2}


def matmul(strategy: Any, out: Any = None) -> Callable[..., torch.Tensor]:
    return shard(torch.matmul, strategy, out)


def relu(*strategy: int) -> Callable[..., torch.Tensor]:
    return shard(torch.relu, (strategy,))


def two_matmuls(first: Any, second: Any) -> Net:
    """[128, 32] by [32, 64], then by [64, 64]."""
    return Net(
        lambda net, x: matmul(second)(matmul(first)(x, net.w), net.v), w=(32, 64), v=(64, 64)
    )


# --- matrix products -----------------------------------------------------------------------------


#: What MindSpore runs between and in the two products of ((4,2),(2,1)) and ((2,4),(4,1)).
THEIRS_BETWEEN = [
    all_reduce(2, 32, 64),
    all_gather(2, 64, 64),
    all_reduce(4, 64, 64),
]


def test_two_matmuls_whose_strategies_meet_at_different_layouts() -> None:
    found = outcome(two_matmuls(((4, 2), (2, 1)), ((2, 4), (4, 1))), randn(128, 32))
    assert found.forward == [
        all_reduce(4, 64, 64),
        all_to_all(4, 16, 64),
        reduce_scatter(2, 32, 64),
    ]
    assert moved(found.forward) < moved(THEIRS_BETWEEN)
    assert found.strategies("aten.matmul") == ["((4, 2), (2, 1))", "((2, 4), (4, 1))"]


@pytest.mark.parametrize("name", ["h100", "a100", "cpu"])
def test_two_matmuls_take_no_longer_than_theirs_where_latency_decides(name: str) -> None:
    device = device_for(name, Mesh.of(EIGHT))
    found = outcome(two_matmuls(((4, 2), (2, 1)), ((2, 4), (4, 1))), randn(128, 32), device=name)
    assert seconds(found.forward, device) <= seconds(THEIRS_BETWEEN, device)


def test_weights_split_where_the_activation_is_whole_are_gathered_and_nothing_else() -> None:
    found = outcome(two_matmuls(((8, 1), (8, 1)), ((8, 1), (8, 1))), randn(128, 32))
    assert found.forward == [all_gather(8, 32, 64), all_gather(8, 64, 64)]
    assert found.backward == [reduce_scatter(8, 32, 64), reduce_scatter(8, 64, 64)]
    assert {str(layout) for layout in found.plan.parameter_layouts.values()} == {"[@a+b+c, -]"}
    assert any("parameter 'w' is stored split as (8, 1)" in note for note in found.plan.notes)


def test_an_output_strategy_over_the_summed_axis_is_a_reduce_scatter() -> None:
    net = Net(lambda net, x: matmul(((2, 2), (2, 2)), ((4, 2),))(x, net.w), w=(32, 64))
    found = outcome(net, randn(128, 32))
    assert found.forward == [reduce_scatter(2, 64, 32)]
    assert found.backward == [all_gather(2, 64, 32), all_reduce(2, 16, 32)]


def test_an_output_strategy_of_too_many_pieces_is_refused() -> None:
    net = Net(lambda net, x: matmul(((2, 2), (2, 2)), ((8, 2),))(x, net.w), w=(32, 64))
    message = refusal(net, randn(128, 32))
    assert "shard(matmul)" in message
    assert "output 0 of aten.matmul.default, shape (128, 64)" in message
    assert "output 0 of aten.matmul.default, dimension 0 can be split into 1, 2 or 4, got 8" in (
        message
    )


@pytest.mark.slow
def test_batched_matmul_split_over_the_sum() -> None:
    net = Net(lambda net, x: shard(torch.bmm, ((2, 2, 2), (2, 2, 2)))(x, net.w), w=(128, 32, 32))
    found = outcome(net, randn(128, 64, 32), mesh=SIXTEEN)
    assert found.forward == [all_reduce(2, 64, 32, 16)]


def test_layout_of_named_axes_gives_a_reduce_scatter() -> None:
    net = Net(
        lambda net, x: matmul(
            (("dp", "mp"), ("mp", "sp")),
            ((("dp", "mp"), "sp"),),
        )(x, net.w),
        w=(64, 64),
    )
    found = outcome(net, randn(64, 64), mesh={"dp": 2, "sp": 2, "mp": 2})
    assert found.forward == [reduce_scatter(2, 32, 32)]


# --- redistribution ------------------------------------------------------------------------------


def test_a_split_tensor_is_gathered_for_an_operator_that_wants_it_whole() -> None:
    net = Net(lambda net, x, y: relu(1, 1)(shard(torch.add, ((8, 1), (8, 1)))(x, y)))
    found = outcome(net, randn(128, 32), randn(128, 32))
    assert found.forward == [all_gather(8, 128, 32)]


def test_a_whole_tensor_is_sliced_without_communication() -> None:
    net = Net(lambda net, x, y: relu(8, 1)(shard(torch.add, ((1, 1), (1, 1)))(x, y)))
    found = outcome(net, randn(128, 32), randn(128, 32))
    assert found.forward == []


def test_rows_to_columns_is_one_all_to_all() -> None:
    found = outcome(Net(lambda net, x: relu(1, 8)(relu(8, 1)(x))), randn(128, 32))
    assert found.forward == [all_to_all(8, 16, 32)]


def test_four_by_two_to_two_by_four_is_one_all_to_all_where_they_take_two() -> None:
    net = Net(lambda net, x: relu(2, 4)(relu(4, 2)(x)).sum())
    found = outcome(net, randn(128, 32))
    loss = all_reduce(8, 1)
    assert found.forward == [loss, all_to_all(2, 32, 16)]
    assert moved(found.forward) < moved([loss, all_to_all(2, 32, 16), all_to_all(2, 32, 16)])


# --- look-up and loss ----------------------------------------------------------------------------


def gather(table: tuple[int, int]) -> Net:
    """A look-up of [64, 64] ids in a table of [64, 64]."""
    return Net(lambda net, ids: shard(F.embedding, ((1, 1), table))(ids, net.p), p=(64, 64))


IDS = torch.randint(64, (64, 64), generator=torch.Generator().manual_seed(0))


def test_look_up_in_a_table_split_by_rows_is_masked_and_all_reduced() -> None:
    found = outcome(gather((8, 1)), IDS)
    assert found.forward == [all_reduce(8, 64, 64, 64)]
    assert found.backward == []
    (call,) = [node for node in found.graph.calls if node.op == "autopar.embedding"]
    assert str(call.operands[0].layout) == "[@a+b+c, -]"


def test_look_up_for_a_batch_split_consumer_is_reduce_scattered() -> None:
    net = Net(
        lambda net, ids: relu(8, 1, 1)(shard(F.embedding, ((1, 1), (8, 1)))(ids, net.p)),
        p=(64, 64),
    )
    found = outcome(net, IDS)
    assert found.forward == [reduce_scatter(8, 64, 64, 64)]


def test_look_up_in_a_table_split_by_columns_needs_no_communication() -> None:
    found = outcome(gather((1, 8)), IDS)
    assert found.forward == found.backward == []


def test_a_module_lists_the_table_first_as_theirs_does() -> None:
    net = torch.nn.Embedding(64, 64).double()
    found = outcome(shard(net, ((8, 1), (1, 1))), IDS)
    assert found.forward == [all_reduce(8, 64, 64, 64)]


def cross_entropy(logits: tuple[int, int], reduction: str = "none") -> Net:
    target = (logits[0],)
    return Net(
        lambda net, x, t: shard(F.cross_entropy, (logits, target))(
            x * net.scale, t, reduction=reduction
        ),
        scale=(64, 1),
    )


def test_cross_entropy_of_a_split_batch_needs_no_communication() -> None:
    found = outcome(cross_entropy((8, 1)), randn(64, 64), IDS[0])
    assert found.forward == found.backward == []


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_of_split_classes_is_right_where_they_refuse(reduction: str) -> None:
    found = outcome(cross_entropy((4, 2), reduction), randn(64, 64), IDS[0])
    # Per sample: the largest logit, the sum of exponentials and the target's logit.
    per_sample = [all_reduce(2, 16)] * 3
    # A mean also shares how many samples count; both reductions add the ranks' terms.
    total = {"none": [], "sum": [all_reduce(4, 1)], "mean": [all_reduce(4, 1)] * 2}[reduction]
    assert found.forward == sorted(per_sample + total)


# --- normalisation, reductions, pointwise --------------------------------------------------------


def test_layer_norm_sums_the_gradients_of_its_weights_over_all_ranks() -> None:
    net = Net(
        lambda net, x: shard(F.layer_norm, ((4, 2, 1), (1,), (1,)))(x, (16,), net.g, net.b),
        g=(16,),
        b=(16,),
    )
    found = outcome(net, randn(64, 32, 16))
    assert found.forward == []
    assert found.backward == [all_reduce(8, 16), all_reduce(8, 16)]


@pytest.mark.parametrize(
    ("reduce", "strategy", "theirs"),
    [
        (torch.sum, (4, 2), [all_reduce(2, 16)]),
        (torch.sum, (8, 1), []),
        (torch.mean, (2, 4), [all_reduce(4, 32)]),
        (torch.amax, (4, 2), [all_reduce(2, 16)]),
    ],
)
def test_reduction_over_a_split_dimension(
    reduce: Callable[..., torch.Tensor], strategy: tuple[int, int], theirs: list[Ran]
) -> None:
    """Consumed whole along the reduced axes, as theirs is."""
    rows = (strategy[0],)
    net = Net(lambda net, x: shard(shard(reduce, (strategy,))(x, 1), rows))
    found = outcome(net, randn(64, 64))
    assert found.forward == theirs


def test_a_reduced_tensor_that_may_stay_split_is_reduce_scattered_instead() -> None:
    found = outcome(Net(lambda net, x: shard(torch.sum, ((4, 2),))(x, 1)), randn(64, 64))
    assert found.forward == [reduce_scatter(2, 16)]


def add(first: Any, second: Any) -> Net:
    return Net(lambda net, x, y: shard(torch.add, (first, second))(x, y))


def test_add_of_a_broadcast_row() -> None:
    found = outcome(add((4, 2), (2,)), randn(64, 32), randn(32))
    assert found.forward == []


def test_add_of_equal_shapes_split_differently_is_refused() -> None:
    message = refusal(add((4, 2), (4, 1)), randn(64, 32), randn(64, 32))
    assert "input 1 of aten.add.Tensor, shape (64, 32), dimension 1: split into 1" in message
    assert "split into 2 in input 0, dimension 1" in message


def test_add_of_a_broadcast_dimension_that_is_to_be_split_is_refused() -> None:
    message = refusal(add((4, 2), (4, 2)), randn(64, 32), randn(1, 32))
    assert "input 1 of aten.add.Tensor, shape (1, 32), dimension 0" in message
    assert "size 1 does not divide into 4 pieces; it can be split into 1" in message


def test_transpose_moves_the_split_without_communication() -> None:
    net = Net(lambda net, x: shard(torch.permute, ((2, 4),))(x, (1, 0)))
    found = outcome(net, randn(64, 32))
    assert found.forward == []
    assert found.rows("aten.permute")[0].outputs == ("[@b+c, @a]",)


def test_reshape_recognises_the_split_of_heads() -> None:
    net = Net(lambda net, x: shard(torch.reshape, ((2, 4),), ((2, 1, 4, 1),))(x, (4, 16, 8, 8)))
    found = outcome(net, randn(64, 64))
    assert found.forward == []
    assert found.rows("aten.reshape")[0].outputs == ("[@a, -, @b+c, -]",)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "stored", "gathered"),
    [(((8, 1), (1, 1)), (8, 1), (8, 1024, 1024)), (((4, 1), (1, 2)), (4, 2), (4, 1024, 512))],
)
@pytest.mark.parametrize("constrained", [True, False])
def test_optimizer_parallel_gathers_the_weight_and_scatters_its_gradient(
    strategy: Any, stored: tuple[int, int], gathered: tuple[int, int, int], constrained: bool
) -> None:
    """The weight's storage is said by a constraint on it, or by its entry in the strategy."""
    if constrained:
        net = Net(lambda net, x: matmul(strategy)(x, shard(net.w, stored)), w=(1024, 1024))
    else:
        net = Net(lambda net, x: matmul((strategy[0], stored))(x, net.w), w=(1024, 1024))
    found = outcome(net, randn(16, 1024))
    assert found.forward == [all_gather(*gathered)]
    assert found.backward == [reduce_scatter(*gathered)]
    pieces = [layout.counts(Mesh.of(EIGHT)) for layout in found.plan.parameter_layouts.values()]
    assert pieces == [stored]


@pytest.mark.parametrize(
    ("strategy", "ours", "theirs"),
    [
        (((8, 1), (1, 1)), [all_reduce(8, 64, 64)], [all_reduce(8, 64, 64)]),
        (((1, 1), (1, 8)), [], []),
        # The four ranks left over do not repeat the product: each pair sums half the gradient.
        (((2, 1), (1, 2)), [all_reduce(2, 64, 16)], [all_reduce(2, 64, 32)]),
    ],
)
def test_gradient_of_a_weight_is_summed_over_the_batch_axes_only(
    strategy: Any, ours: list[Ran], theirs: list[Ran]
) -> None:
    # The sum spares the output: what runs backward is the weight's gradient.
    net = Net(lambda net, x: matmul(strategy)(x, net.w).sum(), w=(64, 64))
    found = outcome(net, randn(64, 64))
    assert found.forward == [all_reduce(8, 1)]
    assert found.backward == ours
    assert moved(ours) <= moved(theirs)


def test_gradients_of_megatrons_pair_are_summed_over_the_batch_axis() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = matmul(((2, 1), (1, 4)))(x, net.w)
        return matmul(((2, 4), (4, 1)))(hidden, net.v).sum()

    found = outcome(Net(forward, w=(64, 64), v=(64, 64)), randn(64, 64))
    assert found.backward == [all_reduce(2, 64, 16), all_reduce(2, 16, 64)]


def used_twice(first: Any, second: Any) -> Net:
    return Net(lambda net, x: matmul(second)(matmul(first)(x, net.w), net.w).sum(), w=(64, 64))


def test_a_weight_used_twice_alike_has_one_gradient_all_reduce() -> None:
    found = outcome(used_twice(((8, 1), (1, 1)), ((8, 1), (1, 1))), randn(64, 64))
    assert found.backward == [all_reduce(8, 64, 64)]


def test_a_weight_used_twice_differently_is_right_where_they_refuse() -> None:
    found = outcome(used_twice(((8, 1), (1, 1)), ((2, 4), (4, 1))), randn(64, 64))
    assert found.strategies("aten.matmul") == ["((8, 1), (1, 1))", "((2, 4), (4, 1))"]
    # Both uses are reduced in one, over the axes of either.
    assert [c for c in found.backward if c.kind == "all_reduce"] == [all_reduce(8, 64, 64)]


# --- batches that do not divide ------------------------------------------------------------------


def test_a_batch_of_4608_is_cut_into_seven_where_they_refuse() -> None:
    """Theirs is seven micro-batches of a pipeline; the refusal is about the same division."""
    net = Net(lambda net, x: (x @ net.w).sum(), w=(8, 4))
    seven = Mesh.of({"micro": 7})
    hinted = Net(lambda net, x: matmul(((7, 1), (1, 1)))(x, net.w).sum(), w=(8, 4))
    found = outcome(hinted, randn(4608, 8), mesh=seven)
    assert found.strategies("aten.matmul") == ["((7, 1), (1, 1))"]
    found = outcome(net, randn(4608, 8), mesh=seven, mode="data_parallel")
    assert found.strategies("aten.matmul") == ["((7, 1), (1, 1))"]
