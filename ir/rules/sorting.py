"""Sorting, searching and membership: the dimension that is ordered or searched is whole."""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import Term, bind, dim_names, normal_dim, notation
from autopar.ir.rules.registry import register


@register(
    "aten.argsort.default",
    "aten.argsort.stable",
    "aten.msort.default",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.topk.default",
)
def sort(node: Node) -> Rule:
    """Values and indices, of all the dimension or (`topk`) of the first ones."""
    rank = len(node.operands[0].shape)
    at = normal_dim(bind(node).get("dim", 0), rank)
    dims = dim_names(rank, "d")
    result = dims[:at] + ["sorted"] * min(rank, 1) + dims[at + 1 :]
    results: list[Term] = [result] * len(node.results)
    return declare(node, notation([dims], results), whole=["sorted", *dims[at : at + 1]])


@register("aten.bucketize.Tensor")
def bucketize(node: Node) -> Rule:
    return declare(node, "b*, boundaries -> b*", whole=["boundaries"])


@register("aten.searchsorted.Tensor")
def searchsorted(node: Node) -> Rule | None:
    """One sorted sequence for all values, or one for each row of them."""
    sequence = node.operands[0]
    if bind(node)["sorter"] is not None:
        return None
    if len(sequence.shape) == 1:
        return declare(node, "sequence, b* -> b*", whole=["sequence"])
    return declare(node, "b* sequence, b* v -> b* v", whole=["sequence"])


@register("aten.isin.Tensor_Tensor")
def isin(node: Node) -> Rule:
    """Whether each element is among the tested ones, all of which every rank needs."""
    tested = dim_names(len(node.operands[1].shape), "tested")
    return declare(node, f"b*, {' '.join(tested)} -> b*", whole=["tested"])


@register("aten.isin.Tensor_Scalar")
def isin_number(node: Node) -> Rule:
    return declare(node, "b* -> b*")


@register("aten.one_hot.default")
def one_hot(node: Node) -> Rule:
    """The classes are whole; so is everything if their number is found from the largest entry."""
    classes = bind(node)["num_classes"]
    whole = ["b", "classes"] if classes < 0 else ["classes"]
    return declare(node, "b* -> b* classes", whole=whole)
