"""Reading by index: the dimension that is indexed is whole, those of the index may be split."""

from __future__ import annotations

import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node, Value
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, dim_names, floating, normal_dim, notation
from autopar.ir.rules.registry import register

_MASKS = (torch.bool, torch.uint8)

#: The terms of the indexed tensor and of what is read from it, and the indexed factors.
IndexTerms = tuple[list[str], list[str], list[str]]


@register("aten._unsafe_index.Tensor", "aten.index.Tensor")
def index(node: Node) -> Rule | None:
    """``x[i, :, j]``: the indices are broadcast together. A mask has no rule."""
    indices = bind(node)["indices"]
    terms = advanced_index(node, indices)
    if terms is None:
        return None
    x, result, whole = terms
    readers = ["i*"] * (len(node.operands) - 1)
    return declare(
        node,
        notation([x, *([r] for r in readers)], [result]),
        whole=whole,
        linear=floating(node, (0,)),
    )


def advanced_index(node: Node, indices: list[Value | None]) -> IndexTerms | None:
    """The terms of an indexed access, to read or to write.

    The dimensions of the indices, ``i*``, stand where the indexed ones stood if these are
    neighbours, and first if not. None where an index is a mask.
    """
    if any(i.dtype in _MASKS for i in indices if i is not None):
        return None
    dims = dim_names(len(node.operands[0].shape), "d")
    at = [k for k, i in enumerate(indices) if i is not None]
    kept = [d for k, d in enumerate(dims) if k not in at]
    neighbours = at == list(range(at[0], at[-1] + 1))
    place = at[0] if neighbours else 0
    return dims, [*kept[:place], "i*", *kept[place:]], [dims[k] for k in at]


@register("aten.index_select.default")
def index_select(node: Node) -> Rule | None:
    """``x`` at a vector of indices along one dimension."""
    rank = len(node.operands[0].shape)
    if not rank:
        return None
    dims = dim_names(rank, "d")
    at = normal_dim(bind(node)["dim"], rank)
    vector = ["i"] if node.operands[1].shape else []
    return declare(
        node,
        notation([dims, vector], [[*dims[:at], *(vector or ["1"]), *dims[at + 1 :]]]),
        whole=[dims[at]],
        linear=floating(node, (0,)),
    )


@register("aten.gather.default")
def gather(node: Node) -> Rule | None:
    """``y[b, i] = x[b, index[b, i]]``; a dimension that the index reads in part is whole."""
    x, reader = node.operands
    rank = len(x.shape)
    if len(reader.shape) != rank or not rank:
        return None
    at = normal_dim(bind(node)["dim"], rank)
    dims, result = dim_names(rank, "d"), dim_names(rank, "i")
    shared = [k for k in range(rank) if k != at and x.shape[k] == reader.shape[k]]
    read = [dims[k] if k in shared else result[k] for k in range(rank)]
    unshared = [k for k in range(rank) if k not in shared]
    return declare(
        node,
        notation([dims, read], [read]),
        whole=[dims[k] for k in unshared] + [result[k] for k in unshared if k != at],
        linear=floating(node, (0,)),
    )


@register("aten.take_along_dim.default")
def take_along_dim(node: Node) -> Rule | None:
    """`gather` with the other dimensions broadcast; without a dimension there is no rule."""
    dim = bind(node)["dim"]
    if dim is None:
        return None
    rank = len(node.operands[0].shape)
    at = normal_dim(dim, rank)
    dims = dim_names(rank, "d")
    read = [*dims[:at], "i", *dims[at + 1 :]]
    return declare(
        node, notation([dims, read], [read]), whole=[dims[at]], linear=floating(node, (0,))
    )


@register("aten.take.default")
def take(node: Node) -> Rule:
    """The tensor is read as if flat, so all of it is whole."""
    dims = dim_names(len(node.operands[0].shape), "d")
    return declare(
        node, notation([dims, ["i*"]], [["i*"]]), whole=dims, linear=floating(node, (0,))
    )
