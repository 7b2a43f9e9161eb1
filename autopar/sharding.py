"""`shard()`: how a user says what the plan must contain."""

from __future__ import annotations

import functools
import itertools
import json
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.ir.errors import HintError
from autopar.passes.hints import Hint

#: Where `shard(module, …)` keeps its hint on the module.
ATTRIBUTE = "_autopar_hint"

_calls = itertools.count()


@torch.library.custom_op("autopar::mark", mutates_args=())
def _mark(x: Tensor, spec: str) -> Tensor:
    """What a hint inside `forward` leaves in a traced graph; never runs."""
    return x.clone()


@_mark.register_fake
def _(x: Tensor, spec: str) -> Tensor:
    return torch.empty_like(x)


_mark.register_autograd(lambda ctx, grad: (grad, None))


def shard(
    target: Any,
    in_strategy: Any = None,
    out_strategy: Any = None,
) -> Any:
    """Fix how an operator or a tensor is split.

    target:
        - a module: its own operator gets the strategy; returns the module
        - a function that is one operator (``torch.matmul``): returns a function to call in its
          place inside ``forward``
        - a tensor inside ``forward``: a constraint on its layout; returns the tensor
    in_strategy:
        one tuple per tensor input, one entry per dimension: MindSpore's split counts
        ``((2, 4), (4, 1))``, or mesh axis names ``(("dp", None, "tp"), ("tp", None))``, where
        several axes on one dimension are a tuple. Inputs stand in the order of the function's
        arguments; of a module activations come first, then weight and bias (an embedding: the
        table, then the ids). Trailing inputs may be left out, others be None; a dense layer's
        activation may have two entries, all leading dimensions as one. A parameter that is split
        along a summed dimension which the activation keeps whole is stored so and gathered for
        use. For a tensor: its one tuple, which may stand alone.
    out_strategy:
        the same for the result; its tuple may stand alone

    Outside a compiled module nothing changes: the module, function or tensor behaves as ever.
    The hints are checked when the model is compiled; a wrong one raises `HintError` there.

    Raises HintError for a target of another kind or a strategy that is no tuple.
    """
    if isinstance(target, nn.Module):
        return _shard_module(target, in_strategy, out_strategy)
    if isinstance(target, Tensor):
        return _shard_tensor(target, in_strategy, out_strategy)
    if callable(target):
        return _shard_function(target, in_strategy, out_strategy)
    raise HintError(
        f"shard(): expected a module, a function or a tensor, got {type(target).__name__}"
    )


def make_hint(where: str, in_strategy: Any, out_strategy: Any) -> Hint:
    """A hint from what a user wrote.

    Raises HintError unless the strategies are tuples of counts, axis names, None and such tuples.
    """
    if in_strategy is None and out_strategy is None:
        raise HintError(f"{where}: give in_strategy, out_strategy or both")
    given = {"in_strategy": in_strategy, "out_strategy": out_strategy}
    for name, strategy in given.items():
        if strategy is not None and not isinstance(strategy, (tuple, list)):
            raise HintError(
                f"{where}: {name} must be a tuple with one tuple per tensor, got {strategy!r}"
            )
    inputs, outputs = (_plain(strategy, f"{where}: {name}") for name, strategy in given.items())
    return Hint(where, inputs, outputs)


def _plain(item: Any, what: str) -> Any:
    """A strategy as nested tuples of plain counts and names."""
    if isinstance(item, (tuple, list)):
        return tuple(_plain(part, what) for part in item)
    if item is None or isinstance(item, str):
        return item
    if isinstance(item, numbers.Integral) and not isinstance(item, bool):
        return int(item)
    raise HintError(f"{what}: expected counts, axis names, None or tuples of them, got {item!r}")


def _shard_module(module: nn.Module, in_strategy: Any, out_strategy: Any) -> nn.Module:
    name = f"shard({type(module).__name__})"
    object.__setattr__(module, ATTRIBUTE, make_hint(name, in_strategy, out_strategy))
    return module


def module_hints(model: nn.Module) -> dict[str, Hint]:
    """Module path -> the hint that `shard(module, …)` left there."""
    found = {}
    for path, module in model.named_modules():
        hint = getattr(module, ATTRIBUTE, None)
        if hint is not None:
            found[path] = Hint(f"shard({path or 'the model'})", hint.inputs, hint.outputs)
    return found


def _shard_tensor(tensor: Tensor, in_strategy: Any, out_strategy: Any) -> Tensor:
    if in_strategy is None or out_strategy is not None:
        raise HintError("shard(tensor): give its layout as the one strategy, a tuple")
    layout = make_hint("shard(tensor)", None, in_strategy).outputs
    if layout and len(layout) == 1 != tensor.dim() and isinstance(layout[0], tuple):
        (layout,) = layout
    if not torch.compiler.is_exporting():
        return tensor
    return _mark(tensor, json.dumps({"kind": "layout", "outputs": layout}))


def _shard_function(
    function: Callable[..., Any], in_strategy: Any, out_strategy: Any
) -> Callable[..., Any]:
    name = getattr(function, "__name__", type(function).__name__)
    hint = make_hint(f"shard({name})", in_strategy, out_strategy)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_exporting():
            return function(*args, **kwargs)
        call = next(_calls)
        positions = itertools.count()

        def mark_argument(x: Tensor) -> Tensor:
            spec = {"kind": "argument", "call": call, "index": next(positions)}
            return _mark(x, json.dumps(spec))

        args, kwargs = pytree.tree_map_only(Tensor, mark_argument, (args, kwargs))
        spec = json.dumps(
            {
                "kind": "operator",
                "call": call,
                "function": name,
                "arguments": next(positions),
                "inputs": hint.inputs,
                "outputs": hint.outputs,
            }
        )
        return pytree.tree_map_only(Tensor, lambda y: _mark(y, spec), function(*args, **kwargs))

    return wrapper
