"""This rank's piece of a parameter, and the way of its gradient back.

`DTensor.to_local` does the same for any DTensor in any graph, and takes several times as long: its
backward works out the placements and strides of the gradient, which are the parameter's here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.compiling import is_compiling
from autopar.runtime.owned import held_by_others

#: What takes the local tensor of a parameter: `local_parameter` and `DTensor.to_local`.
_LOCAL = ("_LocalBackward", "_ToTorchTensorBackward")


def local_parameter(parameter: DTensor) -> Tensor:
    """The local tensor of a parameter, which gradients flow through.

    Its gradient is a DTensor laid out as the parameter is.
    """
    if is_compiling():
        return parameter.to_local()
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return parameter._local_tensor
    return _Local.apply(parameter)


def way_to_leaf(node: Any) -> tuple[list[Any], Tensor | None]:
    """The nodes of autograd's graph from one on to a leaf, and the leaf.

    None where that is not the accumulation of a leaf's gradient, or of the local tensor of one.
    """
    way = [node]
    if type(node).__name__ in _LOCAL:
        way.append(node.next_functions[0][0])
    return way, getattr(way[-1], "variable", None)


def is_accumulated(node: Any, leaf: Tensor) -> bool:
    """Whether a gradient that comes to a leaf, by this node, only becomes a part of `.grad`.

    Nobody waits for it then: it has no hooks, and this backward pass does not return it. False
    where the pass leaves it out.
    """
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
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
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter
        local = parameter._local_tensor
        # Another tensor, because autograd writes to it what made it.
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        if grads[0] is None:
            return None
        parameter: DTensor = ctx.parameter
        if torch.is_grad_enabled():  # differentiated again
            return gradient_of(parameter, grads[0])
        # Autograd copies a gradient that others hold before it makes it a `.grad`, which may be
        # written to. It cannot know of what is inside a DTensor.
        shared = held_by_others(grads)
        grad = grads[0].clone(memory_format=torch.contiguous_format) if shared else grads[0]
        made = gradient_of(parameter, grad)
        if parameter.grad is None and is_accumulated(ctx.next_functions[0][0], parameter):
            parameter.grad = made  # which autograd would do in several times as long
            return None
        return made
