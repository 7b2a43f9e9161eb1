"""Whole numbers out of tensors that stay symbols of a trace.

``x.roll(int(delay))`` shifts by a number that is known only when the graph runs. Export can carry
such a number (``delay.item()``), but Python's ``int`` must return a plain one. While a model is
traced, ``int`` in the files of its modules is a class that leaves the numbers of traced tensors
symbols, and a shift by a symbol becomes a look-up::

    x.roll(-delay, 1)   ==>   x.index_select(1, (arange(n) + delay) % n)

Only the index then depends on data (see `trace_regions`), and a plan may split the rest.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class _Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """``int(...)``; the number of a traced tensor is a symbol."""
        if len(args) == 1 and isinstance(args[0], FakeTensor) and not kwargs:
            x = args[0]
            return (x.trunc().long() if x.is_floating_point() else x).item()
        if len(args) == 1 and isinstance(args[0], SymInt):
            return args[0]
        return builtins.int(*args, **kwargs)

    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, builtins.int)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, builtins.int)

    def __getattr__(cls, name: str) -> Any:
        return getattr(builtins.int, name)


class _Int(metaclass=_Meta):
    """Stands for ``int`` in the files of a traced model."""


@contextlib.contextmanager
def numbers_stay_symbols(model: nn.Module) -> Iterator[None]:
    """Let ``int`` of a traced tensor be a symbol in the files of the model's modules."""
    names = {type(m).__module__ for m in model.modules()}
    files = [sys.modules[n] for n in names if n in sys.modules and not n.startswith("torch.")]
    changed = [vars(file) for file in files if "int" not in vars(file)]
    for names_of_file in changed:
        names_of_file["int"] = _Int
    try:
        yield
    finally:
        for names_of_file in changed:
            names_of_file.pop("int", None)


def rolled_by_a_symbol(
    input: Tensor, shifts: Any = None, dims: Any = None, **kwargs: Any
) -> Tensor | None:
    """`torch.roll` of one dimension by a symbol; None for any other."""
    shift = shifts[0] if isinstance(shifts, (tuple, list)) and len(shifts) == 1 else shifts
    dim = dims[0] if isinstance(dims, (tuple, list)) and len(dims) == 1 else dims
    if kwargs or not isinstance(shift, SymInt) or not isinstance(dim, builtins.int):
        return None
    size = input.shape[dim]
    if not isinstance(size, builtins.int) or size == 0:
        return None
    symbol: Any = shift
    places = torch.arange(size, device=input.device) - symbol
    return input.index_select(dim, places.remainder(size))
