"""Means and variances.

A mean over a split dimension is a sum of scaled local means, so it stays Partial and costs no
communication. A variance needs the mean of the whole dimension first; what is then left of it is
a sum of local terms. A standard deviation is a root, which no rank can take of a term, so it is
completed on the spot.
"""

from __future__ import annotations

from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind
from autopar.ir.rules.reduced import reduction_rule
from autopar.ir.rules.registry import register


@register("aten.mean.default", "aten.mean.dim")
def _mean(node: Node) -> Rule:
    call = bind(node)
    return reduction_rule(
        node, call.get("dim"), call.get("keepdim", False), assist="autopar.mean", linear=((0,),)
    )


def _moments(kind: str, overload: str) -> None:
    @register(f"aten.{kind}.{overload}")
    def _rule(node: Node) -> Rule:
        call = bind(node)
        rooted = kind.startswith("std")
        # The mean, then for a root the variance; `std_mean` completes its mean as well.
        rounds = {"std": 2, "std_mean": 3}.get(kind, 1)
        return reduction_rule(
            node,
            call.get("dim"),
            call.get("keepdim", False),
            assist=f"autopar.{kind}_{overload}",
            forward=rounds,
            absent="I" if rooted else "P",
        )


for _kind in ("var", "std", "var_mean", "std_mean"):
    for _overload in ("default", "dim", "correction"):
        _moments(_kind, _overload)
