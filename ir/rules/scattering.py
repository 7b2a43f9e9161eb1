"""Writing by index. Adding is a sum over what is written, so that may be split (the result is then
Partial and the tensor written into joins the sum); overwriting depends on order, so it may not.
"""

from __future__ import annotations

import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, dim_names, floating, normal_dim, notation
from autopar.ir.rules.indexing import advanced_index
from autopar.ir.rules.registry import register


@register("aten._unsafe_index_put.default", "aten.index_put.default")
def index_put(node: Node) -> Rule | None:
    """``x[i, :, j] = values`` (or ``+=``), the values broadcast to what the indices read."""
    arguments = bind(node)
    terms = advanced_index(node, arguments["indices"])
    if terms is None:
        return None
    x, read, whole = terms
    # Adding truth values is "or", which is no sum.
    accumulate = arguments["accumulate"] and node.results[0].dtype != torch.bool
    last = len(node.operands) - 1
    # The indices are broadcast to the longest of them; only then is the place of each known.
    width = max(len(v.shape) for v in node.operands[1:last])
    at = read.index("i*")
    read[at : at + 1] = [f"i{k}" for k in reversed(range(width))]
    values = read[len(read) - len(node.operands[last].shape) :]
    return declare(
        node,
        notation([x, *([["i*"]] * (last - 1)), values], [x]),
        whole=whole if accumulate else [*whole, "i"],
        linear=floating(node, (0, last)),
        joins=(0,) if accumulate else (),
    )


@register("aten.index_add.default", "aten.index_copy.default")
def index_add(node: Node) -> Rule | None:
    """Slices of `source` added to (or put in place of) those of ``x`` along one dimension."""
    x, reader, source = node.operands
    if not x.shape or not reader.shape or not source.shape:
        return None
    dims = dim_names(len(x.shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    adds = node.op == "aten.index_add.default"
    return declare(
        node,
        notation([dims, ["i"], [*dims[:at], "i", *dims[at + 1 :]]], [dims]),
        whole=[dims[at]] if adds else [dims[at], "i"],
        linear=floating(node, (0, 2)),
        joins=(0,) if adds else (),
    )


@register("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(node: Node) -> Rule | None:
    """Slices of ``x`` along one dimension replaced by a number."""
    x, reader = node.operands[:2]
    if not x.shape:
        return None
    dims = dim_names(len(x.shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    value: list[list[str]] = [[]] * (len(node.operands) - 2)
    zero = not value and bind(node)["value"] == 0
    groups = [(0,)] if zero else [(0, 2)]
    return declare(
        node,
        notation([dims, ["i"] if reader.shape else [], *value], [dims]),
        whole=[dims[at], "i"],
        linear=floating(node, *groups),
    )


@register(
    "aten.scatter.reduce",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.value_reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def scatter(node: Node) -> Rule | None:
    """``x[b, index[b, i]] = src[b, i]``, or combined with it.

    A dimension other than the indexed one may be split where all tensors have the same size.
    """
    arguments = bind(node)
    x, writer = node.operands[:2]
    rank = len(x.shape)
    if not rank or any(len(v.shape) != rank for v in node.operands):
        return None
    at = normal_dim(arguments["dim"], rank)
    how = arguments.get("reduce")
    adds = node.op == "aten.scatter_add.default" or (
        how == "sum" and arguments.get("include_self", True)
    )
    dims = dim_names(rank, "d")
    written = dims[:at] + ["i"] + dims[at + 1 :]
    terms, whole = [dims], [dims[at]]
    for k, operand in enumerate(node.operands[1:], 1):
        # Only the corner of `src` that the index covers is read: the rest has its own factors.
        shown = [
            name if operand.shape[d] == (writer if d == at else x).shape[d] else f"part{k}x{d}"
            for d, name in enumerate(written)
        ]
        terms.append(shown)
        for pair in zip(shown, written, strict=True):
            whole.extend(pair if pair[0] != pair[1] else ())
    if not adds:
        whole.append("i")
    linear: list[tuple[int, ...]] = [(0, 2)] if adds or how is None else []
    if arguments.get("value") == 0 and how is None:
        linear = [(0,)]
    return declare(
        node,
        notation(terms, [dims]),
        whole=whole,
        linear=floating(node, *linear),
        joins=(0,) if adds else (),
    )


@register("aten.masked_scatter.default")
def masked_scatter(node: Node) -> Rule:
    """``x`` with the entries under a mask taken from ``source`` in order, all of it whole.

    Trailing dimensions of one mask for all entries are moved in whole rows, so they may be split.
    """
    x, mask, source = node.operands
    rank, width = len(x.shape), len(source.shape)
    dims = dim_names(rank, "d")
    shown = dims[rank - len(mask.shape) :]
    read = [f"source{d}" for d in range(width)]
    rows = 0
    while (
        rows < min(rank, width)
        and (rows >= len(mask.shape) or mask.shape[-1 - rows] == 1)
        and x.shape[-1 - rows] == source.shape[-1 - rows]
    ):
        rows += 1
        read[-rows] = dims[-rows]
    return declare(
        node,
        notation([dims, shown, read], [dims]),
        whole=[*dims[: rank - rows], "source"],
        linear=floating(node, (0, 2)),
    )
