"""Operator names resolve to the callables they stand for."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.errors import GraphError
from autopar.runtime import collectives
from autopar.runtime.operators import operator, resolve


def test_torch_operators() -> None:
    assert resolve("aten.linear.default") is torch.ops.aten.linear.default
    assert resolve("aten.sum.dim_IntList") is torch.ops.aten.sum.dim_IntList


def test_own_operators() -> None:
    assert resolve("autopar.all_gather") is collectives.all_gather
    assert resolve("autopar.slice") is collectives.slice_


@pytest.mark.parametrize(
    "op", ["aten.nonesuch.default", "nonesuch.op.default", "aten.sum.nonesuch"]
)
def test_unknown_torch_operator(op: str) -> None:
    with pytest.raises(GraphError, match=f"operator '{op}': torch.ops has none"):
        resolve(op)


def test_unknown_own_operator() -> None:
    with pytest.raises(GraphError, match=r"operator 'autopar.nonesuch': .* all_gather"):
        resolve("autopar.nonesuch")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"autopar\.all_reduce is registered already"):
        operator("all_reduce")(lambda x: x)
