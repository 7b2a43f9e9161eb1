"""Simplifying a fresh graph: chains of reshapes folded, flattened products unflattened, dead
calls dropped.

Before and after, on GPT-2's `Conv1D`::

    %x2 = aten.reshape(%x, [8, 32])                 %y = autopar.addmm_nd(%b, %x, %w)
    %m  = aten.addmm(%b, %x2, %w)           ==>
    %y  = aten.reshape(%m, [2, 4, 96])

so that the leading dimensions of %x stay apart and each can be split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Node, Value, map_values

_RESHAPE = "aten.reshape.default"
#: The key of `Node.attrs` that marks a call which is kept for the random numbers it draws.
DRAWS = "draws"


def normalise(graph: Graph) -> Graph:
    """The passes in order; the result computes the same values and updates."""
    for simplify in (unflatten_products, fold_reshapes, unflatten_products, drop_dead):
        graph = simplify(graph)
    return graph


def fold_reshapes(graph: Graph) -> Graph:
    """A reshape of a reshape becomes one; a reshape to the same shape, or a detach of a value
    without gradient, becomes nothing."""

    def simplify(node: Node, made_by: Mapping[str, Node]) -> Node | Value:
        if node.op == "aten.detach.default" and not node.operands[0].grad:
            return node.operands[0]
        if node.op != _RESHAPE:
            return node
        operand = node.operands[0]
        source = made_by.get(operand.name)
        if source is not None and source.op == _RESHAPE:
            operand = source.operands[0]
        if operand.shape == node.results[0].shape:
            return operand
        return replace(node, args=(operand, *node.args[1:]))

    return _rewrite(graph, simplify)


def unflatten_products(graph: Graph) -> Graph:
    """`addmm`, `mm` and `linear` between two reshapes of the leading dimensions work on the
    unflattened tensor instead. The flat product must have no other use."""
    uses = _uses(graph)

    def simplify(node: Node, made_by: Mapping[str, Node]) -> Node | Value:
        if node.op != _RESHAPE or uses[node.operands[0].name] != 1:
            return node
        product = made_by.get(node.operands[0].name)
        if product is None or product.kwargs:
            return node
        match product.op, product.args:
            case ("aten.addmm.default", (bias, flat, _)):
                op, place = "autopar.addmm_nd", 1
                if len(bias.shape) != 1:
                    return node
            case ("aten.mm.default", (flat, _)):
                op, place = "aten.matmul.default", 0
            case ("aten.linear.default", (flat, _, *_)):
                op, place = product.op, 0
            case _:
                return node
        source = made_by.get(flat.name)
        if source is None or source.op != _RESHAPE or len(flat.shape) != 2:
            return node
        whole = source.operands[0]
        result = node.results[0]
        if whole.shape[-1:] != flat.shape[-1:] or whole.shape[:-1] != result.shape[:-1]:
            return node
        args = (*product.args[:place], whole, *product.args[place + 1 :])
        return replace(product, op=op, args=args, results=(replace(result, name=product.name),))

    return _rewrite(graph, simplify)


def drop_dead(graph: Graph) -> Graph:
    """Without the calls and sources that no output or update needs.

    Inputs stay, buffers that are only written to, and draws that are kept for their numbers
    (`trace_draws`).
    """
    needed = needed_values(graph)
    kept = [n for n in graph.nodes if n.op == "input" or any(r.name in needed for r in n.results)]
    return graph.with_nodes(tuple(kept))


def needed_values(graph: Graph) -> set[str]:
    """The names of the values that outputs, updates and kept draws are made from."""
    needed = set(graph.leaving)
    needed |= {n.name for n in graph.sources("buffer") if n.target in dict(graph.updates)}
    needed |= {n.name for n in graph.nodes if DRAWS in n.attrs}
    for node in reversed(graph.nodes):
        if any(r.name in needed for r in node.results):
            needed.update(v.name for v in node.operands)
    return needed


def _uses(graph: Graph) -> Counter[str]:
    """How often each value is read, outputs and updates included."""
    names = [v.name for node in graph.nodes for v in node.operands]
    names += [v.name for v in graph.outputs if isinstance(v, Value)]
    return Counter(names + [v.name for _, v in graph.updates])


def _rewrite(graph: Graph, simplify: Callable[[Node, Mapping[str, Node]], Node | Value]) -> Graph:
    """Apply `simplify` to each call in order.

    A `Value` in a call's place stands for its result. A call that takes over the name of an
    earlier one replaces that one, whose only use it was.
    """
    renamed: dict[str, Value] = {}
    made_by: dict[str, Node] = {}
    kept: dict[str, Node] = {}

    def current(value: Value) -> Value:
        return renamed.get(value.name, value)

    for node in graph.nodes:
        if node.is_source:
            kept[node.name] = node
            continue
        if any(v.name in renamed for v in node.operands):
            args, kwargs = map_values((node.args, node.kwargs), current)
            node = replace(node, args=args, kwargs=kwargs)
        simpler = simplify(node, made_by)
        if isinstance(simpler, Value):
            renamed[node.name] = simpler
            continue
        if simpler.name != node.name:
            renamed[node.name] = simpler.results[0]
        kept.pop(simpler.name, None)
        kept[simpler.name] = simpler
        made_by.update({v.name: simpler for v in simpler.results})
    outputs: tuple[Any, ...] = map_values(graph.outputs, current)
    updates = tuple((name, current(v)) for name, v in graph.updates)
    return replace(graph, nodes=tuple(kept.values()), outputs=outputs, updates=updates)
