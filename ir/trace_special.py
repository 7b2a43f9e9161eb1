"""Calls that become other calls than one of the same name.

Each function takes the walk over the exported graph (`trace_convert.Converter`), a call's
arguments (refs and constants) and its node, and gives the call's results; None where the call is
like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.ir.errors import TraceError
from autopar.ir.graph import Origin, Value
from autopar.ir.trace_alias import Ref, ViewStep, write
from autopar.ir.trace_origin import origin_of
from autopar.ir.trace_regions import Region, operator_of
from autopar.ir.trace_strided import OPERATOR, strided


@dataclass(frozen=True)
class Mode:
    """The mode a node runs in. `autocast` is (device type, dtype), or None where it is off."""

    grad: bool = True
    autocast: tuple[str, torch.dtype] | None = None
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True)
class Unfit:
    """What a call gave that the IR cannot hold; an error only where something uses it."""

    reason: str


class Walk(Protocol):
    """What a special call needs of the walk."""

    mode: Mode

    def read(self, item: Any) -> Any: ...

    def values(self, tree: Any) -> Any: ...

    def where(self) -> str: ...

    def check_writable(self, ref: Ref) -> None: ...

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        grads: Sequence[bool] | None = None,
    ) -> tuple[Value, ...]: ...

    def emit_one(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Value: ...


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake results of a call."""
    made = node.meta["val"]
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _batch_norm(walk: Walk, args: Any, kwargs: Any, node: fx.Node) -> Ref | None:
    """Training batch norm, which writes its running statistics behind the schema's back."""
    x, weight, bias, mean, var, training, momentum, eps = args[:8]
    if not training:
        return None
    fake = results_of(node)[0]
    stats = [walk.read(r) for r in (mean, var)]
    channels = (tuple(fake.shape[1:2]),) * 2
    if mean is None:
        factories = ("aten.zeros.default", "aten.ones.default")
        dtype = fake.dtype if fake.dtype.itemsize >= 4 else torch.float32
        options = {"dtype": dtype, "device": fake.device}
        stats = [
            walk.emit_one(f, (list(s),), options, s, dtype)
            for f, s in zip(factories, channels, strict=True)
        ]
    operands = walk.values((x, weight, bias))
    y, new_mean, new_var = walk.emit(
        "autopar.batch_norm_train",
        (*operands, *stats, momentum, eps),
        {},
        [tuple(fake.shape), *channels],
        [fake.dtype, stats[0].dtype, stats[1].dtype],
        [walk.mode.grad and any(o is not None and o.grad for o in operands), False, False],
    )
    if mean is not None:
        write(mean, new_mean, walk.emit_one)
        write(var, new_var, walk.emit_one)
    return Ref.root(y)


def _instance_norm(walk: Walk, args: Any, kwargs: Any, node: fx.Node) -> None:
    if args[3] is not None and args[5]:
        raise TraceError(
            f"{walk.where()}: instance_norm that tracks running statistics is not supported "
            f"in training. Build the module with track_running_stats=False"
        )


def _view(walk: Walk, ref: Ref, op: str, arguments: tuple[Any, ...], shape: Sequence[int]) -> Ref:
    """A view of a ref by one call."""
    value = walk.read(ref)
    step = ViewStep(op, arguments, {}, tuple(shape), value.dtype, not walk.mode.grad)
    return ref.view(step, walk.emit_one(op, (value, *arguments), {}, step.shape, step.dtype))


def _as_strided(walk: Walk, args: Any, kwargs: Any, node: fx.Node) -> Ref:
    given = dict(zip(("self", "size", "stride", "storage_offset"), args, strict=False)) | kwargs
    ref: Ref = given["self"]
    fake = node.all_input_nodes[0].meta["val"]
    read = strided(fake, given["size"], given["stride"], given.get("storage_offset"))
    if read.order != tuple(range(len(read.order))):
        shape = [fake.shape[d] for d in read.order]
        ref = _view(walk, ref, "aten.permute.default", (list(read.order),), shape)
    arguments = (list(read.size), list(read.stride), read.offset)
    return _view(walk, ref, OPERATOR, arguments, read.size)


def _broadcast(walk: Walk, args: Any, kwargs: Any, node: fx.Node) -> list[Ref]:
    """`broadcast_tensors` is an expansion of each of its operands."""
    return [
        _expanded(walk, ref, fake.shape)
        for ref, fake in zip(args[0], results_of(node), strict=True)
    ]


def _meshgrid(walk: Walk, args: Any, kwargs: Any, node: fx.Node) -> list[Ref]:
    """`meshgrid` puts each operand along a dimension of its own and expands it."""
    indexing = args[1] if len(args) > 1 else kwargs.get("indexing")
    swapped = indexing == "xy" and len(args[0]) > 1
    found = []
    for k, (ref, fake) in enumerate(zip(args[0], results_of(node), strict=True)):
        place = 1 - k if swapped and k < 2 else k
        shape = [1] * len(fake.shape)
        shape[place] = fake.shape[place]
        if tuple(walk.read(ref).shape) != tuple(shape):
            ref = _view(walk, ref, "aten.reshape.default", (shape,), shape)
        found.append(_expanded(walk, ref, fake.shape))
    return found


def _expanded(walk: Walk, ref: Ref, shape: Sequence[int]) -> Ref:
    if walk.read(ref).shape == tuple(shape):
        return ref
    return _view(walk, ref, "aten.expand.default", (list(shape),), shape)


def _recurrent(walk: Walk, args: Any, kwargs: Any, node: fx.Node) -> list[Ref] | None:
    """Layers with dropout between them become one call each, and calls of dropout."""
    x, states, weights, biased, layers, dropout, train, twice, batch_first = args
    if not (train and dropout and layers > 1):
        return None
    name = str(node.target)
    given = states if isinstance(states, (list, tuple)) else [states]
    y, held = walk.read(x), [walk.read(s) for s in given]
    # PyTorch runs over time first, and draws the masks in that order.
    if batch_first:
        y = _transposed(walk, y)
    per_layer, ways = len(weights) // layers, 2 if twice else 1
    ends: list[list[Value]] = [[] for _ in held]
    width = results_of(node)[0].shape[-1]
    for layer in range(layers):
        first, last = layer * ways, (layer + 1) * ways
        start = [
            walk.emit_one(
                "aten.slice.Tensor", (s, 0, first, last, 1), {}, (ways, *s.shape[1:]), s.dtype
            )
            for s in held
        ]
        own = walk.values(list(weights[layer * per_layer : (layer + 1) * per_layer]))
        state = start if isinstance(states, (list, tuple)) else start[0]
        y, *made = walk.emit(
            name,
            (y, state, own, biased, 1, 0.0, train, twice, False),
            {},
            [(*y.shape[:-1], width), *(s.shape for s in start)],
            [y.dtype] * (1 + len(start)),
        )
        for end, value in zip(ends, made, strict=True):
            end.append(value)
        if layer < layers - 1:
            y = walk.emit_one("aten.dropout.default", (y, dropout, True), {}, y.shape, y.dtype)
    if batch_first:
        y = _transposed(walk, y)
    joined = [
        walk.emit_one("aten.cat.default", (end, 0), {}, s.shape, s.dtype)
        for end, s in zip(ends, held, strict=True)
    ]
    return [Ref.root(y), *(Ref.root(value) for value in joined)]


def _transposed(walk: Walk, x: Value) -> Value:
    shape = (x.shape[1], x.shape[0], *x.shape[2:])
    return walk.emit_one("aten.transpose.int", (x, 0, 1), {}, shape, x.dtype)


#: Operator -> what makes its calls.
SPECIAL: dict[str, Callable[[Walk, Any, Any, fx.Node], Any]] = {
    "aten.as_strided.default": _as_strided,
    "aten.batch_norm.default": _batch_norm,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.instance_norm.default": _instance_norm,
    "aten.meshgrid.default": _meshgrid,
    "aten.meshgrid.indexing": _meshgrid,
    **dict.fromkeys(
        ("aten.gru.input", "aten.lstm.input", "aten.rnn_relu.input", "aten.rnn_tanh.input"),
        _recurrent,
    ),
}


def region_of_data(
    walk: Walk, module: fx.GraphModule, region: Region, env: dict[fx.Node, Any]
) -> None:
    """A stretch of the graph whose shapes depend on data, as one call."""
    for node in region.nodes:
        env[node] = Unfit(
            f"{origin_of(node.meta)}: {node.target} depends on the values of tensors, and so "
            f"does what the model returns. Return a tensor of a fixed shape"
        )
    leaves = {node: pytree.tree_leaves(env[node], is_leaf=_is_ref) for node in region.inputs}
    constants = {
        node: env[node]
        for node, found in leaves.items()
        if not any(isinstance(leaf, (Ref, Unfit)) for leaf in found)
    }
    refs = [leaf for node in region.inputs if node not in constants for leaf in leaves[node]]
    for node in region.written:
        walk.check_writable(env[node])
    kept = (*region.outputs, *region.written)
    fakes = [leaf for node in kept for leaf in pytree.tree_leaves(node.meta["val"])]
    if not fakes:
        return
    results = walk.emit(
        str(operator_of(module, region, constants)),
        ([walk.read(ref) for ref in refs],),
        {},
        [tuple(f.shape) for f in fakes],
        [f.dtype for f in fakes],
    )
    made: Iterator[Value] = iter(results)
    for node in region.outputs:
        env[node] = pytree.tree_map(lambda _: Ref.root(next(made)), node.meta["val"])
    for node in region.written:
        write(env[node], next(made), walk.emit_one)


def _is_ref(item: Any) -> bool:
    return isinstance(item, (Ref, Unfit))
