"""What rule functions share: a call's arguments by name, its dimensions, notation by parts.

A call may pass an argument by position or by keyword and may leave optional tensors out, so the
position of a tensor among `Node.operands` is worked out here, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from autopar.ir.graph import Node, Value

#: One token of the rule notation for each dimension of a tensor.
Term = Sequence[str]


@cache
def overload(op: str) -> torch._ops.OpOverload | None:
    """The PyTorch operator of an IR name, None where PyTorch knows none of that name."""
    parts = op.split(".")
    if len(parts) != 3:
        return None
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def _arguments(op: str) -> Sequence[torch.Argument]:
    found = overload(op)
    assert found is not None, f"{op} is not a PyTorch operator"
    return found._schema.arguments


def bind(node: Node) -> dict[str, Any]:
    """Every argument of a call by name: those it passes in its order, then the defaults.

    A required argument that is missing is None.
    """
    arguments = _arguments(node.op)
    bound = dict(zip((a.name for a in arguments), node.args, strict=False))
    bound.update(node.kwargs)
    for a in arguments:
        bound.setdefault(a.name, a.default_value if a.has_default_value() else None)
    return bound


def operand_terms(node: Node, terms: Mapping[str, str]) -> str:
    """The left side of a rule: the term of every tensor argument that the call passes.

    `terms` gives them by argument name; an argument that is absent from the call is skipped.
    """
    return ", ".join(terms[name] for name in operand_names(node))


def operand_names(node: Node) -> list[str]:
    """The argument names of `Node.operands`, in their order."""
    return [name for name, value in bind(node).items() if isinstance(value, Value)]


def position(node: Node, name: str) -> int | str:
    """Where a call has an argument: its index in `args`, or its name if it is in `kwargs`."""
    if name in node.kwargs:
        return name
    return [a.name for a in _arguments(node.op)].index(name)


def dim_names(rank: int, prefix: str = "b") -> list[str]:
    """One factor name for each dimension: ``b0, b1, …`` from the left."""
    return [f"{prefix}{d}" for d in range(rank)]


def normal_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def normal_dims(dims: int | list[int] | None, rank: int) -> list[int]:
    """Dimensions counted from the front; None or an empty list are all of them."""
    if dims is None or dims == []:
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted(d % rank for d in listed) if rank else []


def notation(operands: Iterable[Term], results: Iterable[Term]) -> str:
    """Rule notation out of its terms (an empty term is a tensor without dimensions)."""
    return f"{_side(operands)} -> {_side(results)}"


def _side(terms: Iterable[Term]) -> str:
    return ", ".join(" ".join(term) for term in terms)


def floating(node: Node, *groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The linear groups that hold for this call: terms of a sum are floating point or complex.

    Groups with an operand that the call does not have (an absent bias), or with one of integers,
    are left out; so are all if a result is of integers.
    """

    def inexact(dtype: torch.dtype) -> bool:
        return dtype.is_floating_point or dtype.is_complex

    if not all(inexact(r.dtype) for r in node.results):
        return ()
    dtypes = [v.dtype for v in node.operands]
    return tuple(
        tuple(group)
        for group in groups
        if all(k < len(dtypes) and inexact(dtypes[k]) for k in group)
    )
