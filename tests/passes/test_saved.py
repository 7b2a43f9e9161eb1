"""What operators are seen to keep, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ir.errors import GraphError
from autopar.ir.graph import Node, Value
from autopar.passes.memory.saved import Backward, Call, Forward, Spec, observe, observe_backward
from autopar.passes.stand_ins import callable_of

FLOAT = 4


def tensor(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec.contiguous(shape, dtype, grad)


def call_of(op: str, operands: list[Spec], *rest: Any, **attrs: Any) -> Call:
    """A call whose tensors come first."""
    values = tuple(Value(f"x{i}", s.shape, s.dtype, s.grad) for i, s in enumerate(operands))
    node = Node(op, (*values, *rest), {}, attrs=attrs)
    return Call.make(node, operands, callable_of)


def forward(op: str, operands: list[Spec], *rest: Any, **attrs: Any) -> Forward:
    return observe(call_of(op, operands, *rest, **attrs))


def backward(op: str, operands: list[Spec], *rest: Any) -> Backward:
    call = call_of(op, operands, *rest)
    made = observe(call).results
    grads = tuple(tensor(*s.shape, grad=False, dtype=s.dtype) if s.grad else None for s in made)
    return observe_backward(call, grads)


def internals(seen: Forward, operands: int) -> list[int]:
    """Bytes kept that are neither operands nor results."""
    return [seen.fresh[k - operands] for k in seen.saved if k >= operands and k not in seen.homes]


def test_linear_saves_its_input_and_weight_but_no_bias() -> None:
    seen = forward("aten.linear.default", [tensor(2, 8, 16), tensor(4, 16), tensor(4)])
    assert seen.saved == {0, 1}
    assert seen.homes == (3,) and seen.fresh == (2 * 8 * 4 * FLOAT,)


def test_relu_saves_its_result_and_gelu_its_input() -> None:
    assert forward("aten.relu.default", [tensor(8, 16)]).saved == {1}
    assert forward("aten.gelu.default", [tensor(8, 16)]).saved == {0}


def test_a_sum_of_tensors_saves_nothing_and_hands_its_gradient_on() -> None:
    operands = [tensor(8, 16), tensor(8, 16)]
    assert forward("aten.add.Tensor", operands).saved == frozenset()
    seen = backward("aten.add.Tensor", operands)
    assert seen.homes == (0, 0) and seen.fresh == ()


def test_nothing_is_saved_where_no_gradient_flows() -> None:
    seen = forward("aten.linear.default", [tensor(8, 16, grad=False), tensor(4, 16, grad=False)])
    assert seen.saved == frozenset()


def test_only_the_operand_that_a_gradient_needs_is_saved() -> None:
    seen = forward("aten.linear.default", [tensor(8, 16, grad=False), tensor(4, 16)])
    assert seen.saved == {0}


def test_layer_norm_keeps_two_statistics_per_row() -> None:
    seen = forward("aten.layer_norm.default", [tensor(2, 8, 16)], [16])
    assert 0 in seen.saved and 1 not in seen.saved
    assert internals(seen, 1) == [2 * 8 * FLOAT] * 2


def test_dropout_keeps_its_mask() -> None:
    seen = forward("aten.dropout.default", [tensor(8, 16)], 0.5, True)
    assert seen.saved == {2} and internals(seen, 1) == [8 * 16 * FLOAT]


def test_fused_attention_keeps_one_number_per_query_besides_its_tensors() -> None:
    seen = forward("aten.scaled_dot_product_attention.default", [tensor(2, 4, 8, 16)] * 3)
    assert {0, 1, 2, seen.homes[0]} < seen.saved
    assert internals(seen, 3) == [2 * 4 * 8 * FLOAT]


def test_attention_with_dropout_keeps_the_probabilities() -> None:
    operands = [tensor(2, 4, 8, 16)] * 3
    seen = forward("aten.scaled_dot_product_attention.default", operands, None, 0.5)
    assert sum(internals(seen, 3)) >= 2 * (2 * 4 * 8 * 8 * FLOAT)


def test_cross_entropy_keeps_the_log_probabilities_and_needs_them_twice_backward() -> None:
    operands = [tensor(16, 32), tensor(16, grad=False, dtype=torch.int64)]
    seen = forward("aten.cross_entropy_loss.default", operands)
    assert 0 not in seen.saved and 16 * 32 * FLOAT in internals(seen, 2)
    back = backward("aten.cross_entropy_loss.default", operands)
    assert back.fresh == (16 * 32 * FLOAT,) and back.workspace == 16 * 32 * FLOAT


def test_views_share_the_storage_of_their_base() -> None:
    seen = forward("aten.transpose.int", [tensor(2, 8, 16)], 1, 2)
    assert seen.homes == (0,) and seen.fresh == () and seen.saved == frozenset()
    assert forward("aten.split.Tensor", [tensor(2, 8, 16)], 8, 2).homes == (0, 0)


def test_a_reshape_copies_only_where_strides_make_it() -> None:
    plain = tensor(2, 8, 16)
    (turned,) = forward("aten.transpose.int", [plain], 1, 2).results
    assert forward("aten.reshape.default", [plain], [2, 128]).homes == (0,)
    assert forward("aten.reshape.default", [turned], [2, 128]).homes == (1,)


def test_the_sum_of_a_tensor_gives_back_a_gradient_without_memory_of_its_own() -> None:
    seen = backward("aten.sum.default", [tensor(8, 16)])
    assert seen.homes == (0,) and seen.grads[0] is not None
    assert seen.grads[0].nbytes == FLOAT


def test_under_autocast_the_casts_are_kept() -> None:
    operands = [tensor(8, 16), tensor(4, 16)]
    seen = forward("aten.linear.default", operands, autocast=("cuda", torch.bfloat16))
    assert seen.results[0].dtype == torch.bfloat16
    assert seen.saved.isdisjoint({0, 1})
    assert sorted(internals(seen, 2)) == [4 * 16 * 2, 8 * 16 * 2]


def test_the_compilers_own_dense_layer_saves_what_linear_does() -> None:
    seen = forward("autopar.addmm_nd", [tensor(4), tensor(2, 8, 16), tensor(16, 4)])
    assert seen.saved == {1, 2}


def test_equal_calls_are_observed_once() -> None:
    operands = [tensor(3, 5)]
    assert forward("aten.tanh.default", operands) is forward("aten.tanh.default", operands)
    assert forward("aten.tanh.default", [tensor(5, 3)]) != forward("aten.tanh.default", operands)


def test_an_operator_nobody_knows_is_refused() -> None:
    with pytest.raises(GraphError, match=r"autopar\.no_such"):
        call_of("autopar.no_such", [tensor(3)])


def test_bytes_of_a_spec_follow_its_strides() -> None:
    assert tensor(4, 8).nbytes == 4 * 8 * FLOAT
    assert Spec((4, 8), (0, 1), torch.float32).nbytes == 8 * FLOAT
    assert tensor(0, 8).nbytes == 0
    turned = Spec((8, 4), (1, 8), torch.float32).resized((8, 2))
    assert turned.stride == (1, 8) and turned.nbytes == 16 * FLOAT
