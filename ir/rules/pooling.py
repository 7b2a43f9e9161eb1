"""Pooling and resizing: the leading dimensions are parallel, the spatial ones whole."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import Term, dim_names, floating, notation
from autopar.ir.rules.registry import register


@register(
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten.avg_pool1d.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool3d.default",
    "aten.upsample_bicubic2d.default",
    "aten.upsample_bicubic2d.vec",
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_linear1d.default",
    "aten.upsample_linear1d.vec",
    "aten.upsample_nearest1d.default",
    "aten.upsample_nearest1d.vec",
    "aten.upsample_nearest2d.default",
    "aten.upsample_nearest2d.vec",
)
def averaging(node: Node) -> Rule:
    """A weighted mean of each window: linear."""
    return _pool(node, linear=floating(node, (0,)))


@register(
    "aten.adaptive_max_pool1d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.adaptive_max_pool3d.default",
    "aten.max_pool1d.default",
    "aten.max_pool1d_with_indices.default",
    "aten.max_pool2d.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool3d.default",
    "aten.max_pool3d_with_indices.default",
)
def maximum(node: Node) -> Rule:
    """Indices count inside one plane, so they do not depend on the leading dimensions."""
    return _pool(node, linear=())


def _pool(node: Node, *, linear: tuple[tuple[int, ...], ...]) -> Rule:
    found = re.search(r"([123])d", node.op)
    assert found is not None
    count = int(found.group(1))
    leading = dim_names(len(node.operands[0].shape) - count, "d")
    results: list[Term] = [[*leading, *dim_names(count, "t")]] * len(node.results)
    rule = declare(
        node,
        notation([[*leading, *dim_names(count, "s")]], results),
        whole=["s", "t"],
        linear=linear,
    )
    return replace(rule, flops=node.operands[0].numel)
