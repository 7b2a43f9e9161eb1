"""From a partitioned graph to a `torch.fx.GraphModule` that one rank runs."""

from __future__ import annotations

import contextlib
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.errors import GraphError
from autopar.ir.fused import FUSED, sends_forward
from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.ir.local import is_empty, is_uniform, rank_call
from autopar.ir.mesh import Mesh
from autopar.runtime.autocast import autocast_call
from autopar.runtime.fused import begin, finish
from autopar.runtime.nothing import nothing
from autopar.runtime.operators import resolve

#: The operators that take tensors of any strides. Others may read memory as it lies, and a graph
#: keeps no calls of `contiguous`: strides are not part of the IR.
_ANY_STRIDES = ("aten.", "autopar.")


def emit(
    graph: Graph,
    device: torch.device | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> fx.GraphModule:
    """The module that runs a partitioned graph on local tensors.

    Its inputs are the local tensors of the graph's source nodes, in their order. It returns
    ``(outputs, updates)``: the tuple of (local) outputs and the tuple of the new values of the
    buffers in `Graph.updates`. It runs under an active `RankContext`.

    device:
        where operators that create tensors put them (default: as traced)
    coordinates:
        the rank's position along each mesh axis; needed where ranks hold pieces of different
        shapes. Without them the module serves every rank

    Raises GraphError for such a graph without coordinates.
    """
    if coordinates is None and not is_uniform(graph):
        raise GraphError("emit: ranks hold pieces of different shapes, so it needs coordinates")
    target = fx.Graph()
    made: dict[str, fx.Node] = {}
    gathered: fx.Node | None = None
    for node in graph.nodes:
        if node.is_source:
            made[node.name] = target.placeholder(_identifier(node.name))
    for node in graph.nodes:
        if not node.is_source:
            if coordinates is not None and graph.mesh is not None:
                if is_empty(node, graph.mesh, coordinates):
                    _emit_nothing(target, node, made, graph.mesh, coordinates)
                    continue
                node = rank_call(node, graph.mesh, coordinates)
            if node.op == FUSED and sends_forward(node):
                gathered = _emit_bucket(target, node, made, gathered)
            else:
                _emit_call(target, node, made, device)

    def lookup(value: Value) -> fx.Node:
        return made[value.name]

    outputs = tuple(map_values(graph.outputs, lookup))
    updates = tuple(made[value.name] for _, value in graph.updates)
    target.output((outputs, updates))
    target.lint()
    return fx.GraphModule(torch.nn.Module(), target, class_name="Partitioned")


def _emit_call(
    target: fx.Graph, node: Node, made: dict[str, fx.Node], device: torch.device | None
) -> None:
    def given(value: Value) -> fx.Node:
        operand = made[value.name]
        if node.op.startswith(_ANY_STRIDES):
            return operand
        return target.call_function(torch.ops.aten.contiguous.default, (operand,))

    args = map_values(node.args, given)
    kwargs = map_values(node.kwargs, given)
    if device is not None:
        args, kwargs = _on_device(args, device), _on_device(kwargs, device)
    fn: Callable[..., Any] = resolve(node.op)
    if "autocast" in node.attrs:
        fn, first = autocast_call(node)
        args = (*first, *args)
    call = target.call_function(fn, tuple(args), kwargs)
    call.name = _unique(target, call, _identifier(node.name))
    call.meta["origin"] = str(node.origin)
    if len(node.results) == 1 and not _returns_sequence(node.op):
        made[node.name] = call
        return
    for i, value in enumerate(node.results):
        item = target.call_function(_item, (call, i))
        made[value.name] = item


def _emit_bucket(
    target: fx.Graph, node: Node, made: dict[str, fx.Node], before: fx.Node | None
) -> fx.Node:
    """A bucket that is gathered: its collective starts when the one before it has arrived.

    So it is under way while the part of the graph that reads the one before is computed, and
    never more than one is. Its values are parameters, which are there from the beginning.
    """
    values, steps = node.args
    name = _identifier(node.name)
    with target.inserting_after(before) if before else contextlib.nullcontext():
        begun = target.call_function(begin, (map_values(values, lambda v: made[v.name]), steps))
        begun.name = _unique(target, begun, f"{name}_begun")
    call = target.call_function(finish, (begun,))
    call.name = _unique(target, call, name)
    call.meta["origin"] = begun.meta["origin"] = str(node.origin)
    for i, value in enumerate(node.results):
        made[value.name] = target.call_function(_item, (call, i))
    return call


def _emit_nothing(
    target: fx.Graph,
    node: Node,
    made: dict[str, fx.Node],
    mesh: Mesh,
    coordinates: Mapping[str, int],
) -> None:
    """A call that has nothing to do on this rank."""
    results = tuple(
        (v.layout.local_shape(v.shape, mesh, coordinates), v.dtype, v.grad)
        for v in node.results
        if v.layout is not None
    )
    call = target.call_function(nothing, (results, *(made[v.name] for v in node.operands)))
    call.name = _unique(target, call, f"{_identifier(node.name)}_nothing")
    call.meta["origin"] = str(node.origin)
    for i, value in enumerate(node.results):
        made[value.name] = target.call_function(_item, (call, i))


def _item(values: Any, index: int) -> Any:
    """One of several results (`operator.getitem` under a name of this module)."""
    return values[index]


def _returns_sequence(op: str) -> bool:
    """Whether the operator returns a list or tuple even where it has one result (split)."""
    if op.startswith("autopar."):
        return op == FUSED
    schema = resolve(op)._schema  # type: ignore[attr-defined]
    returns = schema.returns
    return len(returns) != 1 or not isinstance(returns[0].type, torch.TensorType)


def _on_device(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, torch.device):
        return device
    if isinstance(tree, (tuple, list)):
        return type(tree)(_on_device(item, device) for item in tree)
    if isinstance(tree, dict):
        return {key: _on_device(item, device) for key, item in tree.items()}
    return tree


def _identifier(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return f"_{clean}" if clean[:1].isdigit() or keyword.iskeyword(clean) else clean


def _unique(target: fx.Graph, call: fx.Node, name: str) -> str:
    return target._graph_namespace.create_name(name, call)
