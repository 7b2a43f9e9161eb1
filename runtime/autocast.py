"""Running one call of a graph as it ran inside an autocast region of the model.

PyTorch's own operators run under `torch.autocast` again, which casts their operands. Operators of
the runtime are several operators each, which autocast would treat one by one, by other rules than
the operator they stand for. So they run with autocast off, and their operands are cast to what the
traced operator computed in, which the dtype of its result tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.ir.graph import Node, Value
from autopar.runtime.operators import NAMESPACE, resolve


def autocast_call(node: Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that runs a node with an autocast region, and what it takes first.

    What follows are the node's own arguments. Operators go by their names, because a function
    cannot stand among the arguments in generated code.
    """
    device_type, dtype = node.attrs["autocast"]
    if node.op.startswith(f"{NAMESPACE}."):
        return with_operands_as, (node.op, device_type, _computed_in(node))
    return under_autocast, (node.op, device_type, dtype)


def under_autocast(op: str, device_type: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of PyTorch's under autocast."""
    with torch.autocast(device_type, dtype):
        return resolve(op)(*args, **kwargs)


def with_operands_as(
    op: str, device_type: str, dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> Any:
    """Run an operator of the runtime without autocast, its floating operands cast to `dtype`."""
    if dtype is not None:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: _cast(t, dtype), (args, kwargs))
    with torch.autocast(device_type, enabled=False):
        return resolve(op)(*args, **kwargs)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Autocast leaves double precision alone.
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(dtype)
    return tensor


def _computed_in(node: Node) -> torch.dtype | None:
    """The dtype that autocast gave the operands of a call; None where it let them be.

    An operator whose result has the dtype of its first floating operand took it as it was (so does
    a batch norm with weights of another dtype).
    """
    operands = [
        value
        for value in pytree.tree_leaves((node.args, dict(node.kwargs)), _is_value)
        if _is_value(value) and value.dtype.is_floating_point
    ]
    result = node.results[0].dtype
    if not operands or not result.is_floating_point or operands[0].dtype == result:
        return None
    return result


def _is_value(item: Any) -> bool:
    return isinstance(item, Value)
