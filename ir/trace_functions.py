"""Custom autograd functions: each becomes one operator that runs the function itself.

Export would inline a function's forward and lose its backward. While a model is traced, the
`apply` of every custom function is caught instead, and a call that a gradient flows through goes
to an operator of its own (see `whole`)::

    Straight.apply(x, 8.0)     ==>     autopar_whole.Straight_5d2b90.default([x])

The operator calls the function's own `apply`, so its backward (and its double backward) is the
user's.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.ir.calling import CONSTANT_TYPES
from autopar.ir.errors import TraceError
from autopar.ir.trace_random import RandomNoted
from autopar.ir.whole import TensorType, Whole, operator_for

#: Where functions are that stand for operators' own backwards, which are not lost.
_INTERNAL = ("torch._library.", "torch._higher_order_ops.", "torch._functorch.", "autopar.ir.whole")

# Every function shares this one `apply`, also where it was bound to its class long ago.
_APPLY: FunctionType = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
#: `apply` as PyTorch wrote it, whatever `functions_kept` does to the shared one.
_plain_apply = FunctionType(
    _APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, _APPLY.__defaults__, _APPLY.__closure__
)

#: Whether this thread traces, and how many threads do.
_tracing = threading.local()
_watchers: list[None] = []
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Hole:
    """The place of a tensor among a function's arguments."""

    index: int


@dataclass(frozen=True)
class _Recipe:
    """A function and its arguments, with a `_Hole` for each tensor."""

    function: type[torch.autograd.Function]
    arguments: tuple[Any, ...]

    def __call__(self, *tensors: Tensor) -> Any:
        filled = [tensors[a.index] if isinstance(a, _Hole) else a for a in self.arguments]
        return _plain_apply(self.function, *filled)


@contextlib.contextmanager
def functions_kept() -> Iterator[None]:
    """Turn differentiable calls of custom functions into operators, in this thread.

    A call that cannot be kept raises TraceError from `apply`.
    """
    outer = getattr(_tracing, "on", False)
    _tracing.on = True
    with _LOCK:
        _watchers.append(None)
        _APPLY.__code__ = _WATCHED
    try:
        yield
    finally:
        _tracing.on = outer
        with _LOCK:
            _watchers.pop()
            if not _watchers:
                _APPLY.__code__ = _plain_apply.__code__


def _watched_code() -> CodeType:
    """Code that can stand for `apply`'s: like it, it has the one free variable `__class__`."""

    def inside(__class__: Any) -> Callable[..., Any]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            _ = __class__
            from autopar.ir.trace_functions import intercept

            return intercept(cls, args, kwargs)

        return apply

    return inside(None).__code__


_WATCHED = _watched_code()


def intercept(
    function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What `function.apply` does while a model is traced."""
    flows = torch.is_grad_enabled() and any(
        isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())
    )
    internal = function.__module__.startswith(_INTERNAL)
    if not getattr(_tracing, "on", False) or not flows or internal:
        return _plain_apply(function, *args, **kwargs)
    if kwargs:
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    recipe, tensors = _recipe(function, args)
    key = f"{function.__module__} {function.__qualname__} {recipe.arguments!r}"
    whole, single = _look(recipe, tensors)
    made = operator_for(function.__name__, key, function, whole)(tensors)
    return made if single or len(whole.results) > 1 else (made,)


def _recipe(
    function: type[torch.autograd.Function], args: Sequence[Any]
) -> tuple[_Recipe, list[Tensor]]:
    tensors: list[Tensor] = []
    arguments: list[Any] = []
    for position, argument in enumerate(args):
        if isinstance(argument, Tensor):
            arguments.append(_Hole(len(tensors)))
            tensors.append(argument)
        elif _is_constant(argument):
            arguments.append(argument)
        else:
            raise TraceError(
                f"argument {position} of the custom autograd function {function.__name__!r} is a "
                f"{type(argument).__name__}, which a traced graph cannot hold. Pass tensors and "
                f"numbers, or make the function an operator with torch.library.custom_op"
            )
    return _Recipe(function, tuple(arguments)), tensors


def _is_constant(item: Any) -> bool:
    if isinstance(item, (tuple, list)):
        return all(_is_constant(part) for part in item)
    return isinstance(item, CONSTANT_TYPES)


def _look(recipe: _Recipe, tensors: Sequence[Tensor]) -> tuple[Whole, bool]:
    """A function as an operator, and whether it returns a tensor by itself.

    To see what it returns it is run on tensors without data, apart from the trace.
    """
    name = recipe.function.__name__
    noted = RandomNoted()
    with _disable_current_modes(), FakeTensorMode(), noted, torch.enable_grad():
        empty = [_like(t) for t in tensors]
        versions = [t._version for t in empty]
        made = recipe(*empty)
    if [t._version for t in empty] != versions:
        raise TraceError(
            f"the custom autograd function {name!r} writes to its arguments in place. Return new "
            f"tensors instead"
        )
    single = isinstance(made, Tensor)
    listed = [made] if single else made
    if not isinstance(listed, (tuple, list)) or not all(isinstance(m, Tensor) for m in listed):
        raise TraceError(
            f"the custom autograd function {name!r} returns something other than tensors. Return "
            f"tensors only"
        )
    results = tuple(TensorType.of(m) for m in listed)
    what = f"the custom autograd function {name!r}"
    return Whole(recipe, results, random=bool(noted.found), what=what), single


def _like(x: Tensor) -> Tensor:
    made = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)
