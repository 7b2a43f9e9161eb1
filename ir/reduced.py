"""The casts of parameters, and the dtype in which the gradients behind them are summed.

Under mixed precision a parameter is cast before anything reads it::

    %w   : f32[8, 4] grad  = param "w"
    %w_c : bf16[8, 4] grad = aten.to.dtype(%w, bf16) {reduced_in=f32}

The attribute says in which dtype the gradient of the cast value crosses ranks. It passes to the
steps that the value takes (`autopar.ir.steps`), whose backward sums it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.ir.fused import FUSED
from autopar.ir.graph import Node, Value

#: The operator of a cast.
CAST = "aten.to.dtype"

#: The key of `Node.attrs`: a dtype.
REDUCED_IN = "reduced_in"

#: The steps of such a value whose backward sums it over ranks.
SUMMING = ("autopar.all_gather", "autopar.all_reduce", "autopar.to_replicate")


def reduced_in(node: Node) -> torch.dtype | None:
    """The dtype in which gradients of a call's result are summed; None for the result's own."""
    found: torch.dtype | None = node.attrs.get(REDUCED_IN)
    return found


def is_parameter_cast(node: Node) -> bool:
    """Whether a call casts a parameter on its way into the graph."""
    return node.op == CAST and REDUCED_IN in node.attrs


def is_fetched(node: Node) -> bool:
    """Whether what a node makes is a parameter, cast or not: its first reshard is in a bucket."""
    return node.op == "param" or is_parameter_cast(node)


def gradient_itemsize(node: Node, value: Value) -> int:
    """Bytes per element of the gradients of a value when they cross ranks."""
    return (reduced_in(node) or value.dtype).itemsize


def with_reduction(node: Node) -> Node:
    """The call as it runs: a step whose backward sums is told in which dtype."""
    dtype = reduced_in(node)
    if dtype is None or node.op not in (*SUMMING, FUSED):
        return node
    return replace(node, kwargs={**node.kwargs, "reduced": dtype})
