"""Discrete Fourier transforms: linear, the transformed dimensions are whole."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, dim_names, floating, normal_dims, notation
from autopar.ir.rules.registry import register

_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_SEVERAL = ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")


@register(*(f"aten.fft_{name}.default" for name in (*_ONE, *_SEVERAL)))
def transform(node: Node) -> Rule:
    arguments = bind(node)
    x = node.operands[0]
    rank = len(x.shape)
    dims = arguments["dim"]
    if dims is None and arguments.get("s"):
        dims = list(range(-len(arguments["s"]), 0))
    over = normal_dims(dims, rank)
    before, after = dim_names(rank, "d"), dim_names(rank, "d")
    for d in over:
        before[d], after[d] = f"time{d}", f"frequency{d}"
    rule = declare(
        node,
        notation([before], [after]),
        whole=["time", "frequency"],
        linear=floating(node, (0,)),
    )
    points = math.prod(x.shape[d] for d in over)
    # The usual count of a fast transform.
    return replace(rule, flops=int(5 * x.numel * math.log2(max(points, 2))))


@register("aten.fft_fftshift.default", "aten.fft_ifftshift.default")
def shift(node: Node) -> Rule:
    """Entries change places along whole dimensions."""
    rank = len(node.operands[0].shape)
    named = dim_names(rank, "d")
    over = normal_dims(bind(node)["dim"], rank)
    return declare(
        node,
        notation([named], [named]),
        whole=[named[d] for d in over],
        linear=floating(node, (0,)),
    )
