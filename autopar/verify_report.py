"""Two runs compared tensor by tensor: the checks, and the report a user reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.errors import VerificationError
from autopar.plans import Plan

#: The scale of an error is never below this share of the largest tensor of its kind: gradients
#: that are zero but for rounding have no meaningful relative error.
FLOOR = 1e-3


@dataclass(frozen=True)
class Check:
    """One tensor compared: the norms on both sides and the largest difference.

    kind:
        ``"output"``, ``"gradient"`` or ``"buffer"``
    name:
        position of the output, name of the parameter or buffer, ``input <path>``
    error:
        largest absolute difference, divided by the largest absolute expected value (or by 0.001
        times the largest one of all tensors of the kind, where that is larger)
    """

    kind: str
    name: str
    expected_norm: float
    got_norm: float
    error: float


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    checks:
        one per output, gradient and buffer
    disagreement:
        the largest difference between ranks that should hold the same
    tolerance:
        the largest error that passes
    """

    plan: Plan
    checks: tuple[Check, ...]
    disagreement: float
    tolerance: float

    @property
    def max_error(self) -> float:
        errors = [check.error for check in self.checks]
        # max() would drop a nan that does not come first.
        return max([*errors, self.disagreement], key=_size)

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        width = max([len(c.name) for c in self.checks], default=4)
        lines = [f"{'kind':8}  {'name':{width}}  {'expected norm':>14}  {'got norm':>14}  error"]
        for c in self.checks:
            mark = "" if c.error <= self.tolerance else "  <-- differs"
            lines.append(
                f"{c.kind:8}  {c.name:{width}}  {c.expected_norm:14.6g}  {c.got_norm:14.6g}  "
                f"{c.error:.2e}{mark}"
            )
        lines.append(
            f"{'equal' if self.ok else 'DIFFERENT'}: largest error {self.max_error:.2e}, "
            f"tolerance {self.tolerance:.0e}, ranks differ by {self.disagreement:.2e}"
        )
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise VerificationError, naming the worst tensor, unless everything is equal."""
        if not self.ok:
            worst = max(self.checks, key=lambda c: _size(c.error), default=None)
            if worst is None or _size(worst.error) < _size(self.disagreement):
                what = f"ranks that hold the same tensor differ by {self.disagreement:.2e}"
            else:
                what = f"{worst.kind} {worst.name!r} is off by {worst.error:.2e}"
            raise VerificationError(
                f"the plan does not compute what the model computes: {what} "
                f"(tolerance {self.tolerance:.0e})\n{self}"
            )


def _size(error: float) -> float:
    """An error to compare by: a NaN is the largest."""
    return math.inf if math.isnan(error) else error


#: Name, expected and computed tensor; a missing one counts as zeros.
Pair = tuple[str, Tensor | None, Tensor | None]


def compare_tensors(kind: str, pairs: Sequence[Pair]) -> list[Check]:
    """Compare the tensors of one kind."""
    largest = max((_largest(want) for _, want, _ in pairs if want is not None), default=0.0)
    return [_check(kind, name, want, got, FLOOR * largest) for name, want, got in pairs]


def _largest(x: Tensor) -> float:
    """The largest finite absolute value (0 where there is none)."""
    x = x.detach().to("cpu", torch.float64)
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _check(kind: str, name: str, want: Tensor | None, got: Tensor | None, floor: float) -> Check:
    if want is None and got is None:
        return Check(kind, name, 0.0, 0.0, 0.0)
    present = want if want is not None else got
    assert present is not None
    zeros = torch.zeros(present.shape, dtype=torch.float64)
    a = zeros if want is None else want.detach().to("cpu", torch.float64)
    b = zeros if got is None else got.detach().to("cpu", torch.float64)
    if a.shape != b.shape:
        return Check(kind, name, a.norm().item(), b.norm().item(), math.inf)
    # Masked scores may hold equal infinities, whose difference is no number.
    difference = torch.where(a == b, 0.0, (a - b).abs())
    error = difference.max().item() if difference.numel() else 0.0
    scale = max(_largest(a), floor) or 1.0
    return Check(kind, name, a.norm().item(), b.norm().item(), error / scale)
