"""Operators that move, drop, add or repeat dimensions, or take a part of them.

A dimension of which a call takes a part, by position, stays whole.
"""

from __future__ import annotations

import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument
from autopar.ir.rules.arguments import (
    Term,
    bind,
    dim_names,
    floating,
    normal_dim,
    normal_dims,
    notation,
    overload,
    position,
)
from autopar.ir.rules.registry import register


@register(
    "aten.alias.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
)
def identity(node: Node) -> Rule:
    return declare(node, "d* -> d*", linear=floating(node, (0,)))


@register("aten.broadcast_to.default", "aten.expand.default")
def expand(node: Node) -> Rule:
    """The new copies of a dimension of size 1 may be split: each rank makes its own."""
    sizes = (SizeArgument(position(node, "size")),)
    return declare(node, "d* -> d*", linear=floating(node, (0,)), sizes=sizes)


@register("aten.expand_as.default")
def expand_as(node: Node) -> Rule:
    return declare(node, "d*, d* -> d*", linear=floating(node, (0,)))


@register(
    "aten.adjoint.default",
    "aten.mH.default",
    "aten.mT.default",
    "aten.moveaxis.int",
    "aten.moveaxis.intlist",
    "aten.movedim.int",
    "aten.movedim.intlist",
    "aten.numpy_T.default",
    "aten.permute.default",
    "aten.swapaxes.default",
    "aten.swapdims.default",
    "aten.t.default",
    "aten.transpose.int",
)
def permute(node: Node) -> Rule:
    """Any reordering of the dimensions; PyTorch is asked which, on a tensor of telling sizes."""
    op = overload(node.op)
    assert op is not None
    rank = len(node.operands[0].shape)
    probe = torch.empty(tuple(range(rank)), device="meta")
    order = op(probe, *node.args[1:], **node.kwargs).shape
    dims = dim_names(rank, "d")
    return declare(node, notation([dims], [[dims[k] for k in order]]), linear=floating(node, (0,)))


@register("aten.unsqueeze.default")
def unsqueeze(node: Node) -> Rule:
    rank = len(node.results[0].shape)
    at = normal_dim(bind(node)["dim"], rank)
    dims = dim_names(rank - 1, "d")
    return declare(
        node,
        notation([dims], [[*dims[:at], "1", *dims[at:]]]),
        linear=floating(node, (0,)),
    )


