"""Embedding look-up: the batch, the width or the vocabulary may be split.

Each rank looks up the ids of its own block of the vocabulary and leaves zeros for the others, so
the rows are terms of a sum: ``v d, b* -> b* d`` with `v` assisted.
"""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import bind
from autopar.ir.rules.registry import register


@register("aten.embedding.default")
def _embedding(node: Node) -> Rule | None:
    call = bind(node)
    if call["sparse"]:
        return None
    # Scaling by frequency counts the ids of the whole batch in the whole vocabulary.
    counted = call["scale_grad_by_freq"]
    return declare(
        node,
        "v d, b* -> b* d",
        whole=("v", "b") if counted else (),
        assisted={"v": Assist()},
        assist="autopar.embedding",
        linear=((0,),),
    )
