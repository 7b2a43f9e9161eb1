"""Reductions that need no help: sums go Partial, all others keep the reduced dimensions whole."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, dim_names, floating, normal_dim, notation
from autopar.ir.rules.reduced import reduction_rule
from autopar.ir.rules.registry import register


@register("aten.sum.default", "aten.sum.dim_IntList")
def sum_(node: Node) -> Rule:
    return _reduce(node, linear=floating(node, (0,)))


@register(
    "aten.count_nonzero.default",
    "aten.count_nonzero.dim_IntList",
    "aten.nansum.default",
)
def sum_of_function(node: Node) -> Rule:
    """A sum over something that is not linear in the operand."""
    return _reduce(node)


@register(
    "aten.kthvalue.default",
    "aten.linalg_norm.default",
    "aten.linalg_vector_norm.default",
    "aten.median.default",
    "aten.median.dim",
    "aten.mode.default",
    "aten.nanmedian.default",
    "aten.nanmedian.dim",
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
    "aten.norm.ScalarOpt_dtype",
    "aten.prod.default",
    "aten.prod.dim_int",
)
def of_whole(node: Node) -> Rule:
    """The reduced dimensions are whole."""
    return _reduce(node, whole=True)


def _reduce(node: Node, *, whole: bool = False, linear: Sequence[Sequence[int]] = ()) -> Rule:
    """The dimensions that the call names (all, if none) are not in the results."""
    arguments = bind(node)
    return reduction_rule(
        node,
        arguments.get("dim"),
        arguments.get("keepdim", False),
        whole=["r"] if whole else [],
        linear=linear,
    )


@register("aten.cumsum.default")
def cumsum(node: Node) -> Rule:
    return _scan(node, linear=floating(node, (0,)))


@register(
    "aten.cummax.default",
    "aten.cummin.default",
    "aten.cumprod.default",
    "aten.logcumsumexp.default",
)
def scan(node: Node) -> Rule:
    return _scan(node)


def _scan(node: Node, *, linear: Sequence[Sequence[int]] = ()) -> Rule:
    """The scanned dimension is whole."""
    dims = dim_names(len(node.operands[0].shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    return declare(
        node,
        notation([dims], [dims] * len(node.results)),
        whole=dims[at : at + 1],
        linear=linear,
        flops_per_point=1,
    )


@register("aten.trace.default")
def trace(node: Node) -> Rule:
    return declare(node, "row column -> ", whole=["row", "column"], linear=floating(node, (0,)))


@register("aten.histc.default")
def histc(node: Node) -> Rule:
    """Counts in bins: a sum over all elements, unless the range is found from the elements."""
    arguments = bind(node)
    known = arguments["min"] != arguments["max"]
    return declare(node, "b* -> bins", whole=["bins"] if known else ["b", "bins"])
