"""Random numbers that are drawn for nothing: drawn all the same, so that later ones are equal.

Dropout on what no output needs still advances the generator on a single device. Such a call stays,
on ones of its operands' forms, and what led up to it goes::

    %h = aten.linear.default(%x, %w)                 %ones = aten.ones.default([4, 8], ...)
    %d = aten.dropout.default(%h, 0.1, True)   ==>   %d = aten.dropout.default(%ones, 0.1, True)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.ir.normalise import DRAWS, needed_values
from autopar.ir.trace_grad import has_overload, meta_call
from autopar.ir.trace_random import RandomNoted


def separate_draws(graph: Graph, device: torch.device) -> Graph:
    """Cut the calls that draw, and whose results nobody needs, from what leads up to them."""
    needed = needed_values(graph)
    taken = set(graph.producers)
    nodes: list[Node] = []
    for node in graph.nodes:
        dead = not any(r.name in needed for r in node.results)
        if node.is_source or not dead or not _draws(node):
            nodes.append(node)
            continue
        operands = {v.name: v for v in node.operands}
        made = {name: _ones(value, device, taken, node) for name, value in operands.items()}
        nodes += [*made.values(), _on(node, made)]
    return graph.with_nodes(tuple(nodes))


def _on(node: Node, made: Mapping[str, Node]) -> Node:
    """The call on the results of other nodes, each in the place of the value of its name."""
    args, kwargs = map_values((node.args, node.kwargs), lambda v: made[v.name].results[0])
    results = tuple(replace(r, grad=False) for r in node.results)
    return replace(
        node, args=args, kwargs=kwargs, results=results, attrs={**node.attrs, DRAWS: True}
    )


def _draws(node: Node) -> bool:
    """Whether a call takes numbers from the generator: PyTorch is asked, on the meta device."""
    if not has_overload(node.op):
        return False
    noted = RandomNoted()
    try:
        with noted:
            meta_call(node.op, node.args, node.kwargs)
    except Exception:  # an operator that cannot be asked is dropped, as others are
        return False
    return bool(noted.found)


def _ones(value: Value, device: torch.device, taken: set[str], node: Node) -> Node:
    name = next(n for k in itertools.count() if (n := f"ones_for_draw_{k}") not in taken)
    taken.add(name)
    kwargs = {"dtype": value.dtype, "device": device}
    result = Value(name, value.shape, value.dtype)
    return Node("aten.ones.default", (list(value.shape),), kwargs, (result,), origin=node.origin)
