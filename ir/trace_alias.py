"""Aliases and writes: how in-place operators become functional.

Every tensor of the exported program is a `Ref`: either the root of a storage, or a view, by one
`ViewStep`, of another ref. A write to a root replaces the storage's value. A write to a view
scatters the new piece into its parent, and so on up to the root::

    %s  = select(%h, 1, 0)              %s1 = full_like(%s, 0)
    fill_(%s, 0)                 ==>    %h1 = select_scatter(%h, %s1, 1, 0)
    mul(%h, 2)                          mul(%h1, 2)

Reading a ref whose storage was written since makes its view again from the new value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.errors import AutoparError
from autopar.ir.graph import Value
from autopar.ir.trace_grad import has_overload

#: `emit(op, args, kwargs, shape, dtype)` adds a call with one result.
Emit = Callable[[str, tuple[Any, ...], dict[str, Any], tuple[int, ...], torch.dtype], Value]


class NotFunctionalError(AutoparError):
    """A write that has no functional form here; the message names what writes."""


@dataclass
class Storage:
    """The memory behind some refs. `kind` and `target` are those of its source node, if any."""

    value: Value
    kind: str = ""
    target: str = ""
    version: int = 0


@dataclass(frozen=True)
class ViewStep:
    """One view call: `op(parent, *args, **kwargs)` of the given shape and dtype.

    detached: it was made under no_grad, so that no gradient flows through it
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    detached: bool = False


@dataclass
class Ref:
    """One tensor of the exported program; `value` is right as long as `version` is current."""

    storage: Storage
    value: Value
    parent: Ref | None = None
    step: ViewStep | None = None
    version: int = field(default=0)

    @staticmethod
    def root(value: Value, kind: str = "", target: str = "") -> Ref:
        return Ref(Storage(value, kind, target), value)

    def lineage(self) -> Iterator[Ref]:
        """The ref and everything it is a view of."""
        ref: Ref | None = self
        while ref is not None:
            yield ref
            ref = ref.parent

    def view(self, step: ViewStep, value: Value) -> Ref:
        return Ref(self.storage, value, self, step, self.storage.version)


def read(ref: Ref, emit: Emit) -> Value:
    """The current value of a ref."""
    if ref.version != ref.storage.version:
        if ref.parent is None or ref.step is None:
            ref.value = ref.storage.value
        else:
            step = ref.step
            args = (read(ref.parent, emit), *step.args)
            ref.value = emit(step.op, args, step.kwargs, step.shape, step.dtype)
            if step.detached and ref.value.grad:
                ref.value = emit("aten.detach.default", (ref.value,), {}, step.shape, step.dtype)
        ref.version = ref.storage.version
    return ref.value


def write(ref: Ref, value: Value, emit: Emit) -> None:
    """Make `value` (of the ref's own shape and dtype) what the ref and its aliases hold.

    Raises NotFunctionalError where a view cannot be written back into its parent.
    """
    if ref.parent is None or ref.step is None:
        ref.storage.value = value
        ref.storage.version += 1
    else:
        parent = read(ref.parent, emit)
        write(ref.parent, _write_back(ref.step, parent, value, emit), emit)
    ref.value, ref.version = value, ref.storage.version


def _write_back(step: ViewStep, parent: Value, piece: Value, emit: Emit) -> Value:
    """`parent` with the part that `step` views replaced by `piece`."""

    def made(op: str, *args: Any) -> Value:
        return emit(op, args, {}, parent.shape, parent.dtype)

    if step.dtype != parent.dtype:
        raise NotFunctionalError(f"a view by {step.op}")
    match step.op:
        case "aten.select.int":
            return made("aten.select_scatter.default", parent, piece, *step.args)
        case "aten.slice.Tensor":
            return made("aten.slice_scatter.default", parent, piece, *step.args)
        case "aten.diagonal.default":
            return made("aten.diagonal_scatter.default", parent, piece, *step.args)
        # With a gradient it is refused: that of as_strided_scatter is wrong in PyTorch 2.13 (the
        # operand's is zero outside the piece).
        case "autopar.as_strided" if not (parent.grad or piece.grad):
            return made("autopar.as_strided_scatter", parent, piece, *step.args)
        case "aten.transpose.int":
            return made("aten.transpose.int", piece, *step.args)
        case "aten.t.default" | "aten.numpy_T.default" if len(parent.shape) <= 2:
            return made(step.op, piece)
        case "aten.permute.default":
            order = [d % len(parent.shape) for d in step.args[0]]
            inverse = sorted(range(len(order)), key=order.__getitem__)
            return made("aten.permute.default", piece, inverse)
        case "aten.detach.default" if not parent.grad:
            return piece
        case (
            "aten.reshape.default"
            | "aten.squeeze.default"
            | "aten.squeeze.dim"
            | "aten.squeeze.dims"
            | "aten.unsqueeze.default"
            | "aten.expand.default"
        ) if parent.numel == piece.numel:
            return made("aten.reshape.default", piece, list(parent.shape))
    spoken = "aten.as_strided.default" if step.op == "autopar.as_strided" else step.op
    raise NotFunctionalError(f"a view by {spoken}")


def pieces_of(op: str, args: tuple[Any, ...], kwargs: Any, results: list[Value]) -> list[ViewStep]:
    """The single views that a call with several results (split, chunk, unbind) is made of."""
    operand: Value = args[0]
    name = op.split(".")[1]
    position = 1 if name == "unbind" else 2
    dim = args[position] if len(args) > position else kwargs.get("dim", 0)
    dim = dim % len(operand.shape)
    if name == "unbind":
        return [
            ViewStep("aten.select.int", (dim, i), {}, r.shape, r.dtype)
            for i, r in enumerate(results)
        ]
    if name not in ("split", "split_with_sizes", "chunk", "tensor_split"):
        raise NotFunctionalError(f"{op}, whose results share memory,")
    steps, start = [], 0
    for r in results:
        end = start + r.shape[dim]
        steps.append(ViewStep("aten.slice.Tensor", (dim, start, end, 1), {}, r.shape, r.dtype))
        start = end
    return steps


#: In-place operators whose functional form is not the same name without the underscore.
_FUNCTIONAL = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor",
}


def written_argument(target: Any) -> str:
    """Where an operator overload writes: "self" (its first argument) or "out".

    Raises NotFunctionalError where it writes elsewhere, or to several tensors.
    """
    arguments = target._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if len(written) == 1:
        if written[0] is arguments[0] or written[0].name == arguments[0].name:
            return "self"
        if written[0].name == "out":
            return "out"
    raise NotFunctionalError(f"the operator {target}")


def functional_name(target: Any) -> str:
    """The functional operator that computes what an in-place or `out=` overload writes.

    Raises NotFunctionalError where there is none.
    """
    op = str(target)
    namespace, name, kind = op.rsplit(".", 2)
    if written_argument(target) == "out":
        plain = _without_out(target)
    elif name.startswith("__i") and name.endswith("__"):
        plain = f"{namespace}.__{name[3:-2]}__.{kind}"
    else:
        plain = f"{namespace}.{name.removesuffix('_')}.{kind}"
    plain = _FUNCTIONAL.get(op, plain)
    if plain == op or not has_overload(plain):
        raise NotFunctionalError(f"the operator {op}")
    return plain


def _without_out(target: Any) -> str:
    """The overload with the same arguments but `out`; `target` itself where there is none."""
    packet = target.overloadpacket

    def form(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if a.name != "out"]

    for kind in packet.overloads():
        other = getattr(packet, kind)
        if not other._schema.is_mutable and form(other) == form(target):
            return str(other)
    return str(target)
