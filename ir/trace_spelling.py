"""One spelling per operation: what an exported call says in many ways, the IR says in one.

`canonical` sees one call with its operands and results and gives the call the IR keeps, or
`IDENTITY` where the result is its first operand. Sizes come out as the true, whole sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import Value

Call = tuple[str, tuple[Any, ...], dict[str, Any]]

#: The result of `canonical` for a call that only hands its first operand on.
IDENTITY = None

#: Same elements in the same order, another shape. Strides are not part of the IR: a piece of a
#: tensor has other strides than the whole, so the stride-bound `view` is never kept.
_RESHAPES = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.ravel.default",
}
#: Copies and changes of strides, which are nothing in a graph without writes.
_COPIES = {
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
}
_DROPOUTS = {
    "aten.dropout.default",
    "aten.feature_dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_alpha_dropout.default",
}
_CATS = {"aten.cat.default", "aten.concat.default", "aten.concatenate.default"}
_EXPANDS = {"aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default"}
_SQUEEZES = {"aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"}
_FACTORIES = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
    "aten.new_empty.default": "aten.empty.memory_format",
}
_RENAMED = {
    # A view that only a flag tells from its tensor, which collectives would not see.
    "aten._conj.default": "aten._conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor",
    "aten.__and__.Scalar": "aten.bitwise_and.Scalar",
    "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__or__.Scalar": "aten.bitwise_or.Scalar",
    "aten.__xor__.Tensor": "aten.bitwise_xor.Tensor",
    "aten.__xor__.Scalar": "aten.bitwise_xor.Scalar",
}
#: Arguments that say how memory is laid out, never what a tensor holds.
_MEMORY_ARGUMENTS = ("pin_memory", "layout", "memory_format", "non_blocking")


@dataclass(frozen=True)
class Target:
    """The first result of a call, and the devices on both sides of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    operand_device: torch.device | None = None


def canonical(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target
) -> Call | None:
    """The IR's spelling of one call on `Value`s, or `IDENTITY`."""
    op = _RENAMED.get(op, op)
    args = tuple(args)
    kwargs = {k: v for k, v in kwargs.items() if v is not None and k not in _MEMORY_ARGUMENTS}
    if op in _CATS and len(target.shape) != 1:
        # An empty tensor of one dimension goes with any others, a left-over of old PyTorch.
        args = ([v for v in args[0] if v.shape != (0,)], *args[1:])
    first = args[0] if args and isinstance(args[0], Value) else None
    if op in _FACTORIES:
        options = {"dtype": target.dtype, "device": target.device}
        return _FACTORIES[op], (list(target.shape), *args[2:]), options
    if first is None:
        return op, args, kwargs
    same_shape = first.shape == target.shape
    same_tensor = same_shape and first.dtype == target.dtype
    if op in _RESHAPES or op in _EXPANDS or op in _SQUEEZES:
        if same_shape:
            return IDENTITY
        if op in _SQUEEZES:
            return op, args, kwargs
        kept = "aten.reshape.default" if op in _RESHAPES else "aten.expand.default"
        return kept, (first, list(target.shape)), {}
    if op in _COPIES or (op == "aten.detach.default" and not first.grad):
        return IDENTITY
    if op.startswith(("aten.to.", "aten._to_copy.", "aten.type_as.")):
        return _convert(op, args, kwargs, first, target)
    if op in _DROPOUTS:
        p, train = args[1], args[2]
        return (op, args, kwargs) if train and p else IDENTITY
    if op in ("aten.slice.Tensor", "aten.narrow.default"):
        return _slice(op, args, kwargs, first)
    if op == "aten.select.int":
        dim = _positive(args[1], len(first.shape))
        return op, (first, dim, _positive(args[2], first.shape[dim])), {}
    if op in ("aten.add.Tensor", "aten.sub.Tensor") and same_tensor and _adds_nothing(args, first):
        return IDENTITY
    return op, args, kwargs


def _convert(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Value, target: Target
) -> Call | None:
    if target.operand_device != target.device:
        return "aten.to.device", (first, target.device, target.dtype), {}
    if first.dtype == target.dtype:
        return IDENTITY
    return "aten.to.dtype", (first, target.dtype), {}


def _slice(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Value) -> Call | None:
    """`slice` with all four arguments, inside the true size."""
    given = dict(zip(("dim", "start", "end", "step"), args[1:], strict=False)) | kwargs
    dim = _positive(given.get("dim") or 0, len(first.shape))
    size = first.shape[dim]
    start = _clamp(given.get("start") or 0, size)
    if op == "aten.narrow.default":
        end, step = start + args[3], 1
    else:
        end = given.get("end")
        end = size if end is None else max(start, _clamp(end, size))
        step = given.get("step", 1)
    if (start, end, step) == (0, size, 1):
        return IDENTITY
    return "aten.slice.Tensor", (first, dim, start, end, step), {}


def _positive(index: int, size: int) -> int:
    return index + size if index < 0 else index


def _clamp(index: int, size: int) -> int:
    return min(max(_positive(index, size), 0), size)


def _adds_nothing(args: tuple[Any, ...], first: Value) -> bool:
    """`x + 0` on integers (on floats it turns -0.0 into 0.0)."""
    other = args[1]
    integral = not (first.dtype.is_floating_point or first.dtype.is_complex)
    return integral and type(other) is int and other == 0
