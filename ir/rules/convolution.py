"""Convolutions: batch and output channels are parallel, input channels are summed.

Groups are a factor of both channel dimensions. A spatial dimension is whole, unless the windows
tile it without overlap or padding (a patch embedding, a 1x1 kernel): then the rows of windows may
be split.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument
from autopar.ir.rules.arguments import bind, dim_names, floating, notation, position
from autopar.ir.rules.registry import register

#: Operations for each point of the loop nest: a multiplication and an addition.
_MULTIPLY_ADD = 2


@register(
    "aten.conv1d.default",
    "aten.conv1d.padding",
    "aten.conv2d.default",
    "aten.conv2d.padding",
    "aten.conv3d.default",
    "aten.conv3d.padding",
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
    "aten.convolution.default",
)
def convolution(node: Node) -> Rule:
    """``x [n?, g·c, s…]``, ``w [g·o, c, k…]``, ``b [g·o]`` (optional) to ``[n?, g·o, t…]``.

    A transposed convolution has the weight ``[g·c, o, k…]``.
    """
    arguments = bind(node)
    x, weight = node.operands[:2]
    biased = len(node.operands) == 3
    transposed = arguments.get("transposed", "transpose" in node.op)
    groups = arguments["groups"]
    count = len(weight.shape) - 2
    batch = ["n"] if len(x.shape) == count + 2 else []
    inputs, outputs = ("(g c)", "(g o)") if groups > 1 else ("c", "o")
    channels = [inputs, "o"] if transposed else [outputs, "c"]
    windows, tiles = dim_names(count, "k"), dim_names(count, "t")
    spatial = [
        f"({tiles[k]} {windows[k]})" if not transposed and _tiles(node, arguments, k) else f"s{k}"
        for k in range(count)
    ]
    terms = [[*batch, inputs, *spatial], [*channels, *windows], *([[outputs]] if biased else [])]
    whole = ["s", "k", *(t for t, s in zip(tiles, spatial, strict=True) if t not in s)]
    if transposed:
        channel_sizes = {"c": x.shape[-count - 1] // groups, "o": weight.shape[1]}
    else:
        channel_sizes = {"c": weight.shape[1], "o": weight.shape[0] // groups}
    rule = declare(
        node,
        notation(terms, [[*batch, outputs, *tiles]]),
        whole=whole,
        factor_sizes={**channel_sizes, **({"g": groups} if groups > 1 else {})},
        linear=floating(node, *(((0, 2), (1, 2)) if biased else ((0,), (1,)))),
        joins=(2,) if biased else (),
        sizes=(SizeArgument(position(node, "groups"), factor="g"),) if groups > 1 else (),
    )
    side = x if transposed else node.results[0]
    taps = math.prod(weight.shape[1:])
    return replace(rule, flops=_MULTIPLY_ADD * side.numel * taps)


def _tiles(node: Node, arguments: dict[str, Any], k: int) -> bool:
    """Whether the windows lie side by side along a spatial dimension and cover it exactly."""
    count = len(node.operands[1].shape) - 2
    size, taps = node.operands[0].shape[k - count], node.operands[1].shape[k - count]
    stride, dilation = (_each(arguments[name], k) for name in ("stride", "dilation"))
    padding = arguments["padding"]
    pads = padding == "same" and taps > 1 if isinstance(padding, str) else _each(padding, k) > 0
    return (
        not pads
        and stride == taps
        and (dilation == 1 or taps == 1)
        and node.results[0].shape[k - count] * taps == size
    )


def _each(values: int | list[int], k: int) -> int:
    """The value of one spatial dimension; a single one stands for all."""
    if isinstance(values, int):
        return values
    return values[k] if len(values) > 1 else values[0]


@register("aten.im2col.default")
def im2col(node: Node) -> Rule:
    """``[n?, c, h, w] -> [n?, c·k·k, windows]``: linear, batch and channels may be split."""
    batch = "n " if len(node.operands[0].shape) == 4 else ""
    return declare(
        node,
        f"{batch}c h w -> {batch}(c taps) windows",
        whole=["h", "w", "taps", "windows"],
        linear=floating(node, (0,)),
    )
