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
from autopar.ir.keep import (
    KEEP,
    REGATHER,
    gathered_again,
    moves,
    reads_from_outside,
    regions,
    resident,
)
from autopar.ir.layout import INVARIANT
from autopar.ir.local import is_empty, is_uniform, rank_call
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import with_reduction
from autopar.ir.steps import STEPS
from autopar.ir.trace_grad import overload
from autopar.runtime.autocast import autocast_call
from autopar.runtime.awaited import all_reduce_returned
from autopar.runtime.early import BEGUN, early, is_kept_otherwise
from autopar.runtime.fused import begin, finish
from autopar.runtime.gathered import finish_again, step_again
from autopar.runtime.keeping import Kept, Recomputed
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
    for node in graph.nodes:
        if node.is_source:
            made[node.name] = target.placeholder(_identifier(node.name))
    emitter = _Emitter(graph, device, coordinates)
    emitter.begin(target, made)
    rest = tuple(node for node in graph.calls if node.name not in made)
    for region, nodes in regions(rest):
        if region:
            emitter.region(target, nodes, made)
        else:
            emitter.call(target, nodes[0], made)

    def lookup(value: Value) -> fx.Node:
        return made[value.name]

    outputs = tuple(map_values(graph.outputs, lookup))
    updates = tuple(made[value.name] for _, value in graph.updates)
    target.output((outputs, updates))
    target.lint()
    return fx.GraphModule(emitter.parts, target, class_name="Partitioned")


class _Emitter:
    """Writes calls into a `torch.fx.Graph`, regions and what keeps another form as submodules."""

    def __init__(
        self, graph: Graph, device: torch.device | None, coordinates: Mapping[str, int] | None
    ) -> None:
        self.graph, self.device, self.coordinates = graph, device, coordinates
        self.parts = torch.nn.Module()
        self._gathered: fx.Node | None = None
        self._first_again = True
        self._resident = resident(graph)
        self._again = gathered_again(graph)
        #: What was begun for a call, by its name.
        self._begun: dict[str, fx.Node] = {}
        self._uniform = is_uniform(graph)
        read_by: dict[str, set[str]] = {
            name: {node.name for node, _ in uses} for name, uses in graph.consumers.items()
        }
        for name in graph.leaving:
            read_by[name].add("")
        self._read_by = read_by

    def begin(self, target: fx.Graph, made: dict[str, fx.Node]) -> None:
        """What comes before all other calls (see `autopar.runtime.early`)."""
        first = early(self.graph)
        for node in first.calls:
            self._plain(target, node, made)
        for node, fn, given in first.begun:
            if not self._reads_again(node):
                kwargs = map_values(given, lambda v: made[v.name])
                call = target.call_function(fn, (), kwargs)
                call.name = _unique(target, call, f"{_identifier(node.name)}_begun")
                call.meta["origin"] = str(node.origin)
                self._begun[node.name] = call

    def _reads_again(self, node: Node) -> bool:
        return any(v.name in self._again for v in node.operands) and not moves(node)

    def call(self, target: fx.Graph, node: Node, made: dict[str, fx.Node]) -> None:
        """One call; under hooks where it does not simply keep what autograd saves."""
        form = node.attrs.get(KEEP, "")
        if node.differentiable and (form or self._reads_again(node)):
            self._part(target, [node], made, lambda run, here: Kept(run, form, node.op, here))
        else:
            self._plain(target, node, made)

    def region(self, target: fx.Graph, nodes: list[Node], made: dict[str, fx.Node]) -> None:
        """Calls that backward runs again."""
        form = nodes[0].attrs.get(KEEP, "")
        # Where a rank stopped running again, others may wait in a collective behind that.
        early = self._uniform and not nodes[-1].op.startswith("autopar.")
        self._part(target, nodes, made, lambda run, here: Recomputed(run, form, here, early))

    def _part(
        self,
        target: fx.Graph,
        nodes: list[Node],
        made: dict[str, fx.Node],
        wrap: Callable[[fx.GraphModule, list[bool]], torch.nn.Module],
    ) -> None:
        """Some calls as a submodule, which takes what they read and gives what others read."""
        inner = fx.Graph()
        taken = reads_from_outside(nodes)
        inside = {v.name: inner.placeholder(_identifier(v.name)) for v in taken}
        names = {node.name for node in nodes}
        given = []
        for node in nodes:
            self._plain(inner, node, inside)
            given += [v for v in node.results if self._read_by[v.name] - names]
        inner.output(tuple(inside[v.name] for v in given))
        inner.lint()
        run = fx.GraphModule(torch.nn.Module(), inner, class_name="Part")
        name = f"part_{_identifier(nodes[0].name)}"
        self.parts.add_module(name, wrap(run, [v.name in self._resident for v in taken]))
        call = target.call_module(name, tuple(made[v.name] for v in taken))
        for i, value in enumerate(given):
            made[value.name] = target.call_function(_item, (call, i))

    def _plain(self, target: fx.Graph, node: Node, made: dict[str, fx.Node]) -> None:
        mesh = self.graph.mesh
        if self.coordinates is not None and mesh is not None:
            if is_empty(node, mesh, self.coordinates):
                _emit_nothing(target, node, made, mesh, self.coordinates)
                return
            node = rank_call(node, mesh, self.coordinates)
        else:
            node = with_reduction(node)
        if node.op == FUSED and sends_forward(node):
            self._gathered = _emit_bucket(target, node, made, self._gathered, self._first_again)
            self._first_again &= not node.attrs.get(REGATHER)
            return
        begun = self._begun.get(node.name)
        more = {} if begun is None else {BEGUN: begun}
        instead = all_reduce_returned if self._is_only_returned(node) else None
        _emit_call(target, node, made, self.device, instead, more)

    def _is_only_returned(self, node: Node) -> bool:
        """Whether a number is summed over the ranks, to be returned and for nothing else."""
        if node.op != "autopar.all_reduce" or node.args[2] != INVARIANT or is_kept_otherwise(node):
            return False
        (value,) = node.results
        updated = any(v.name == value.name for _, v in self.graph.updates)
        return value.numel == 1 and self._read_by[value.name] == {""} and not updated


