"""Random numbers while a model is traced: which operators draw, and draws that are no operators."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.errors import TraceError


class RandomNoted(TorchDispatchMode):
    """Notes the random operators that run while it is active, in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


#: What draws from Python's and from numpy's own generators, by module.
_DRAWS = {
    "random": (
        "random", "uniform", "randint", "randrange", "choice", "choices", "sample", "shuffle",
        "gauss", "normalvariate", "betavariate", "expovariate", "getrandbits", "triangular",
    ),
    "numpy.random": (
        "rand", "randn", "randint", "random", "random_sample", "uniform", "normal", "choice",
        "permutation", "shuffle", "binomial", "beta", "standard_normal", "exponential",
    ),
}  # fmt: skip


@contextlib.contextmanager
def python_draws_refused() -> Iterator[None]:
    """Refuse random numbers that `forward` draws outside of torch: a trace would freeze them."""
    with contextlib.ExitStack() as stack:
        for module_name, names in _DRAWS.items():
            module = sys.modules.get(module_name)
            for name in names if module is not None else ():
                original = getattr(module, name)
                refusing = _refusing(f"{module_name}.{name}", original)
                stack.enter_context(mock.patch.object(module, name, refusing))
        yield


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if not _inside_forward():
            return original(*args, **kwargs)
        raise TraceError(
            f"forward draws a random number with {name}, and a trace would freeze it. Switch off "
            f"what needs it (layerdrop=0, apply_spec_augment=False), or draw with torch.rand"
        )

    return draw


def _inside_forward() -> bool:
    """Whether a module's `forward` is running in this thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(
            frame.f_locals.get("self"), torch.nn.Module
        ):
            return True
        frame = frame.f_back
    return False
