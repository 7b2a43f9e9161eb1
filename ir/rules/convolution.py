"""Convolutions: batch and output channels are parallel, input channels are summed.

Groups are a factor of both channel dimensions. A spatial dimension may be split where blocks of
the operand and of the result belong together (see `windows`): ranks then exchange borders, unless
the windows tile it (a patch embedding, a 1x1 kernel).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule, SizeArgument
from autopar.ir.rules.arguments import bind, dim_names, floating, notation, position
from autopar.ir.rules.registry import register
from autopar.ir.rules.windows import Spread, Window, each

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
    before, after, whole, halo, sizes = _spatial(node, arguments, transposed)
    windows = dim_names(count, "k")
    terms = [[*batch, inputs, *before], [*channels, *windows], *([[outputs]] if biased else [])]
    if transposed:
        channel_sizes = {"c": x.shape[-count - 1] // groups, "o": weight.shape[1]}
    else:
        channel_sizes = {"c": weight.shape[1], "o": weight.shape[0] // groups}
    _, name, overload = node.op.split(".")
    borders = Assist(forward=1, backward=1, over=(*batch, "c"))
    rule = declare(
        node,
        notation(terms, [[*batch, outputs, *after]]),
        whole=[*whole, "k"],
        assisted=dict.fromkeys(halo, borders),
        assist=f"autopar.{name}_{overload}" if halo else None,
        factor_sizes={**sizes, **channel_sizes, **({"g": groups} if groups > 1 else {})},
        linear=floating(node, *(((0, 2), (1, 2)) if biased else ((0,), (1,)))),
        joins=(2,) if biased else (),
        filled=("c", *halo),
        sizes=(SizeArgument(position(node, "groups"), factor="g"),) if groups > 1 else (),
    )
    side = x if transposed else node.results[0]
    taps = math.prod(weight.shape[1:])
    return replace(rule, flops=_MULTIPLY_ADD * side.numel * taps)


#: Terms of the spatial dimensions before and after, whole factors, those that exchange borders,
#: and sizes that no dimension shows.
Spatial = tuple[list[str], list[str], list[str], list[str], dict[str, int]]


def _spatial(node: Node, arguments: dict[str, Any], transposed: bool) -> Spatial:
    before: list[str] = []
    after: list[str] = []
    whole: list[str] = []
    halo: list[str] = []
    sizes: dict[str, int] = {}
    for k in range(len(node.operands[1].shape) - 2):
        window = window_of(node, arguments, k, transposed)
        if not window.aligned:
            before.append(f"s{k}")
            after.append(f"t{k}")
            whole += [f"s{k}", f"t{k}"]
            continue
        # One entry on one side belongs to `stride` entries on the other.
        block = f"(t{k} w{k})" if window.stride > 1 else f"t{k}"
        before.append(f"t{k}" if transposed else block)
        after.append(block if transposed else f"t{k}")
        whole.append(f"w{k}")
        if window.stride > 1:
            sizes |= {f"t{k}": min(window.size, window.made), f"w{k}": window.stride}
        if not window.tiles:
            halo.append(f"t{k}")
    return before, after, whole, halo, sizes


def window_of(node: Node, arguments: dict[str, Any], k: int, transposed: bool) -> Window | Spread:
    """The window that slides along one spatial dimension."""
    count = len(node.operands[1].shape) - 2
    taps = node.operands[1].shape[k - count]
    stride, dilation = (each(arguments[name], k) for name in ("stride", "dilation"))
    padding = arguments["padding"]
    if isinstance(padding, str):
        # An odd amount puts the extra entry behind.
        left = dilation * (taps - 1) // 2 if padding == "same" else 0
    else:
        left = each(padding, k)
    kind = Spread if transposed else Window
    sizes = node.operands[0].shape[k - count], node.results[0].shape[k - count]
    return kind(*sizes, taps, stride, dilation, left)


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


@register("aten.col2im.default")
def col2im(node: Node) -> Rule:
    """``[n?, c·k·k, windows] -> [n?, c, h, w]``: the other way round."""
    batch = "n " if len(node.operands[0].shape) == 3 else ""
    return declare(
        node,
        f"{batch}(c taps) windows -> {batch}c h w",
        whole=["h", "w", "taps", "windows"],
        linear=floating(node, (0,)),
    )
