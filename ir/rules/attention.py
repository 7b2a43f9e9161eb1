"""Scaled dot product attention.

Batch and heads may be split, and the queries unless they are masked by their position; keys,
values and the width of a head stay whole. With grouped queries, query head ``j`` reads key head
``j // r``, so the heads are ``(h r)`` and the keys have ``h``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, operand_names, operand_terms
from autopar.ir.rules.registry import register


@register("aten.scaled_dot_product_attention.default")
def _attention(node: Node) -> Rule:
    """`b… (h r) q k, b… h s k, b… h s v, b… (h r) q s -> b… (h r) q v`"""
    call = bind(node)
    query, key, mask = call["query"], call["key"], call["attn_mask"]
    rank = len(query.shape)
    batch = [f"b{d}" for d in range(max(0, rank - 3))]
    heads = key_heads = ["h"] if rank > 2 else []
    sizes = {}
    if rank > 2 and call["enable_gqa"] and query.shape[-3] != key.shape[-3]:
        heads = ["(h r)"]
        sizes = {"h": key.shape[-3], "r": query.shape[-3] // key.shape[-3]}
    of_mask = [*batch, *heads, "q", "s"]
    terms = {
        "query": " ".join([*batch, *heads, "q", "k"]),
        "key": " ".join([*batch, *key_heads, "s", "k"]),
        "value": " ".join([*batch, *key_heads, "s", "v"]),
        "attn_mask": " ".join(of_mask[-len(mask.shape) :]) if mask is not None else "",
    }
    dropout = call["dropout_p"] > 0
    value = operand_names(node).index("value")
    rule = declare(
        node,
        f"{operand_terms(node, terms)} -> {' '.join([*batch, *heads, 'q', 'v'])}",
        whole=("k", "s", "v", *(("q",) if call["is_causal"] else ())),
        linear=((value,),),
        factor_sizes=sizes,
        assist="autopar.scaled_dot_product_attention" if dropout else None,
        always_assist=dropout,
        # A block of no key heads does not know how many query heads share one.
        filled=("h",) if dropout and sizes else (),
    )
    size = {f.name: f.size for f in rule.factors}
    scores = math.prod(query.shape[:-1]) * size["s"]
    # Both matrix products: a multiply and an add per point.
    flops = 2 * scores * (size["k"] + size["v"])
    # The scores are not kept: the backward exponentiates them again.
    return replace(rule, flops=flops, special=(scores, scores))
