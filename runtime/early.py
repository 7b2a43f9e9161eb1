"""What operators may begin before they are reached: collectives about what is there from the start.

A loss over a split batch divides by the number of labels on all ranks. Where it asks for that
number when it is reached, every rank waits there for the slowest. The labels are an input, though:
the sum is started with the forward pass, and has arrived when the loss is reached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node, values_in
from autopar.ir.keep import KEEP, RECOMPUTE, REGATHER
from autopar.ir.steps import STEPS
from autopar.ir.trace_grad import overload
from autopar.runtime.operators import BEGINNINGS, NAMESPACE, resolve

#: The keyword by which an operator takes what was begun for it.
BEGUN = "begun"


def _beginning(node: Node) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """What begins a call, and its arguments; None where nothing does."""
    if not node.op.startswith(f"{NAMESPACE}."):
        return None
    run = resolve(node.op)  # which registers what there is
    begin = BEGINNINGS.get(node.op.removeprefix(f"{NAMESPACE}."))
    if begin is None:
        return None
    bound = inspect.signature(run).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return begin, {name: bound.arguments[name] for name in inspect.signature(begin).parameters}


@dataclass(frozen=True)
class Early:
    """What of a graph comes first.

    calls:
        the calls that decide arguments of what is begun, in order
    begun:
        the calls that are begun, what begins each, and its arguments
    """

    calls: tuple[Node, ...]
    begun: tuple[tuple[Node, Callable[..., Any], Mapping[str, Any]], ...]


def early(graph: Graph) -> Early:
    """The calls to begin, where all it takes comes of inputs and buffers alone."""
    there = {node.name for node in graph.nodes if node.is_source}
    reads: dict[str, set[str]] = {name: set() for name in there}
    needed: set[str] = set()
    begun = []
    for node in graph.calls:
        found = None if is_kept_otherwise(node) else _beginning(node)
        if found is not None:
            read = {value.name for value in values_in(found[1])}
            if read <= reads.keys():
                begun.append((node, *found))
                needed |= {name for value in read for name in reads[value]}
        if _may_come_first(node) and all(v.name in reads for v in node.operands):
            behind = {name for v in node.operands for name in reads[v.name]} | {node.name}
            reads |= {value.name: behind for value in node.results}
    return Early(tuple(node for node in graph.calls if node.name in needed), tuple(begun))


def is_kept_otherwise(node: Node) -> bool:
    """Whether a call is run, or what it saves is kept, in another way than autograd's own."""
    return any(key in node.attrs for key in (RECOMPUTE, KEEP, REGATHER))


def _may_come_first(node: Node) -> bool:
    """Whether it makes no difference when a call runs."""
    if node.differentiable or is_kept_otherwise(node) or node.op == FUSED:
        return False
    if node.op in STEPS:
        return True
    if not node.op.startswith("aten."):
        return False
    return torch.Tag.nondeterministic_seeded not in overload(node.op).tags
