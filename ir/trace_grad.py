"""Which results of a call carry a gradient: PyTorch itself is asked, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.ir.graph import Value, map_values


def overload(op: str) -> Any:
    """The `torch.ops` overload of an operator's full name, e.g. ``"aten.linear.default"``.

    Raises AttributeError where there is none.
    """
    namespace, name, kind = op.rsplit(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


def has_overload(op: str) -> bool:
    try:
        overload(op)
    except AttributeError:
        return False
    return True


def meta_call(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call on meta tensors that require grad where their values do."""

    def meta(value: Value) -> torch.Tensor:
        grad = value.grad and (value.dtype.is_floating_point or value.dtype.is_complex)
        return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=grad)

    def on_meta(item: Any) -> Any:
        return torch.device("meta") if isinstance(item, torch.device) else item

    moved_args = [on_meta(item) for item in map_values(list(args), meta)]
    moved_kwargs = {key: on_meta(item) for key, item in map_values(dict(kwargs), meta).items()}
    with torch.enable_grad():
        return overload(op)(*moved_args, **moved_kwargs)


class GradOracle:
    """Answers, per call, which results carry a gradient, and remembers the answers.

    An operator that cannot run on the meta device is taken to pass gradients to every floating
    result.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[bool, ...]] = {}

    def results(
        self,
        op: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[Value],
        dtypes: Sequence[torch.dtype],
    ) -> tuple[bool, ...]:
        """One answer per result; `dtypes` are the results' own."""
        floating = tuple(d.is_floating_point or d.is_complex for d in dtypes)
        if not any(v.grad for v in operands) or not any(floating):
            return (False,) * len(floating)
        key = (op, tuple((v.grad, v.dtype) for v in operands), tuple(dtypes))
        if key not in self._known:
            self._known[key] = self._ask(op, args, kwargs, floating)
        return self._known[key]

    @staticmethod
    def _ask(
        op: str, args: Sequence[Any], kwargs: Mapping[str, Any], floating: tuple[bool, ...]
    ) -> tuple[bool, ...]:
        try:
            made = meta_call(op, args, kwargs)
        except Exception:  # any failure of a foreign operator means only that it cannot be asked
            return floating
        made = list(made) if isinstance(made, (tuple, list)) else [made]
        if len(made) != len(floating):
            return floating
        return tuple(isinstance(m, torch.Tensor) and m.requires_grad for m in made)
