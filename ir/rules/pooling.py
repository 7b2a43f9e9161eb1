"""Pooling and resizing: the leading dimensions are parallel.

A spatial dimension of a pooling may be split as that of a convolution (see `windows`); one that is
resized stays whole, unless each entry is repeated a whole number of times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import Term, bind, dim_names, floating, notation
from autopar.ir.rules.registry import register
from autopar.ir.rules.windows import Window, each


@register(
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten.upsample_bicubic2d.default",
    "aten.upsample_bicubic2d.vec",
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_linear1d.default",
    "aten.upsample_linear1d.vec",
)
def averaging(node: Node) -> Rule:
    """A weighted mean of each window: linear."""
    return _pool(node, linear=floating(node, (0,)))


@register(
    "aten.adaptive_max_pool1d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.adaptive_max_pool3d.default",
    "aten.max_pool1d_with_indices.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d_with_indices.default",
)
def maximum(node: Node) -> Rule:
    """Indices count inside one plane, so they do not depend on the leading dimensions."""
    return _pool(node, linear=())


@register("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default")
def average(node: Node) -> Rule:
    """Linear. Padding that does not count, or a last window that reaches out, has other divisors
    at the borders, so space stays whole."""
    arguments = bind(node)
    padded = any(_listed(arguments["padding"]))
    plain = not arguments["ceil_mode"] and (arguments["count_include_pad"] or not padded)
    return _sliding(node, arguments, linear=floating(node, (0,)), splittable=plain)


@register("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default")
def largest(node: Node) -> Rule:
    return _sliding(node, bind(node), linear=(), splittable=True)


def _sliding(
    node: Node, arguments: dict[str, Any], *, linear: Sequence[Sequence[int]], splittable: bool
) -> Rule:
    """Windows over the last dimensions, which may be split where blocks belong together."""
    x, y = node.operands[0], node.results[0]
    count = _spatial_count(node)
    leading = dim_names(len(x.shape) - count, "d")
    before: list[str] = []
    after: list[str] = []
    whole: list[str] = []
    halo: list[str] = []
    sizes: dict[str, int] = {}
    for k in range(count):
        taps = each(arguments["kernel_size"], k)
        stride = each(arguments["stride"] or arguments["kernel_size"], k)
        window = Window(
            x.shape[k - count], y.shape[k - count], taps, stride,
            each(arguments.get("dilation", 1), k), each(arguments["padding"], k),
        )  # fmt: skip
        if not (splittable and window.aligned):
            before.append(f"s{k}")
            after.append(f"t{k}")
            whole += [f"s{k}", f"t{k}"]
            continue
        before.append(f"(t{k} w{k})" if stride > 1 else f"t{k}")
        after.append(f"t{k}")
        whole.append(f"w{k}")
        sizes |= {f"t{k}": window.made, f"w{k}": stride} if stride > 1 else {}
        if not window.tiles:
            halo.append(f"t{k}")
    name = node.op.split(".")[1]
    rule = declare(
        node,
        notation([[*leading, *before]], [[*leading, *after]]),
        whole=whole,
        linear=linear,
        assisted=dict.fromkeys(halo, Assist(forward=1, backward=1, over=tuple(leading))),
        assist=f"autopar.{name}_default" if halo else None,
        factor_sizes=sizes,
    )
    return _finished(rule, x.numel)


@register(
    "aten.upsample_nearest1d.default",
    "aten.upsample_nearest1d.vec",
    "aten.upsample_nearest2d.default",
    "aten.upsample_nearest2d.vec",
)
def nearest(node: Node) -> Rule:
    """Linear; by a whole factor that the call spells, every entry is repeated, and may be split."""
    x, y = node.operands[0], node.results[0]
    count = _spatial_count(node)
    leading = dim_names(len(x.shape) - count, "d")
    factors = bind(node).get("scale_factors") or []
    before = dim_names(count, "s")
    after: list[str] = []
    whole: list[str] = []
    sizes: dict[str, int] = {}
    for k in range(count):
        old, new = x.shape[k - count], y.shape[k - count]
        if len(factors) == count and factors[k] * old == new and new % old == 0:
            after.append(f"(s{k} times{k})")
            whole.append(f"times{k}")
            sizes |= {f"s{k}": old, f"times{k}": new // old}
        else:
            after.append(f"t{k}")
            whole += [f"s{k}", f"t{k}"]
    rule = declare(
        node,
        notation([[*leading, *before]], [[*leading, *after]]),
        whole=whole,
        factor_sizes=sizes,
        linear=floating(node, (0,)),
    )
    return _finished(rule, x.numel)


def _finished(rule: Rule, flops: int) -> Rule:
    """These operators refuse tensors without elements."""
    return replace(rule, flops=flops, filled=tuple(f.name for f in rule.factors))


def _listed(values: int | list[int]) -> list[int]:
    return [values] if isinstance(values, int) else values


def _spatial_count(node: Node) -> int:
    found = re.search(r"([123])d", node.op)
    assert found is not None
    return int(found.group(1))


def _pool(node: Node, *, linear: tuple[tuple[int, ...], ...]) -> Rule:
    count = _spatial_count(node)
    leading = dim_names(len(node.operands[0].shape) - count, "d")
    results: list[Term] = [[*leading, *dim_names(count, "t")]] * len(node.results)
    rule = declare(
        node,
        notation([[*leading, *dim_names(count, "s")]], results),
        whole=["s", "t"],
        linear=linear,
    )
    return _finished(rule, node.operands[0].numel)
