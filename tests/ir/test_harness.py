"""The harness itself: rules that are wrong in one way each must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.layout import INVARIANT, REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assist, Rule
from autopar.runtime.collectives import all_reduce
from autopar.runtime.operators import operator
from harness import RuleError, check_sample, dual, gather, scatter
from samples.sample import Sample, integers, normal

_X = normal(4, 12)


def _rule(spec: str, **declaration: Any) -> Callable[[Node], Rule]:
    return lambda node: declare(node, spec, **declaration)


@operator("test_sum_with_wrong_gradient")
def _sum_with_wrong_gradient(x: torch.Tensor, dim: list[int], *, split: Any) -> torch.Tensor:
    """Right in value, but the result is declared Invariant: its gradient is whole already."""
    axes = {name: axes for name, axes, _ in split}.get("r", ())
    return all_reduce(x.sum(dim), axes, REPLICATE)


@operator("test_sum_with_right_gradient")
def _sum_with_right_gradient(x: torch.Tensor, dim: list[int], *, split: Any) -> torch.Tensor:
    axes = {name: axes for name, axes, _ in split}.get("r", ())
    return all_reduce(x.sum(dim), axes, INVARIANT)


_WRONG = {
    "a mean claimed to be a sum": (
        Sample("aten.mean.dim", (_X, [1])),
        _rule("b r -> b"),
        "result 0",
    ),
    "a bias added by every rank": (
        Sample("aten.linear.default", (_X, normal(6, 12), normal(6))),
        _rule("b i, o i, o -> b o"),
        "result 0",
    ),
    "a nonlinear operator claimed linear": (
        Sample("aten.relu.default", (_X,)),
        _rule("b* -> b*", linear=((0,),)),
        "result 0",
    ),
    "a product claimed linear in both factors at once": (
        Sample("aten.mul.Tensor", (_X, normal(4, 12, seed=1))),
        _rule("b*, b* -> b*", linear=((0, 1),)),
        "result 0",
    ),
    "a normalised dimension claimed parallel": (
        Sample("aten.softmax.int", (_X, 1)),
        _rule("b c -> b c"),
        "result 0",
    ),
    "a reversed dimension claimed parallel": (
        Sample("aten.flip.default", (_X, [1])),
        _rule("b c -> b c"),
        "result 0",
    ),
    "dimensions swapped in the result": (
        Sample("aten.transpose.int", (normal(4, 4), 0, 1)),
        _rule("a b -> a b"),
        "result 0",
    ),
    "a size argument left whole": (
        Sample("aten.expand.default", (normal(1, 12), [4, 12])),
        _rule("1 c -> b c"),
        "result 0",
    ),
    "a gradient summed once too often": (
        Sample("aten.sum.dim_IntList", (_X, [1])),
        _rule(
            "b r -> b",
            assisted={"r": Assist(absent="I")},
            assist="autopar.test_sum_with_wrong_gradient",
        ),
        "gradient of operand 0",
    ),
    "integers claimed to be terms of a product": (
        Sample("aten.mul.Tensor", (integers(5, 4, 12), integers(7, 4, 12))),
        _rule("b*, b* -> b*", linear=((0, 1),)),
        "result 0",
    ),
}


@pytest.mark.parametrize("wrong", _WRONG)
def test_a_wrong_rule_is_refused(wrong: str) -> None:
    sample, rule, what = _WRONG[wrong]
    with pytest.raises((RuleError, RuntimeError)) as caught:
        check_sample(sample, rule)
    if isinstance(caught.value, RuleError):
        assert what in str(caught.value)
        assert sample.op in str(caught.value)


def test_a_rule_that_splits_nothing_is_refused() -> None:
    with pytest.raises(RuleError, match="nothing may be split"):
        check_sample(Sample("aten.relu.default", (_X,)), _rule("b* -> b*", whole=("b",)))


def test_a_rule_that_splits_what_it_should_not_is_refused() -> None:
    sample = Sample("aten.relu.default", (_X,), unsplit=True)
    with pytest.raises(RuleError, match="something may be split"):
        check_sample(sample, _rule("b* -> b*"))


def test_a_right_rule_passes_and_its_strategies_are_counted() -> None:
    rule = _rule(
        "b r -> b",
        assisted={"r": Assist(absent="I")},
        assist="autopar.test_sum_with_right_gradient",
    )
    mesh = Mesh.of({"a": 2})
    # The axis splits b or r, or every rank computes the same in state I or R.
    assert check_sample(Sample("aten.sum.dim_IntList", (_X, [1])), rule, (mesh,)) == 4


@pytest.mark.parametrize(
    "layout",
    [
        Layout.whole(2),
        Layout.make([["a"], ["b"]]),
        Layout.make([["b", "a"], []]),
        Layout.make([[], ["b"]], partial=["a"]),
        Layout.make([[], []], replicate=["a"], partial=["b"]),
        Layout.make([[], []], partial=["a", "b"]),
    ],
    ids=str,
)
def test_gather_undoes_scatter(layout: Layout) -> None:
    mesh = Mesh.of({"a": 2, "b": 3})
    x = normal(12, 6, grad=False)
    pieces = scatter(x, layout, mesh, torch.Generator().manual_seed(0))
    assert torch.allclose(gather(pieces, layout, mesh, "x"), x)
    assert {tuple(p.shape) for p in pieces.values()} == {layout.local_shape(x.shape, mesh)}


def test_gather_refuses_copies_that_differ() -> None:
    mesh = Mesh.of({"a": 2})
    pieces = {(0,): torch.zeros(3), (1,): torch.ones(3)}
    with pytest.raises(RuleError, match="copies differ along a"):
        gather(pieces, Layout.whole(1), mesh, "x")


def test_the_dual_of_a_layout_swaps_replicate_and_partial() -> None:
    layout = Layout.make([["a"], []], replicate=["b"], partial=["c"])
    assert dual(layout) == Layout.make([["a"], []], partial=["b"])
