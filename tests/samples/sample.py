"""What a sample call is, and short ways to make its tensors.

Sizes of 4 and 12 split on every mesh the harness tries (2, 3 and 2x2 ranks); sizes of 6 on the
first two.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One call of an operator on whole tensors.

    op:
        the IR name, such as ``"aten.linear.default"``
    args, kwargs:
        as the operator takes them; floating point tensors that require a gradient get one checked
    label:
        what sets this sample apart from the others of its operator
    unsplit:
        nothing of this call may be split (without it, something must be)
    unspecified:
        the values of the results mean nothing (`empty`); only their shapes are compared
    strided:
        the ranks' tensors lie in memory with gaps
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    unsplit: bool = False
    unspecified: bool = False
    strided: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}".strip()


def _generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def normal(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    """A float64 tensor of standard normal numbers."""
    x = torch.randn(shape, dtype=torch.float64, generator=_generator(shape, seed))
    return x.requires_grad_(grad)


def positive(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    """A float64 tensor of numbers between 0.1 and 0.9 (a probability, a scale, a variance)."""
    x = torch.rand(shape, dtype=torch.float64, generator=_generator(shape, seed)) * 0.8 + 0.1
    return x.requires_grad_(grad)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """An int64 tensor of numbers in ``[0, high)``."""
    return torch.randint(high, shape, generator=_generator(high, shape, seed))


def booleans(*shape: int, seed: int = 0) -> Tensor:
    """A bool tensor, true about half of the time."""
    return torch.rand(shape, generator=_generator(shape, seed)) < 0.5
