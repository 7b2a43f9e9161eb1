"""Stretches of an exported graph whose shapes depend on data: each becomes one operator.

``logits[mask]`` has as many rows as the mask has ones, so nothing between it and the call that
makes a fixed shape of it again can be a value of the IR. All of that runs as one call that stays
whole (see `whole`), on whole tensors and on every rank::

    nonzero = ...; index = ...; cross_entropy = ...   ==>   %loss = autopar_whole.index_9be1a4(...)

A stretch goes from the first call with such a result to the last one that reads one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.ir.trace_alias import NotFunctionalError
from autopar.ir.trace_names import base_name
from autopar.ir.whole import NAMESPACE, TensorType, Whole, operator_for

#: Checks that hold by construction once shapes and dtypes are fixed.
CHECKS = (
    "aten._assert_tensor_metadata.",
    "aten._assert_async.",
    "aten._functional_assert_async.",
    "aten._assert_scalar.",
    "aten.sym_constrain_range",
    "aten._sym_constrain_range",
)

#: Where functions on sizes come from.
_PURE_PYTHON = ("_operator", "math", "torch")


@dataclass(frozen=True)
class Region:
    """One stretch of an exported graph.

    nodes:
        its nodes, in order
    inputs:
        the nodes before it that it reads
    outputs:
        its nodes of fixed shape that are read after it
    written:
        the inputs whose memory it writes to
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...]


def depends_on_data(node: fx.Node) -> bool:
    """Whether a call's result is a number out of a tensor, or has a shape that is one."""
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        if isinstance(leaf, Tensor) and not all(isinstance(size, int) for size in leaf.shape):
            return True
    return False


def needed(module: fx.GraphModule) -> set[fx.Node]:
    """All nodes of a graph but those that depend on data and that nothing comes of."""
    graph = module.graph
    tainted: set[fx.Node] = set()
    for node in graph.nodes:
        if depends_on_data(node) or any(n in tainted for n in node.all_input_nodes):
            tainted.add(node)
    found: set[fx.Node] = set()
    queue = [node for node in graph.nodes if node not in tainted or _has_effect(node, module)]
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue.extend(node.all_input_nodes)
    return found


def _has_effect(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node returns from the graph, writes, draws, or may do so out of sight."""
    if node.op != "call_function":
        return True
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        held = [n for n in node.all_input_nodes if n.op == "get_attr"]
        parts = [getattr(module, str(n.target), None) for n in held]
        graphs = [part for part in parts if isinstance(part, fx.GraphModule)]
        inside = ((n, g) for g in graphs for n in g.graph.nodes if n.op == "call_function")
        return not graphs or any(_has_effect(n, g) for n, g in inside)
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") not in _PURE_PYTHON
    if str(target).startswith(CHECKS):
        return False
    schema = target._schema
    return (
        schema.is_mutable or not schema.returns or target.namespace == NAMESPACE or _is_random(node)
    )


def find_regions(graph: fx.Graph, live: set[fx.Node]) -> list[Region]:
    """The regions of the live nodes of a graph, in order; they do not overlap."""
    nodes = [node for node in graph.nodes if node in live]
    place = {node: k for k, node in enumerate(nodes)}
    spans: list[list[int]] = []
    for node in nodes:
        if node.op != "call_function" or not depends_on_data(node):
            continue
        users = [place[user] for user in node.users if user.op != "output" and user in live]
        begin, end = place[node], max([place[node], *users])
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    return [_region(nodes[begin : end + 1]) for begin, end in spans]


def _region(nodes: Sequence[fx.Node]) -> Region:
    inside = set(nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    inputs = tuple(n for n in read if n.op != "get_attr")
    outputs = tuple(
        node
        for node in nodes
        if not depends_on_data(node) and any(user not in inside for user in node.users)
    )
    memory = {n: {_memory(leaf) for leaf in _tensors(n)} for n in inputs}
    touched = {
        _memory(leaf)
        for node in nodes
        for argument in _written(node)
        for leaf in _tensors(argument)
    }
    written = tuple(n for n in inputs if memory[n] & touched)
    for node in written:
        sharing = [n for n in inputs if memory[n] & memory[node]]
        if len(sharing) > 1 or len(_tensors(node)) != 1:
            raise NotFunctionalError(f"{nodes[0].target}, whose result depends on data,")
    return Region(tuple(nodes), inputs, outputs, written)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]


def _memory(fake: Tensor) -> int:
    return fake.untyped_storage()._cdata


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = node.target._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    for a in arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            item = given.get(a.name)
            yield from (item,) if isinstance(item, fx.Node) else ()


def operator_of(module: fx.GraphModule, region: Region, constants: Mapping[fx.Node, Any]) -> Any:
    """The operator of a region of a module's graph.

    It takes the tensors of `Region.inputs` and returns those of `Region.outputs`, then the new
    contents of `Region.written`.

    constants:
        the inputs that are no tensors, with their values
    """
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    operands = 0
    for node in region.inputs:
        if node in constants:
            made[node] = constants[node]
            continue
        leaves, spec = pytree.tree_flatten(node.meta["val"])
        holes = [graph.placeholder(f"x{operands + k}") for k in range(len(leaves))]
        operands += len(leaves)
        if node in region.written:
            holes = [graph.call_function(torch.clone, (hole,)) for hole in holes]
        made[node] = pytree.tree_unflatten(holes, spec)
    for node in region.nodes:
        for read in node.all_input_nodes:
            if read.op == "get_attr" and read not in made:
                made[read] = graph.node_copy(read)
        made[node] = graph.node_copy(node, made.__getitem__)
    results = [leaf for node in (*region.outputs, *region.written) for leaf in _tensors(node)]
    graph.output(tuple(made[n] for n in (*region.outputs, *region.written)))
    program = fx.GraphModule(module, graph)
    types = tuple(
        TensorType(tuple(x.shape), x.dtype, x.is_floating_point() or x.is_complex())
        for x in results
    )
    first = region.nodes[0]
    whole = Whole(
        _Flat(program),
        types,
        needs_data=True,
        random=any(_is_random(n) for m in _graph_modules(program) for n in m.graph.nodes),
        what=f"{base_name(str(first.target))} and what follows it",
    )
    key = "\n".join(str(m.graph) for m in _graph_modules(program))
    return operator_for(base_name(str(first.target)), key, None, whole)


@dataclass(frozen=True)
class _Flat:
    """Runs a program, its results as one flat tuple of tensors without shared memory."""

    program: fx.GraphModule

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        made = [x for x in pytree.tree_leaves(self.program(*operands)) if isinstance(x, Tensor)]
        taken = {x.untyped_storage()._cdata for x in operands}
        return tuple(x.clone() if x.untyped_storage()._cdata in taken else x for x in made)


def _graph_modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [m for m in module.modules() if isinstance(m, fx.GraphModule)]


def _is_random(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )
