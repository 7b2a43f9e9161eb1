"""Autocast regions become casts that stand in the graph.

before::    %w : f32[8, 4] grad  = param "w"
            %y : bf16[6, 8] grad = aten.linear.default(%x, %w) {autocast=("cpu", bf16)}

after::     %x_bf16 : bf16[6, 4] = aten.to.dtype(%x, bf16)
            %w      : f32[8, 4] grad = param "w"
            %w_bf16 : bf16[8, 4] grad = aten.to.dtype(%w, bf16) {reduced_in=f32}
            %y      : bf16[6, 8] grad = aten.linear.default(%x_bf16, %w_bf16)

So the search sees that a tensor moves at half the bytes behind its cast, and what is kept for the
backward pass is counted at its true size. A tensor is cast once for all who read it in one dtype,
as autocast's own cache does with weights.

Which operands autocast casts is not written down here: the operator is run under autocast on fake
tensors, and what it runs is compared with what it runs on operands that are cast beforehand. An
operator for which no such casts are found (it casts something in its middle, or is foreign) keeps
its region, and casts when it runs (`autopar.runtime.autocast`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.ir.keep import RECOMPUTE
from autopar.ir.reduced import CAST, REDUCED_IN
from autopar.ir.text import DTYPE_NAMES
from autopar.passes.signature import signature
from autopar.passes.stand_ins import callable_of

#: Kernels that only move or cast what they are given.
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy", "_unsafe_view", "clone", "contiguous", "copy_", "detach", "empty_like",
        "empty_strided", "lift_fresh", "reshape", "to",
    )
)  # fmt: skip

#: The operators that may be looked into: PyTorch's and ours, not those of others, whose kernels
#: may be anything.
_KNOWN = ("aten.", "autopar.")

#: Per operand the dtype it is cast to, or None.
Casts = tuple[torch.dtype | None, ...]

_found: dict[Hashable, Casts | None] = {}


def explicit_casts(graph: Graph, reduce_dtype: torch.dtype = torch.float32) -> Graph:
    """A traced graph with the casts of its autocast regions as calls.

    reduce_dtype:
        the dtype in which gradients of parameters that are cast are summed over ranks
    """
    if not any("autocast" in node.attrs for node in graph.calls):
        return graph
    made: dict[tuple[str, torch.dtype], Value] = {}
    taken = set(graph.producers)
    nodes: list[Node] = []
    for node in graph.nodes:
        casts = casts_of(node) if "autocast" in node.attrs else None
        if casts is None:
            nodes.append(node)
            continue
        operands = []
        for value, dtype in zip(node.operands, casts, strict=True):
            key = value.name, dtype or value.dtype
            if dtype is not None and key not in made:
                cast = _cast(graph, node, value, dtype, reduce_dtype, taken)
                nodes.append(cast)
                made[key] = cast.results[0]
            operands.append(made.get(key, value) if dtype is not None else value)
        args, kwargs = _with_operands(node, operands)
        attrs = {key: item for key, item in node.attrs.items() if key != "autocast"}
        nodes.append(replace(node, args=args, kwargs=kwargs, attrs=attrs))
    return graph.with_nodes(tuple(nodes))


def _with_operands(node: Node, operands: Iterable[Any]) -> tuple[Any, Any]:
    """The arguments of a call with other things in the places of its operands."""
    given = iter(operands)
    args, kwargs = map_values((node.args, node.kwargs), lambda _: next(given))
    return args, kwargs


def _cast(
    graph: Graph,
    node: Node,
    value: Value,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    taken: set[str],
) -> Node:
    name = f"{value.name}_{DTYPE_NAMES[dtype]}"
    while name in taken:
        name += "_"
    taken.add(name)
    result = replace(value, name=name, dtype=dtype)
    is_parameter = graph.producers[value.name][0].op == "param"
    # A cast inside of a region that runs again is part of it; parameters are cast before it.
    attrs = {key: item for key, item in node.attrs.items() if key == RECOMPUTE}
    if is_parameter and value.grad:
        attrs = {REDUCED_IN: reduce_dtype}
    return Node(CAST, (value, dtype), {}, (result,), origin=node.origin, attrs=attrs)


def casts_of(node: Node) -> Casts | None:
    """What the autocast of a call casts its operands to; None where it is not known."""
    if not node.op.startswith(_KNOWN):
        return None
    key = signature(node)
    if key not in _found:
        _found[key] = _find(node)
    return _found[key]


def _find(node: Node) -> Casts | None:
    try:
        run = callable_of(node.op)
        wanted, observed = _kernels(node, run, node.attrs["autocast"], None)
    except Exception:  # any failure of an operator on fake tensors means only that it is not known
        return None
    for casts in _candidates(node, observed):
        try:
            kernels, _ = _kernels(node, run, None, casts)
        except Exception:  # operands of such dtypes do not go together
            continue
        if kernels == wanted:
            return casts
    return None


def _candidates(node: Node, observed: Casts) -> Iterator[Casts]:
    """Nothing; what was seen to be cast; all to the region's dtype, or up to single precision."""
    yield (None,) * len(observed)
    yield observed
    for dtype in (node.attrs["autocast"][1], torch.float32):
        yield tuple(
            dtype if _castable(v.dtype) and v.dtype != dtype else None for v in node.operands
        )


def _castable(dtype: torch.dtype) -> bool:
    """Autocast leaves double precision alone."""
    return dtype.is_floating_point and dtype != torch.float64


class _Recorder(TorchDispatchMode):
    """Notes what runs: kernels with the types of their tensors, and casts of some tensors."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.kernels: list[Hashable] = []
        self.casts: list[torch.dtype | None] = [None] * len(operands)
        self._operands = operands

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if name == "aten._to_copy":
            for k, operand in enumerate(self._operands):
                if args[0] is operand and self.casts[k] is None and made.dtype != operand.dtype:
                    self.casts[k] = made.dtype
        if name not in _MOVES and not func.is_view and not name.startswith("prim."):
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.kernels.append((name, tuple((tuple(x.shape), x.dtype) for x in tensors)))
        return made


def _kernels(
    node: Node,
    run: Callable[..., Any],
    region: tuple[str, torch.dtype] | None,
    casts: Casts | None,
) -> tuple[list[Hashable], Casts]:
    """What a call runs, ending in the dtypes of its results, and which operands it casts itself.

    region, casts:
        it runs under autocast, or on operands that are cast before
    """
    device = node.attrs["autocast"][0]
    dtypes = [v.dtype for v in node.operands]
    if casts is not None:
        dtypes = [cast or dtype for cast, dtype in zip(casts, dtypes, strict=True)]
    with FakeTensorMode(), torch.no_grad():
        fakes = [
            torch.empty(v.shape, dtype=dtype, device=device)
            for v, dtype in zip(node.operands, dtypes, strict=True)
        ]
        args, kwargs = _with_operands(node, fakes)
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda _: torch.device(device), (args, kwargs)
        )
        # Whatever is on around the caller: only the region of the call counts.
        kind, dtype = region or (device, None)
        recorder = _Recorder(fakes)
        with torch.autocast(kind, dtype, enabled=region is not None), recorder:
            made = run(*args, **kwargs)
    results = [x.dtype for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
    if results != [v.dtype for v in node.results]:
        raise TypeError(f"{node.op}: it made {results}")
    return recorder.kernels, tuple(recorder.casts)
