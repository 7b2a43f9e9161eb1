"""The shape of every reduction: which dimensions stay and which go.

Kept dimensions get the factors ``b0, b1, …``, reduced ones ``r0, r1, …``, numbered by position::

    b0 r1 b2 -> b0 b2          x.amax(1)
    b0 r1 b2 -> b0 1 b2        x.amax(1, keepdim=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import normal_dims


def reduction_rule(
    node: Node,
    dims: int | list[int] | None,
    keepdim: bool,
    *,
    forward: int = 0,
    backward: int = 0,
    absent: str = "P",
    assist: str | None = None,
    whole: Sequence[str] = (),
    **declaration: Any,
) -> Rule:
    """The rule of a reduction of operand 0 over `dims` (None or [] for all of them).

    forward, backward, absent:
        of the `Assist` of the reduced factors; each all-reduce has the size of one result
    assist:
        the runtime operator; without one a split reduced factor leaves the results Partial
    """
    rank = len(node.operands[0].shape)
    gone = normal_dims(dims, rank)
    left = [f"r{d}" if d in gone else f"b{d}" for d in range(rank)]
    kept = [name for name in left if name.startswith("b")]
    right = ["1" if name.startswith("r") else name for name in left] if keepdim else kept
    spec = f"{' '.join(left)} -> " + ", ".join([" ".join(right)] * len(node.results))
    assisted = {"r": Assist(forward, backward, tuple(kept), absent)} if assist else {}
    return declare(
        node, spec, assisted=assisted, assist=assist, whole=whole, flops_per_point=1, **declaration
    )
