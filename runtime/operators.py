"""Operator names and the callables they stand for.

An IR node names its operator: ``"aten.linear.default"`` is `torch.ops.aten.linear.default`,
``"autopar.all_gather"`` the runtime function registered under ``all_gather``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from autopar.ir.errors import GraphError
from autopar.ir.whole import whole_of
from autopar.runtime.whole import drawing_alike

_F = TypeVar("_F", bound=Callable[..., Any])

#: The namespace of the compiler's own operators.
NAMESPACE = "autopar"

_TABLE: dict[str, Callable[..., Any]] = {}

#: What runs in the place of an operator of PyTorch.
_INSTEAD: dict[str, Callable[..., Any]] = {}

#: What begins an operator of the compiler's own before it is reached (`autopar.runtime.early`).
BEGINNINGS: dict[str, Callable[..., Any]] = {}


def operator(name: str) -> Callable[[_F], _F]:
    """Register the decorated function as the IR operator ``autopar.<name>``."""
    return _into(_TABLE, name, f"operator {NAMESPACE}.{name} is registered already")


def stands_for(op: str) -> Callable[[_F], _F]:
    """Let the decorated function run wherever a graph has an operator of PyTorch."""
    return _into(_INSTEAD, op, f"something stands for {op} already")


def begins(name: str) -> Callable[[_F], _F]:
    """Let the decorated function begin the IR operator ``autopar.<name>``.

    It takes some arguments of the operator, by name; what it returns is passed as ``begun``.
    """
    return _into(BEGINNINGS, name, f"something begins operator {NAMESPACE}.{name} already")


def _into(table: dict[str, Callable[..., Any]], name: str, taken: str) -> Callable[[_F], _F]:
    """Put the decorated function into a table, once; `taken` is the error of a second time."""

    def add(fn: _F) -> _F:
        if name in table:
            raise ValueError(taken)
        table[name] = fn
        return fn

    return add


def resolve(op: str) -> Callable[..., Any]:
    """The callable of an IR operator name.

    Raises GraphError where no such operator exists.
    """
    namespace, *path = op.split(".")
    if namespace == NAMESPACE:
        return _own(op, ".".join(path))
    whole = whole_of(op)
    if whole is not None and whole.random:
        return drawing_alike(op, whole)
    _import_runtime()
    if op in _INSTEAD:
        return _INSTEAD[op]
    target: Any = torch.ops
    try:
        for part in (namespace, *path):
            target = getattr(target, part)
    except AttributeError:
        target = None
    if not callable(target):
        raise GraphError(
            f"operator {op!r}: torch.ops has none of that name; "
            "import the library that defines it first"
        )
    return target


def _own(op: str, name: str) -> Callable[..., Any]:
    _import_runtime()
    if name not in _TABLE:
        known = ", ".join(sorted(_TABLE))
        raise GraphError(f"operator {op!r}: the runtime has none of that name, it has {known}")
    return _TABLE[name]


@cache
def _import_runtime() -> None:
    """Import every module of this package, so that each registers its operators."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
