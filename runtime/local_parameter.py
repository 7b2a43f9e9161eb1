"""This rank's pieces of parameters, and the way of their gradients back.

`DTensor.to_local` does the same for any DTensor in any graph, and takes several times as long: its
backward works out the placements and strides of the gradient, which are the parameter's here. And
all parameters of a graph share one node of autograd, since a node of its own for each takes longer
than many an operator of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.compiling import is_compiling
from autopar.runtime.owned import held_by_others

#: What takes the local tensors of parameters: `local_parameters` and `DTensor.to_local`.
_LOCAL = ("_LocalBackward", "_ToTorchTensorBackward")


def local_parameters(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The local tensors of parameters, which gradients flow through; plain ones are their own.

    The gradient of a `DTensor` is one laid out as it is. All become `.grad` when the last of them
    exists. With a node each it would not be earlier: autograd comes last to what ran first.
    """
    if is_compiling():
        return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    found = [p._local_tensor if isinstance(p, DTensor) else p for p in parameters]
    if torch.is_grad_enabled():
        trained = [
            k for k, p in enumerate(parameters) if isinstance(p, DTensor) and p.requires_grad
        ]
        if trained:
            pieces = _Local.apply(*(parameters[k] for k in trained))
            for k, piece in zip(trained, pieces, strict=True):
                found[k] = piece
    return found


def way_to_leaf(node: Any, output: int) -> tuple[list[Any], Tensor | None]:
    """The nodes of autograd's graph from an output of one on to a leaf, and the leaf.

    None where that is not the accumulation of a leaf's gradient, or of the local tensor of one.
    """
    way = [node]
    if type(node).__name__ in _LOCAL:
        way.append(node.next_functions[output][0])
    return way, getattr(way[-1], "variable", None)


def is_hooked(leaf: Tensor) -> bool:
    """Whether a hook of a leaf waits for its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def is_accumulated(node: Any, leaf: Tensor) -> bool:
    """Whether a gradient that comes to a leaf, by this node, only becomes a part of `.grad`.

    Nobody waits for it then: it has no hooks, and this backward pass does not return it. False
    where the pass leaves it out.
    """
    if is_hooked(leaf):
        return False
    try:
        return getattr(node, "variable", None) is leaf and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the pass captures this leaf's gradient
        return False


def gradient_of(leaf: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a parameter from that of its local tensor: laid out as the parameter is."""
    if not isinstance(leaf, DTensor):
        return grad if grad.stride() == leaf.stride() else torch.empty_like(leaf).copy_(grad)
    spec = leaf._spec
    if torch.is_grad_enabled():  # differentiated again
        return DTensor.from_local(
            grad, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride
        )
    return DTensor(grad.contiguous(), spec, requires_grad=False)


def collect(leaf: Tensor, grad: Tensor) -> None:
    """Add to a leaf's `.grad` a gradient of its local tensor, which nobody else holds.

    As autograd does where no hook sees it, and without a node of its own for every parameter.
    """
    made = gradient_of(leaf, grad)
    if leaf.grad is None:
        leaf.grad = made
    else:
        leaf.grad.add_(made)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        pieces = [parameter._local_tensor for parameter in parameters]
        # Other tensors, because autograd writes to them what made them.
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parameters: tuple[DTensor, ...] = ctx.parameters
        if torch.is_grad_enabled():  # differentiated again
            return tuple(
                None if grad is None else gradient_of(parameter, grad)
                for parameter, grad in zip(parameters, grads, strict=True)
            )
        # Autograd copies a gradient that others hold before it makes it a `.grad`, which may be
        # written to. It cannot know of what is inside a DTensor.
        shared = held_by_others(grads)
        ends = ctx.next_functions
        made: list[Tensor | None] = [None] * len(grads)
        for k, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if grad is None:
                continue
            mine = grad.clone(memory_format=torch.contiguous_format) if shared[k] else grad
            gradient = gradient_of(parameter, mine)
            if parameter.grad is None and is_accumulated(ends[k][0], parameter):
                parameter.grad = gradient  # which autograd would do in several times as long
            else:
                made[k] = gradient
        return tuple(made)
