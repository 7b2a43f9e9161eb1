"""Mixed precision: what a model computes in, and what its gradients are summed in."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.errors import InputError, PlanError
from autopar.ir.trace_export import ambient_autocast

#: What `mixed_precision=` may be.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: What `reduce_dtype=` may be besides that, and how a plan spells it.
_NAMES = {**DTYPES, "fp32": torch.float32}


@dataclass(frozen=True)
class MixedPrecision:
    """The low dtype of a model's products, and the dtype its gradients cross ranks in.

    dtype:
        "bf16" or "fp16"
    reduced:
        "fp32", or the same
    """

    dtype: str
    reduced: str = "fp32"

    @staticmethod
    def make(mixed_precision: Any, reduce_dtype: Any = None) -> MixedPrecision | None:
        """Check what a user gives. Raises PlanError naming the argument."""
        reduced = next((k for k, v in _NAMES.items() if reduce_dtype in (k, v)), None)
        if mixed_precision is None:
            if reduce_dtype is not None:
                raise PlanError(
                    f"reduce_dtype: got {reduce_dtype!r} without mixed_precision; gradients have "
                    "the dtype of their parameters then"
                )
            return None
        if not isinstance(mixed_precision, str) or mixed_precision not in DTYPES:
            raise PlanError(
                f"mixed_precision: expected one of {tuple(DTYPES)} or None, got {mixed_precision!r}"
            )
        if reduce_dtype is None:
            return MixedPrecision(mixed_precision)
        if reduced not in ("fp32", mixed_precision):
            raise PlanError(
                f"reduce_dtype: expected torch.float32 or {DTYPES[mixed_precision]} with "
                f"mixed_precision={mixed_precision!r}, got {reduce_dtype!r}"
            )
        assert reduced is not None
        return MixedPrecision(mixed_precision, reduced)

    @property
    def low(self) -> torch.dtype:
        """The dtype of products."""
        return DTYPES[self.dtype]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients of parameters are summed over ranks."""
        return _NAMES[self.reduced]

    def __str__(self) -> str:
        return f"mixed precision {self.dtype}, gradients summed in {self.reduced}"

    def to_json(self) -> dict[str, str]:
        return {"dtype": self.dtype, "reduced": self.reduced}

    @staticmethod
    def from_json(data: Any) -> MixedPrecision | None:
        """The inverse of `to_json`; None is none. Raises PlanError where it is malformed."""
        if data is None:
            return None
        if not isinstance(data, dict) or set(data) != {"dtype", "reduced"}:
            raise PlanError(f"the field 'mixed_precision' is malformed: got {data!r}"[:200])
        try:
            return MixedPrecision.make(data["dtype"], data["reduced"])
        except PlanError as error:
            raise PlanError(f"the field 'mixed_precision': {error}") from None


def region(
    mixed: MixedPrecision | None, device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """What a model is traced under: autocast, or what surrounds the caller."""
    autocast = in_force(mixed, device)
    if mixed is None or autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(*autocast)


def in_force(mixed: MixedPrecision | None, device: torch.device) -> tuple[str, torch.dtype] | None:
    """The autocast of a call: that of the module, else the caller's.

    Raises InputError where they are not of one dtype.
    """
    ambient = ambient_autocast(device)
    if mixed is None:
        return ambient
    if ambient is not None and ambient[1] != mixed.low:
        raise InputError(
            f"torch.autocast of {ambient[1]} around a module of mixed_precision={mixed.dtype!r}: "
            "leave the autocast away, or make it of that dtype"
        )
    return "cpu" if device.type == "meta" else device.type, mixed.low


def given_with_plan(
    mixed: MixedPrecision | None, planned: MixedPrecision | None
) -> MixedPrecision | None:
    """What holds beside a plan: the plan's own. Raises PlanError where another was asked for."""
    if mixed is not None and mixed != planned:
        raise PlanError(
            f"mixed_precision: asked for {mixed}, the plan was made "
            f"{f'for {planned}' if planned else 'without mixed precision'}; leave the argument "
            "away, or make the plan anew"
        )
    return planned
