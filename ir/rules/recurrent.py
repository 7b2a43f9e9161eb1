"""Recurrent layers: the batch may be split; time, features and weights stay whole.

Dropout between layers is made a call of its own by the tracer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import Term, bind, dim_names, notation
from autopar.ir.rules.registry import register


@register(
    "aten.gru.input", "aten.lstm.input", "aten.rnn_relu.input", "aten.rnn_tanh.input"
)  # fmt: skip
def recurrent(node: Node) -> Rule | None:
    """``x [t, b, i]`` (or ``[b, t, i]``), states ``[l, b, h]``, weights; to ``[t, b, o]``, states.

    A single sequence has no batch; one that draws random numbers has no rule.
    """
    arguments = bind(node)
    x = node.operands[0]
    draws = arguments["train"] and arguments["dropout"] and arguments["num_layers"] > 1
    if len(x.shape) != 3 or draws:
        return None
    sequence = ["b", "t"] if arguments["batch_first"] else ["t", "b"]
    states = len(node.results) - 1
    weights = node.operands[1 + states :]
    terms: list[Term] = [[*sequence, "i"]]
    terms += [[f"layers{k}", "b", f"width{k}"] for k in range(states)]
    terms += [dim_names(len(w.shape), f"weight{k}x") for k, w in enumerate(weights)]
    results: list[Term] = [[*sequence, "o"]]
    results += [[f"layers{k}", "b", f"width{k}"] for k in range(states)]
    rule = declare(
        node,
        notation(terms, results),
        whole=["t", "i", "o", "layers", "width", *(n for t in terms[1 + states :] for n in t)],
    )
    # Every weight meets every entry of the batch at every time: a multiply and an add.
    rows = math.prod(x.shape[:2])
    return replace(rule, flops=2 * rows * sum(w.numel for w in weights if len(w.shape) == 2))
