"""Softmax and its logarithm; the normalised dimension may be split.

A rank needs two numbers per row from the others, the largest entry and the sum of exponentials,
and one more for the gradient.
"""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import bind, dim_names
from autopar.ir.rules.registry import register

#: Operations per element: subtract, exponentiate, add up, divide.
FLOPS = 4


@register(
    "aten.softmax.int", "aten._softmax.default",
    "aten.log_softmax.int", "aten._log_softmax.default",
)  # fmt: skip
def _softmax(node: Node) -> Rule:
    names = dim_names(len(node.operands[0].shape))
    over = tuple(names)
    if names:
        dim = bind(node)["dim"] % len(names)
        names[dim] = "c"
        over = tuple(n for n in names if n != "c")
    term = " ".join(names)
    _, name, overload = node.op.split(".")
    return declare(
        node,
        f"{term} -> {term}",
        assisted={"c": Assist(forward=2, backward=1, over=over)},
        assist=f"autopar.{name.lstrip('_')}_{overload}",
        flops_per_point=FLOPS,
        # The gradient of the logarithm takes the exponentials again.
        special_per_point=(1, 1 if "log" in name else 0),
    )
