"""Reading and writing a dense tensor by strides: only a leading dimension may be split."""

from __future__ import annotations

import math

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument
from autopar.ir.rules.arguments import dim_names, floating, notation
from autopar.ir.rules.registry import register


@register("autopar.as_strided")
def as_strided(node: Node) -> Rule:
    """`(x, size, stride, offset)`; the first dimension may be split where it is the operand's.

    It is where it has the operand's stride and no window reaches from one entry into the next.
    """
    x = node.operands[0]
    _, size, stride, offset = node.args
    inner = math.prod(x.shape[1:])
    last = offset + sum((n - 1) * step for n, step in zip(size[1:], stride[1:], strict=True))
    rows = bool(x.shape) and bool(size) and size[0] == x.shape[0] and stride[0] == inner
    own = rows and last < inner
    read, made = dim_names(len(x.shape), "d"), dim_names(len(size), "t")
    if own:
        read[0] = made[0] = "b"
    return declare(
        node,
        notation([read], [made]),
        whole=["d", "t"],
        linear=floating(node, (0,)),
        sizes=(SizeArgument(1),),
    )


@register("autopar.as_strided_scatter")
def as_strided_scatter(node: Node) -> Rule:
    """`(x, piece, size, stride, offset)`: a copy of x with the piece in place of what is read."""
    dims = dim_names(len(node.operands[0].shape), "d")
    piece = dim_names(len(node.operands[1].shape), "t")
    return declare(node, notation([dims, piece], [dims]), whole=["d", "t"])
