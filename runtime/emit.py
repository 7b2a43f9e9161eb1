"""From a partitioned graph to a `torch.fx.GraphModule` that one rank runs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.runtime.operators import resolve


def emit(graph: Graph, device: torch.device | None = None) -> fx.GraphModule:
    """The module that runs a partitioned graph on local tensors.

    Its inputs are the local tensors of the graph's source nodes, in their order. It returns
    ``(outputs, updates)``: the tuple of (local) outputs and the tuple of the new values of the
    buffers in `Graph.updates`. It runs under an active `RankContext`.

    device:
        where operators that create tensors put them (default: as traced)
    """
    target = fx.Graph()
    made: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.is_source:
            made[node.name] = target.placeholder(_identifier(node.name))
    for node in graph.nodes:
        if not node.is_source:
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
    args = map_values(node.args, lambda v: made[v.name])
    kwargs = map_values(node.kwargs, lambda v: made[v.name])
    if device is not None:
        args, kwargs = _on_device(args, device), _on_device(kwargs, device)
    fn: Callable[..., Any] = resolve(node.op)
    if "autocast" in node.attrs:
        device_type, dtype = node.attrs["autocast"]
        args = (fn, device_type, dtype, *args)
        fn = under_autocast
    call = target.call_function(fn, tuple(args), kwargs)
    call.name = _unique(target, call, _identifier(node.name))
    call.meta["origin"] = str(node.origin)
    if len(node.results) == 1 and not _returns_sequence(node.op):
        made[node.name] = call
        return
    for i, value in enumerate(node.results):
        item = target.call_function(_item, (call, i))
        made[value.name] = item


def _item(values: Any, index: int) -> Any:
    """One of several results (`operator.getitem` under a name of this module)."""
    return values[index]


def under_autocast(
    fn: Callable[..., Any], device_type: str, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    """Run one operator as it ran inside an autocast region of the model."""
    with torch.autocast(device_type, dtype):
        return fn(*args, **kwargs)


def _returns_sequence(op: str) -> bool:
    """Whether the operator returns a list or tuple even where it has one result (split)."""
    if op.startswith("autopar."):
        return False
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
