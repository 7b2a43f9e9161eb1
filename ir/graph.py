"""The IR: a graph of operators over values, in execution order.

Nodes and values are immutable; a pass builds a new `Graph`. A value is identified by its name,
which is unique in its graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh

#: The kinds of node that bring a value into the graph. Every other node is a call.
SOURCES = ("input", "param", "buffer", "constant")
#: What holds no values, and most arguments are.
_LEAVES = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. `grad` says whether a gradient flows back to it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False
    layout: Layout | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole (unsplit) tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Origin:
    """Where a node comes from, in the user's own words.

    module:
        the path of the module whose `forward` called it, e.g. ``transformer.h.0.mlp.c_fc``
        ("" is the model itself)
    kind:
        that module's class name
    file, line, code:
        the user's source line, where known
    """

    module: str = ""
    kind: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        where = self.module or "the model itself"
        return f"{where} ({self.file}:{self.line})" if self.file else where


@dataclass(frozen=True)
class Node:
    """One operator call, or one source value.

    op:
        ``"input" | "param" | "buffer" | "constant"`` for sources, whose `target` is the name of
        the input or the dotted name of the parameter, buffer or constant; for a call the
        operator's full name such as ``"aten.linear.default"``, or ``"autopar.<name>"`` for one
        of the compiler's own operators
    args, kwargs:
        as the operator takes them; tensors are `Value`s, possibly inside lists and tuples
    results:
        the values it makes; a result that nobody can use is still listed
    attrs:
        what a pass wants to keep beside the call (not part of the operator's arguments)
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[Value, ...] = ()
    target: str = ""
    origin: Origin = Origin()
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its first result."""
        return self.results[0].name

    @property
    def is_source(self) -> bool:
        return self.op in SOURCES

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The tensor arguments in the order they are written (args, then kwargs, lists flat)."""
        return tuple(values_in((self.args, self.kwargs)))

    @property
    def differentiable(self) -> bool:
        return any(r.grad for r in self.results)

    def operand_grad(self, index: int) -> bool:
        """Whether a gradient flows back through this operand of this node."""
        return self.differentiable and self.operands[index].grad

    @property
    def bytes(self) -> int:
        """Bytes read and written by the unsplit forward call."""
        return sum(v.nbytes for v in self.operands) + sum(v.nbytes for v in self.results)


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order, the values it returns, and the buffers it updates.

    outputs:
        the flattened outputs of the model: a `Value`, or a constant (None, a number)
    updates:
        dotted buffer name -> the value it holds after the call
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...] = ()
    updates: tuple[tuple[str, Value], ...] = ()
    mesh: Mesh | None = None

    @cached_property
    def producers(self) -> dict[str, tuple[Node, int]]:
        """Value name -> (the node that makes it, which result it is)."""
        return {v.name: (n, i) for n in self.nodes for i, v in enumerate(n.results)}

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[Node, int], ...]]:
        """Value name -> the (node, operand index) pairs that read it, in order."""
        found: dict[str, list[tuple[Node, int]]] = {v: [] for v in self.producers}
        for node in self.nodes:
            for i, operand in enumerate(node.operands):
                found[operand.name].append((node, i))
        return {name: tuple(uses) for name, uses in found.items()}

    @cached_property
    def leaving(self) -> frozenset[str]:
        """The names of the values that are returned, or that a buffer holds after the call."""
        returned = {v.name for v in self.outputs if isinstance(v, Value)}
        return frozenset(returned | {v.name for _, v in self.updates})

    @property
    def calls(self) -> Iterator[Node]:
        return (n for n in self.nodes if not n.is_source)

    def sources(self, kind: str) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op == kind)

    def value(self, name: str) -> Value:
        node, index = self.producers[name]
        return node.results[index]

    def with_nodes(self, nodes: tuple[Node, ...]) -> Graph:
        return replace(self, nodes=nodes)

    def __str__(self) -> str:
        """The text form of `autopar.ir.text`."""
        from autopar.ir.text import print_graph  # text imports this module

        return print_graph(self)


def map_values(tree: Any, fn: Callable[[Value], Any]) -> Any:
    """Apply `fn` to every `Value` inside nested tuples, lists and dicts, keeping the rest."""
    if isinstance(tree, Value):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_values(item, fn) for item in tree)
    if isinstance(tree, dict):
        return {key: map_values(item, fn) for key, item in tree.items()}
    return tree


def values_in(tree: Any) -> Iterator[Value]:
    """Every `Value` inside nested tuples, lists and dicts, in the order `map_values` has."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            if not isinstance(item, _LEAVES):
                yield from values_in(item)
    elif isinstance(tree, dict):
        yield from values_in(tuple(tree.values()))