def _emit_call(
    target: fx.Graph,
    node: Node,
    made: dict[str, fx.Node],
    device: torch.device | None,
    instead: Callable[..., Any] | None,
    more: Mapping[str, Any],
) -> None:
    """`instead`: what runs in the place of the operator; `more`: keywords it has besides."""

    def given(value: Value) -> fx.Node:
        operand = made[value.name]
        if node.op.startswith(_ANY_STRIDES):
            return operand
        return target.call_function(torch.ops.aten.contiguous.default, (operand,))

    args = map_values(node.args, given)
    kwargs = map_values(node.kwargs, given)
    if device is not None:
        args, kwargs = _on_device(args, device), _on_device(kwargs, device)
    kwargs = {**kwargs, **more}
    fn = instead or resolve(node.op)
    if node.attrs.get(REGATHER) and node.op in STEPS:
        fn, args = step_again, (node.op, *args)
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
    target: fx.Graph,
    node: Node,
    made: dict[str, fx.Node],
    before: fx.Node | None,
    first_again: bool,
) -> fx.Node:
    """A bucket that is gathered: its collective starts when the one before it has arrived.

    So it is under way while the part of the graph that reads the one before is computed, and
    never more than one is. Its values are parameters, which are there from the beginning.

    first_again:
        whether no bucket before it is gathered again for the backward pass
    """
    values, steps = node.args
    name = _identifier(node.name)
    with target.inserting_after(before) if before else contextlib.nullcontext():
        xs = map_values(values, lambda v: made[v.name])
        begun = target.call_function(begin, (xs, steps), dict(node.kwargs))
        begun.name = _unique(target, begun, f"{name}_begun")
    again = node.attrs.get(REGATHER)
    call = (
        target.call_function(finish_again, (begun, again, first_again))
        if again
        else target.call_function(finish, (begun,))
    )
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
    # Of the operator itself: what runs in its place has none.
    returns = overload(op)._schema.returns
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
