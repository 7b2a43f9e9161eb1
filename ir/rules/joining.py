"""Operators that put tensors together, or enlarge one, along a dimension that stays whole."""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import Term, bind, dim_names, floating, normal_dim, notation
from autopar.ir.rules.registry import register


@register("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(node: Node) -> Rule | None:
    """Linear in all operands together. Legacy empty operands of one dimension have no rule."""
    rank = len(node.results[0].shape)
    if any(len(v.shape) != rank for v in node.operands):
        return None
    dims = dim_names(rank, "d")
    at = normal_dim(bind(node)["dim"], rank)
    parts = [[*dims[:at], f"part{k}", *dims[at + 1 :]] for k in range(len(node.operands))]
    return declare(
        node,
        notation(parts, [dims]),
        whole=["part", dims[at]],
        linear=floating(node, range(len(parts))),
    )


@register("aten.stack.default")
def stack(node: Node) -> Rule:
    """Linear in all operands together; the new dimension is whole."""
    rank = len(node.results[0].shape)
    dims = dim_names(rank - 1, "d")
    at = normal_dim(bind(node)["dim"], rank)
    return declare(
        node,
        notation([dims] * len(node.operands), [[*dims[:at], "stacked", *dims[at:]]]),
        whole=["stacked"],
        linear=floating(node, range(len(node.operands))),
    )


@register("aten.block_diag.default")
def block_diag(node: Node) -> Rule | None:
    """Every dimension is whole; linear in all operands together."""
    if any(len(v.shape) != 2 for v in node.operands):
        return None
    terms = [[f"row{k}", f"column{k}"] for k in range(len(node.operands) + 1)]
    return declare(
        node,
        notation(terms[:-1], terms[-1:]),
        whole=["row", "column"],
        linear=floating(node, range(len(node.operands))),
    )


@register(
    "aten.constant_pad_nd.default",
    "aten.pad.default",
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad3d.default",
)
def pad(node: Node) -> Rule:
    """Padded dimensions are whole. Linear unless the padding is a number other than zero."""
    arguments = bind(node)
    amounts = arguments["pad" if "pad" in arguments else "padding"]
    rank = len(node.operands[0].shape)
    # Amounts come in pairs, those of the last dimension first.
    padded = {rank - 1 - k // 2 for k, amount in enumerate(amounts) if amount}
    dims = dim_names(rank, "d")
    result = [f"padded{k}" if k in padded else d for k, d in enumerate(dims)]
    return declare(
        node,
        notation([dims], [result]),
        whole=["padded", *(dims[k] for k in padded)],
        linear=() if arguments.get("value") else floating(node, (0,)),
        # What repeats or mirrors entries refuses tensors without elements.
        filled=dims,
    )


@register("aten.slice_scatter.default")
def slice_scatter(node: Node) -> Rule:
    """``x`` with a slice of one dimension replaced by ``src``; linear in both together."""
    x, src = node.operands
    dims = dim_names(len(x.shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    replaced = list(dims) if x.shape == src.shape else [*dims[:at], "part", *dims[at + 1 :]]
    return declare(
        node,
        notation([dims, replaced], [dims]),
        whole=["part", dims[at]] if "part" in replaced else [],
        linear=floating(node, (0, 1)),
    )


@register("aten.select_scatter.default")
def select_scatter(node: Node) -> Rule:
    """``x`` with one index of a dimension replaced by ``src``; linear in both together."""
    dims = dim_names(len(node.operands[0].shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    return declare(
        node,
        notation([dims, dims[:at] + dims[at + 1 :]], [dims]),
        whole=[dims[at]],
        linear=floating(node, (0, 1)),
    )


@register("aten.diff.default")
def diff(node: Node) -> Rule:
    """Differences along a whole dimension; linear in the tensor and what is put around it."""
    dims = dim_names(len(node.operands[0].shape), "d")
    at = normal_dim(bind(node)["dim"], len(dims))
    terms: list[Term] = [
        [*dims[:at], f"part{k}", *dims[at + 1 :]] for k in range(len(node.operands) + 1)
    ]
    return declare(
        node,
        notation(terms[:-1], terms[-1:]),
        whole=["part"],
        linear=floating(node, range(len(node.operands))),
    )
