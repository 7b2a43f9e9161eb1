"""The definition of the four states, as code: a whole tensor to pieces and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime import collectives

State = int | str

#: The state of a gradient whose value is in a state.
DUAL = {"I": "I", "R": "P", "P": "R"}


def dual(state: State) -> State:
    return DUAL.get(state, state) if isinstance(state, str) else state


def pieces(whole: Tensor, state: State, count: int, seed: int) -> list[Tensor]:
    """What each of `count` ranks holds of a tensor in a state (same seed, same pieces)."""
    if isinstance(state, int):
        return list(whole.chunk(count, state))
    if state != "P":
        return [whole] * count
    random = torch.Generator().manual_seed(seed)
    terms = []
    for _ in range(count - 1):
        if whole.dtype.is_floating_point:
            terms.append(torch.randn(whole.shape, generator=random, dtype=torch.float64))
        else:
            terms.append(torch.randint(-9, 9, whole.shape, generator=random))
    terms = [term.to(whole.dtype) for term in terms]
    return [*terms, whole - sum(terms, torch.zeros_like(whole))]


def whole(parts: list[Tensor], state: State) -> Tensor:
    """The tensor that the ranks hold together; copies must be equal."""
    if isinstance(state, int):
        return torch.cat(parts, state)
    if state == "P":
        return sum(parts[1:], parts[0])
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=0, atol=0)
    return parts[0]


@dataclass(frozen=True)
class Case:
    """One reshard step and the states it leads from and to."""

    name: str
    source: State
    target: State
    step: Callable[[Tensor, tuple[str, ...]], Tensor]

    def __str__(self) -> str:
        return f"{self.name}_{self.source}_to_{self.target}"


c = collectives
CASES = (
    Case("all_reduce", "P", "I", lambda x, axes: c.all_reduce(x, axes, "I")),
    Case("all_reduce", "P", "R", lambda x, axes: c.all_reduce(x, axes, "R")),
    Case("all_gather", 0, "I", lambda x, axes: c.all_gather(x, axes, 0, "I")),
    Case("all_gather", 1, "I", lambda x, axes: c.all_gather(x, axes, 1, "I")),
    Case("all_gather", 0, "R", lambda x, axes: c.all_gather(x, axes, 0, "R")),
    Case("all_gather", 2, "R", lambda x, axes: c.all_gather(x, axes, 2, "R")),
    Case("reduce_scatter", "P", 0, lambda x, axes: c.reduce_scatter(x, axes, 0)),
    Case("reduce_scatter", "P", 2, lambda x, axes: c.reduce_scatter(x, axes, 2)),
    Case("all_to_all", 0, 1, lambda x, axes: c.all_to_all(x, axes, 0, 1)),
    Case("all_to_all", 2, 0, lambda x, axes: c.all_to_all(x, axes, 2, 0)),
    Case("all_to_all", 1, 2, lambda x, axes: c.all_to_all(x, axes, 1, 2)),
    Case("slice", "I", 0, lambda x, axes: c.slice_(x, axes, 0, "I")),
    Case("slice", "I", 1, lambda x, axes: c.slice_(x, axes, 1, "I")),
    Case("slice", "R", 1, lambda x, axes: c.slice_(x, axes, 1, "R")),
    Case("pad", 0, "P", lambda x, axes: c.pad(x, axes, 0)),
    Case("pad", 2, "P", lambda x, axes: c.pad(x, axes, 2)),
    Case("mask", "I", "P", lambda x, axes: c.mask(x, axes, "I")),
    Case("mask", "R", "P", lambda x, axes: c.mask(x, axes, "R")),
    Case("to_replicate", "I", "R", lambda x, axes: c.to_replicate(x, axes)),
    Case("to_invariant", "R", "I", lambda x, axes: c.to_invariant(x, axes)),
)
