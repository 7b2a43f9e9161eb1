"""Calls that stay whole: Python of the user's own, kept in a graph as one operator.

The tracer makes such an operator of what it cannot take apart: a custom autograd function, a
module that looks at the values of its tensors, a stretch of code whose shapes depend on data.
Each is registered with torch under the namespace ``autopar_whole``, so that a node names it as it
names any operator::

    %y = autopar_whole.Straight_5d2b90.default([%x])

Its name comes from what it does, so it is the same in every process that traces the model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.ir.errors import InputError

NAMESPACE = "autopar_whole"

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class TensorType:
    """The form of one result."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @staticmethod
    def of(x: Tensor) -> TensorType:
        return TensorType(tuple(x.shape), x.dtype, x.requires_grad)


@dataclass(frozen=True)
class Whole:
    """What one operator runs.

    run:
        from the operands to a tensor or a sequence of them
    results:
        the results' forms. The operator returns a single one by itself, several as a tuple
    needs_data:
        whether `run` looks at the values of its operands, so that it cannot run without data
    random:
        whether it draws random numbers from torch's default generator
    flops:
        floating point operations of a forward call, where they were counted
    what:
        for messages, such as "the module 'encoder.mlp' (Experts)"
    """

    run: Callable[..., Any]
    results: tuple[TensorType, ...]
    needs_data: bool = False
    random: bool = False
    flops: int = 0
    what: str = ""

    def __call__(self, operands: Sequence[Tensor]) -> Any:
        if self.needs_data and any(_has_no_data(x) for x in operands):
            listed = _StandIn.apply(self.results, *operands)
            return listed[0] if len(listed) == 1 else listed
        made = self.run(*operands)
        listed = (made,) if isinstance(made, Tensor) else tuple(made)
        for x, expected in zip(listed, self.results, strict=True):
            if self.needs_data and tuple(x.shape) != expected.shape:
                raise InputError(
                    f"{self.what}: gave a tensor of shape {tuple(x.shape)}, it was compiled for "
                    f"{expected.shape}. Its shape depends on the values of its inputs; pad it to "
                    f"a fixed one"
                )
        return listed[0] if len(listed) == 1 else listed


#: Operator name (without namespace) -> what it runs, and what tells it from its namesakes.
_KNOWN: dict[str, Whole] = {}
_IDENTITIES: dict[str, Any] = {}


def operator_for(name: str, key: str, identity: Any, whole: Whole) -> Any:
    """The operator that runs `whole` on a list of tensors, registered when it is first met.

    name, key:
        what it is called, and the text that tells it from others of that name
    identity:
        an object compared with `is` where name and key are equal, as they are for two classes
        made by one factory
    """
    returns = f"({', '.join(['Tensor'] * len(whole.results))})"
    clean = re.sub(r"\W", "_", name).strip("_") or "call"
    digest = hashlib.sha256(key.encode()).hexdigest()[:6]
    base = chosen = f"{clean}_{digest}"
    count = 1
    while chosen in _KNOWN and _IDENTITIES[chosen] is not identity:
        count += 1
        chosen = f"{base}_{count}"
    if chosen not in _KNOWN:
        _KNOWN[chosen] = whole
        _IDENTITIES[chosen] = identity
        # Torch takes no more than 64 arguments, and a module may have more weights.
        _LIBRARY.define(f"{chosen}(Tensor[] operands) -> {returns}")
        for dispatch in ("Autograd", "CompositeExplicitAutograd"):
            _LIBRARY.impl(chosen, whole, dispatch)
    return getattr(getattr(torch.ops, NAMESPACE), chosen).default


def whole_of(op: str) -> Whole | None:
    """What an IR operator name runs; None where it is not a call that stays whole."""
    namespace, _, rest = op.partition(".")
    return _KNOWN.get(rest.rpartition(".")[0]) if namespace == NAMESPACE else None


def _has_no_data(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) or x.device.type == "meta"


class _StandIn(torch.autograd.Function):
    """Results and gradients of the right form, for seeing what a call keeps."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[TensorType], *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        made = tuple(operands[0].new_empty(r.shape, dtype=r.dtype) for r in results)
        ctx.mark_non_differentiable(*(m for m, r in zip(made, results, strict=True) if not r.grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        return (
            None,
            *(
                torch.empty_like(x) if want else None
                for x, want in zip(ctx.saved_tensors, wanted, strict=True)
            ),
        )
