"""Batch norm whose operands and gradients lie in memory row by row.

On CPUs PyTorch's own backward (torch 2.13) gives wrong gradients, without an error, for a single
image whose memory is in another order, or whose gradient's is; instance norm runs it on one image
whatever the batch. A piece of a batch often is a single image where the batch was none, so what is
right on one device would be wrong on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.runtime.operators import stands_for


class _RowMajorGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return row_major(grad)


def row_major(x: Tensor) -> Tensor:
    """The tensor with the strides of its shape, those of dimensions of size 1 included."""
    return x.reshape(-1).view(x.shape)


def with_row_major_gradient(x: Tensor) -> Tensor:
    """The tensor; what comes before it gets its gradient row by row."""
    return _RowMajorGradient.apply(x) if x.requires_grad else x


def _row_by_row(norm: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A batch norm of PyTorch; of a single image in the order that its backward reads rightly."""
    if x.shape[0] != 1:
        return norm(x, *args, **kwargs)
    found = norm(row_major(x), *args, **kwargs)
    return pytree.tree_map_only(Tensor, with_row_major_gradient, found)


@stands_for("aten.batch_norm.default")
def batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`aten.batch_norm`."""
    return _row_by_row(torch.batch_norm, x, *args, **kwargs)


@stands_for("aten._native_batch_norm_legit_no_training.default")
def batch_norm_fixed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`aten._native_batch_norm_legit_no_training`."""
    run = torch.ops.aten._native_batch_norm_legit_no_training.default
    return _row_by_row(run, x, *args, **kwargs)


@stands_for("aten.instance_norm.default")
def instance_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`aten.instance_norm`."""
    return with_row_major_gradient(torch.instance_norm(row_major(x), *args, **kwargs))


def checked_batch_norm(x: Tensor, *args: Any) -> Any:
    """`F.batch_norm`, which refuses a batch without statistics."""
    return _row_by_row(F.batch_norm, x, *args)
