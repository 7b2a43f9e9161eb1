"""Losses.

A mean over a split batch is a term: the local sum over the count of the whole batch. With the
classes split (the "vocab-parallel loss") each rank holds some logits of every sample and the
ranks share, per sample, the largest logit, the sum of exponentials and the target's logit.
"""

from __future__ import annotations

import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import bind, operand_terms
from autopar.ir.rules.registry import register

#: The `reduction` argument of a loss.
NONE, MEAN, SUM = 0, 1, 2

#: Operations per logit of a cross entropy: subtract, exponentiate, add up, and the same back.
FLOPS = 4


#: Losses that are a pointwise operator and a reduction of everything.
ELEMENTWISE = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip


@register("aten.cross_entropy_loss.default")
def _cross_entropy(node: Node) -> Rule:
    call = bind(node)
    probabilities = call["target"].dtype.is_floating_point
    # Maximum, sum of exponentials, the target's logit; for smoothing the sum of all logits.
    rounds = 4 if call["label_smoothing"] else 3
    return _class_loss(node, probabilities, rounds)


@register("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")
def _nll(node: Node) -> Rule:
    return _class_loss(node, probabilities=False, rounds=1)


def _class_loss(node: Node, probabilities: bool, rounds: int) -> Rule:
    """`n c d…, n d…, c -> ` (or `n d…` unreduced)

    rounds:
        how many numbers per sample are reduced over split classes
    """
    call = bind(node)
    rank = len(call["self"].shape)
    space = [f"d{k}" for k in range(rank - 2)]
    samples = (["n"] if rank > 1 else []) + space
    logits = " ".join(samples[:1] + ["c"] + space if rank > 1 else ["c"])
    sample = " ".join(samples)
    left = operand_terms(
        node,
        {"self": logits, "target": logits if probabilities else sample, "weight": "c"},
    )
    reduction = call["reduction"]
    # What a mean divides by is one number, shared once: how many samples count, or their weight.
    itemsize = torch.int64.itemsize if call["weight"] is None else None
    shared = Assist(forward=0 if probabilities else 1, itemsize=itemsize)
    counted = shared if reduction == MEAN else None
    if call["weight"] is not None:
        rounds += 1
    classes = Assist(forward=rounds, over=tuple(samples), absent="I")
    assisted = {"c": classes} | ({"n": counted, "d": counted} if counted else {})
    name = node.op.split(".")[1]
    # A cross entropy is a log_softmax, whose result it keeps, and what picks from it.
    normalises = name == "cross_entropy_loss"
    return declare(
        node,
        f"{left} -> {sample if reduction == NONE else ''}",
        whole=("c",) if probabilities else (),
        assisted=assisted,
        assist=f"autopar.{name}",
        flops_per_point=FLOPS,
        special_per_point=(1, 1) if normalises else (0, 0),
        inner=(logits.split(),) if normalises else (),
    )


@register(*(f"aten.{name}.default" for name in ELEMENTWISE))
def _elementwise_loss(node: Node) -> Rule:
    """A pointwise operator and, unless `reduction` is none, a mean or sum over everything."""
    reduction = bind(node)["reduction"]
    left = ", ".join(["b*"] * len(node.operands))
    mean = reduction == MEAN
    return declare(
        node,
        f"{left} -> {'b*' if reduction == NONE else ''}",
        assisted={"b": Assist()} if mean else None,
        assist=f"autopar.{node.op.split('.')[1]}" if mean else None,
        flops_per_point=FLOPS,
    )
