"""Layer, RMS, group and instance normalisation.

The normalised dimensions may be split: the ranks then share the statistics of each row. Leading
dimensions are plain, and the gradients of weight and bias are terms wherever a rank sees only
some of the rows.
"""

from __future__ import annotations

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import bind, dim_names, notation, operand_terms
from autopar.ir.rules.registry import register

#: Operations per element: two passes for the statistics, then shift, scale and affine map.
FLOPS = 7


@register("aten.layer_norm.default", "aten.rms_norm.default")
def _last_dims(node: Node) -> Rule:
    """`b… d…, d…, d… -> b… d…`; the mean and the mean square are one all-reduce each."""
    name = node.op.split(".")[1]
    passes = 2 if name == "layer_norm" else 1
    rank = len(node.operands[0].shape)
    normalised = len(bind(node)["normalized_shape"])
    rows, row = dim_names(rank - normalised), " ".join(dim_names(normalised, "d"))
    left = operand_terms(node, {"input": f"{' '.join(rows)} {row}", "weight": row, "bias": row})
    return declare(
        node,
        f"{left} -> {' '.join(rows)} {row}",
        assisted={"d": Assist(forward=passes, backward=passes, over=tuple(rows))},
        assist=f"autopar.{name}",
        flops_per_point=FLOPS,
    )


@register("aten.group_norm.default")
def _group_norm(node: Node) -> Rule:
    """Whole groups may go to different ranks; the local call then has fewer groups."""
    left = operand_terms(node, {"input": "b (g c) s*", "weight": "(g c)", "bias": "(g c)"})
    return declare(
        node,
        f"{left} -> b (g c) s*",
        whole=("c", "s"),
        assisted={"g": Assist()},
        assist="autopar.group_norm",
        filled=("g",),
        factor_sizes={"g": bind(node)["num_groups"]},
        flops_per_point=FLOPS,
    )


@register("aten.instance_norm.default")
def _instance_norm(node: Node) -> Rule | None:
    """Every channel of every sample by itself; running statistics would be updated in place."""
    call = bind(node)
    if call["running_mean"] is not None:
        return None
    left = operand_terms(node, {"input": "b c s*", "weight": "c", "bias": "c"})
    return declare(node, f"{left} -> b c s*", whole=("s",), flops_per_point=FLOPS)


@register("aten._weight_norm.default")
def _weight_norm(node: Node) -> Rule:
    """``v`` scaled to the norms ``g``, one for each index of a dimension, which may be split."""
    v, g = node.operands
    dims = dim_names(len(v.shape), "d")
    # Dimension -1 means one norm for all of it.
    kept = bind(node)["dim"]
    own = ["1"] * len(g.shape)
    whole = list(dims)
    if kept >= 0 and len(g.shape) == len(v.shape):
        own[kept] = dims[kept]
        whole.remove(dims[kept])
    return declare(node, notation([dims, own], [dims]), whole=whole, flops_per_point=4)