@register("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(node: Node) -> Rule:
    """A named dimension that is not of size 1 stays, and whole: a piece of size 1 would be lost."""
    shape = node.operands[0].shape
    named = normal_dims(bind(node).get("dim"), len(shape))
    dims = dim_names(len(shape), "d")
    kept = [dims[k] for k, size in enumerate(shape) if size != 1 or k not in named]
    return declare(
        node,
        notation([dims], [kept]),
        whole=[dims[k] for k in named],
        linear=floating(node, (0,)),
    )


def _take(node: Node, dim: int, *, keep: bool = True) -> Rule:
    """The results are parts of the operand along `dim` (without it, if not `keep`)."""
    dims = dim_names(len(node.operands[0].shape), "d")
    at = normal_dim(dim, len(dims))
    results: list[Term] = []
    for k in range(len(node.results)):
        results.append([*dims[:at], *([f"part{k}"] if keep else []), *dims[at + 1 :]])
    return declare(
        node, notation([dims], results), whole=[dims[at], "part"], linear=floating(node, (0,))
    )


@register("aten.slice.Tensor")
def slice_(node: Node) -> Rule:
    """The sliced dimension is whole, unless all of it is taken."""
    dim = bind(node)["dim"]
    if node.results[0].shape == node.operands[0].shape:
        return declare(node, "d* -> d*", linear=floating(node, (0,)))
    return _take(node, dim)


@register("aten.narrow.default", "aten.unfold.default")
def narrow(node: Node) -> Rule | None:
    """A number, which `unfold` takes for a vector of one, has no rule."""
    arguments = bind(node)
    dim = arguments["dimension" if node.op == "aten.unfold.default" else "dim"]
    dims = dim_names(len(node.operands[0].shape), "d")
    if not dims:
        return None
    at = normal_dim(dim, len(dims))
    window = ["window"] if node.op == "aten.unfold.default" else []
    return declare(
        node,
        notation([dims], [[*dims[:at], "part", *dims[at + 1 :], *window]]),
        whole=[dims[at], "part", "window"],
        linear=floating(node, (0,)),
    )


@register(
    "aten.chunk.default",
    "aten.split.Tensor",
    "aten.split.default",
    "aten.split.sizes",
    "aten.split_with_sizes.default",
    "aten.tensor_split.indices",
    "aten.tensor_split.sections",
    "aten.unsafe_chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
)
def split(node: Node) -> Rule:
    return _take(node, bind(node)["dim"])


@register("aten.select.int", "aten.unbind.int")
def select(node: Node) -> Rule:
    return _take(node, bind(node)["dim"], keep=False)


@register("aten.diagonal.default")
def diagonal(node: Node) -> Rule:
    """Two whole dimensions become one, the last."""
    arguments = bind(node)
    dims = dim_names(len(node.operands[0].shape), "d")
    crossed = [dims[normal_dim(arguments[name], len(dims))] for name in ("dim1", "dim2")]
    kept = [d for d in dims if d not in crossed]
    return declare(
        node,
        notation([dims], [[*kept, "diagonal"]]),
        whole=[*crossed, "diagonal"],
        linear=floating(node, (0,)),
    )


@register("aten.diag_embed.default")
def diag_embed(node: Node) -> Rule:
    """The last dimension becomes two, all whole."""
    arguments = bind(node)
    rank = len(node.results[0].shape)
    first, second = sorted(normal_dim(arguments[name], rank) for name in ("dim1", "dim2"))
    dims = dim_names(rank - 2, "d")
    result = list(dims)
    result.insert(first, "row")
    result.insert(second, "column")
    return declare(
        node,
        notation([[*dims, "diagonal"]], [result]),
        whole=["diagonal", "row", "column"],
        linear=floating(node, (0,)),
    )


def _rearrange(node: Node, dims: list[int]) -> Rule:
    """Elements change places along `dims`, which stay whole."""
    named = dim_names(len(node.operands[0].shape), "d")
    return declare(
        node,
        notation([named], [named]),
        whole=[named[d] for d in dims],
        linear=floating(node, (0,)),
    )


@register("aten.flip.default", "aten.roll.default")
def flip(node: Node) -> Rule:
    """Without dimensions `roll` turns the flattened tensor."""
    return _rearrange(node, normal_dims(bind(node)["dims"] or None, len(node.operands[0].shape)))


@register("aten.tril.default", "aten.triu.default")
def triangle(node: Node) -> Rule:
    return _rearrange(node, normal_dims([-2, -1], len(node.operands[0].shape)))


@register("aten.repeat.default", "aten.tile.default")
def repeat(node: Node) -> Rule:
    """A repeated dimension stays whole: its copies do not lie side by side in one piece."""
    source, result = node.operands[0].shape, node.results[0].shape
    named = dim_names(len(result), "d")
    dims = named[len(result) - len(source) :]
    padded = (1,) * (len(result) - len(source)) + source
    terms = [
        name if before == after else f"(times{k} {name})" if before > 1 else f"times{k}"
        for k, (name, before, after) in enumerate(zip(named, padded, result, strict=True))
    ]
    factor_sizes = dict(zip(dims, source, strict=True)) | {
        f"times{k}": after // max(1, before)
        for k, (before, after) in enumerate(zip(padded, result, strict=True))
        if before != after
    }
    return declare(
        node,
        notation([dims], [terms]),
        whole=["times"],
        factor_sizes=factor_sizes,
        linear=floating(node, (0,)),
    )


@register("aten.repeat_interleave.self_int")
def repeat_interleave(node: Node) -> Rule:
    """Every element of the dimension becomes `repeats` of them, side by side: it may be split."""
    arguments = bind(node)
    shape = node.operands[0].shape
    dims = dim_names(len(shape), "d")
    times = arguments["repeats"]
    if arguments["dim"] is None and len(shape) != 1:
        return declare(
            node,
            notation([dims], [["copies"]]),
            whole=[*dims, "copies"],
            linear=floating(node, (0,)),
        )
    at = normal_dim(arguments["dim"] or 0, len(shape))
    result = [*dims[:at], f"({dims[at]} times)", *dims[at + 1 :]]
    return declare(
        node,
        notation([dims], [result]),
        whole=["times"] if arguments["output_size"] is None else ["times", dims[at]],
        factor_sizes={"times": times, dims[at]: shape[at]},
        linear=floating(node, (0,)),
    )


@register("aten.view_as_real.default")
def view_as_real(node: Node) -> Rule:
    return declare(node, "d* -> d* part", whole=["part"], linear=floating(node, (0,)))


@register("aten.view_as_complex.default")
def view_as_complex(node: Node) -> Rule:
    return declare(node, "d* part -> d*", whole=["part"], linear=floating(node, (0,)))


@register("aten.pixel_shuffle.default")
def pixel_shuffle(node: Node) -> Rule:
    """``[…, c·r·r, h, w] -> […, c, h·r, w·r]``."""
    height, width = node.operands[0].shape[-2:]
    up = bind(node)["upscale_factor"]
    return declare(
        node,
        "b* (c r q) h w -> b* c (h r) (w q)",
        whole=["r", "q"],
        factor_sizes={"r": up, "q": up, "h": height, "w": width},
        linear=floating(node, (0,)),
    )


@register("aten.pixel_unshuffle.default")
def pixel_unshuffle(node: Node) -> Rule:
    """``[…, c, h·r, w·r] -> […, c·r·r, h, w]``."""
    height, width = node.results[0].shape[-2:]
    down = bind(node)["downscale_factor"]
    return declare(
        node,
        "b* c (h r) (w q) -> b* (c r q) h w",
        whole=["r", "q"],
        factor_sizes={"r": down, "q": down, "h": height, "w": width},
        linear=floating(node, (0,)),
    )
