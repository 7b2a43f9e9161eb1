"""Inputs on which an operator shows what it depends on.

A dependence between rows may vanish on random numbers: a clip that nothing exceeds, an order that
holds already, a batch maximum that one row sets. So tensors are drawn in many ways: wide and
narrow, constant, with ties, in order, with one entry that outweighs all, not finite, and with
rows of one block unlike those of another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.graph import Node, Value

#: One way to draw a tensor of a shape; the result is cast to the operand's dtype.
Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]

#: Values at which an operand of one element may switch something.
_SWITCHES = (-1, 0, 1, 2)

#: How many combinations of ways to draw the integer operands are tried.
_COMBINATIONS = 64

#: How often one way to draw must be accepted: counts may add up right by chance.
_REPEATED = 6


@dataclass(frozen=True)
class Inputs:
    """The operands of one call, in the order of `Node.operands`."""

    name: str
    tensors: tuple[Tensor, ...]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1


def _ties(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).double()


def _constant(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.full(shape, float(torch.randn((), generator=generator)), dtype=torch.float64)


def _ascending(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    count = math.prod(shape)
    steps = torch.rand(count, dtype=torch.float64, generator=generator) + 0.05
    return (steps.cumsum(0) / max(count, 1) * 4 - 1).reshape(shape)


def _definite(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Symmetric positive definite matrices, where the last two dimensions are equal."""
    x = _normal(shape, generator)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return x
    return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)


def _with_one(entry: float) -> Draw:
    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        x = _normal(shape, generator).flatten()
        if x.numel():
            x[int(torch.randint(x.numel(), (), generator=generator))] = entry
        return x.reshape(shape)

    return draw


#: The ways to draw a floating point operand.
FLOATS: Mapping[str, Draw] = {
    "normal": _normal,
    "positive": _positive,
    "wide": lambda shape, generator: _normal(shape, generator) * 1e3,
    "narrow": lambda shape, generator: _normal(shape, generator) * 1e-3,
    "tied": _ties,
    "constant": _constant,
    "zero": lambda shape, _: torch.zeros(shape, dtype=torch.float64),
    "ascending": _ascending,
    "descending": lambda shape, generator: -_ascending(shape, generator),
    "outlying": _with_one(1e4),
    "low outlying": _with_one(-1e4),
    "positive definite": _definite,
    "NaN": _with_one(math.nan),
    "infinite": _with_one(math.inf),
    "low infinite": _with_one(-math.inf),
}

#: The ones that tell most.
BRIEF = ("wide", "tied", "ascending", "outlying", "low outlying")


def _blocks(first: float, second: float) -> Callable[[Tensor, int], Tensor]:
    def shape(x: Tensor, dim: int) -> Tensor:
        half = x.shape[dim] // 2
        parts = x.split([half, x.shape[dim] - half], dim)
        return torch.cat([parts[0] * first, parts[1] * second], dim)

    return shape


def _opposed(x: Tensor, dim: int) -> Tensor:
    """Rows that add up to nothing."""
    return x - x.mean(dim, keepdim=True)


def _one_row(x: Tensor, dim: int) -> Tensor:
    """One row that outweighs the others."""
    heavy = torch.ones(x.shape[dim], dtype=x.dtype)
    heavy[-1] = 1e4
    return x * heavy.reshape([-1 if d == dim else 1 for d in range(x.dim())])


#: What makes the rows along one dimension unlike each other.
BLOCKS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "of one heavy row": _one_row,
    "wide in the first half": _blocks(1e3, 1.0),
    "zero in the second half": _blocks(1.0, 0.0),
    "wide in the second half": _blocks(1.0, 1e3),
    "of rows that cancel": _opposed,
    "zero in the first half": _blocks(0.0, 1.0),
}


def _integer_draws(value: Value, limits: Sequence[int], sizes: Sequence[int]) -> dict[str, Draw]:
    """The ways to draw an integer operand.

    limits:
        numbers that its entries may have to stay below, the safest first: an index must not
        reach beyond the dimension that it reads
    sizes:
        numbers that its entries may have to add up to, where they count rows
    """
    found: dict[str, Draw] = {}
    for limit in limits:

        def below(shape: tuple[int, ...], generator: torch.Generator, limit: int = limit) -> Tensor:
            return torch.randint(limit, shape, generator=generator)

        found[f"below {limit}"] = below
    last = limits[-1]
    found["zero"] = lambda shape, _: torch.zeros(shape, dtype=torch.int64)
    found["largest"] = lambda shape, _: torch.full(shape, last - 1)
    found["ascending"] = lambda shape, g: (
        torch.randint(last, (math.prod(shape),), generator=g).sort().values.reshape(shape)
    )
    if len(value.shape) == 1 and value.shape[0] > 1:
        if value.shape[0] <= last:
            found["permuted"] = lambda shape, g: torch.randperm(shape[0], generator=g)
        for size in sizes:
            found[f"counts of {size}"] = _counts(size)
            found[f"ends up to {size}"] = _ends(size)
    return found


def _counts(size: int) -> Draw:
    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        places = torch.randint(shape[0], (size,), generator=generator)
        return torch.bincount(places, minlength=shape[0])

    return draw


def _ends(size: int) -> Draw:
    return lambda shape, generator: _counts(size)(shape, generator).cumsum(0)


_BOOLEANS: Mapping[str, Draw] = {
    "mixed": lambda shape, g: torch.rand(shape, generator=g) < 0.5,
    "mostly true": lambda shape, g: torch.rand(shape, generator=g) < 0.9,
    "mostly false": lambda shape, g: torch.rand(shape, generator=g) < 0.1,
    "true": lambda shape, _: torch.ones(shape, dtype=torch.bool),
    "false": lambda shape, _: torch.zeros(shape, dtype=torch.bool),
}


class InputSource:
    """Draws the operands of one call in every way that the operator accepts.

    accepts:
        whether the operator runs on some operands
    """

    def __init__(
        self,
        node: Node,
        device: torch.device,
        generator: torch.Generator,
        accepts: Callable[[Sequence[Tensor]], bool],
    ) -> None:
        self.node, self.device, self.generator = node, device, generator
        self._accepts = accepts
        self._discrete = self._discrete_draws()
        self._base: dict[int, str] = {}
        self._float = ""

    def settle(self) -> bool:
        """Find one way to draw everything; False where there is none."""
        places = list(self._discrete)
        for kind in ("normal", "positive", "positive definite"):
            choices = [list(self._discrete[k]) for k in places]
            same = [
                c for c in (choices[0] if choices else []) if all(c in names for names in choices)
            ]
            uniform = [(name,) * len(places) for name in same]
            every = itertools.islice(itertools.product(*choices), _COMBINATIONS)
            for names in dict.fromkeys([*uniform, *every]):
                base = dict(zip(places, names, strict=True))
                if all(self._accepts(self._draw(kind, base)) for _ in range(_REPEATED)):
                    self._float, self._base = kind, base
                    return True
        return False

    def base(self) -> tuple[Tensor, ...]:
        """Operands drawn in the way that was settled."""
        return self._draw(self._float, self._base)

    def all(self, *, brief: bool = False) -> Iterator[Inputs]:
        """Operands drawn in every way there is; the operator may refuse some of them.

        brief:
            leave out the ways that tell least
        """
        for name in dict.fromkeys([self._float, *(BRIEF if brief else FLOATS)]):
            yield Inputs(f"{name} inputs", self._draw(name, self._base))
        for k, draws in self._discrete.items():
            for name in draws:
                if name != self._base[k]:
                    tensors = self._draw(self._float, {**self._base, k: name})
                    yield Inputs(f"operand {k} {name}", tensors)
        for k, value in enumerate(self.node.operands):
            if k not in self._discrete and value.numel == 1:
                for number in _SWITCHES:
                    base = list(self.base())
                    base[k] = torch.full_like(base[k], number)
                    yield Inputs(f"operand {k} {number}", tuple(base))

    def blocks(self, along: Mapping[int, int], *, brief: bool = False) -> Iterator[Inputs]:
        """Operands whose rows are unlike each other.

        along:
            operand -> the dimension that numbers its rows
        """
        for name, form in list(BLOCKS.items())[:: 2 if brief else 1]:
            tensors = tuple(
                form(x, along[k]) if k in along and x.is_floating_point() else x
                for k, x in enumerate(self.base())
            )
            yield Inputs(f"inputs {name}", tensors)

    def _draw(self, name: str, discrete: Mapping[int, str]) -> tuple[Tensor, ...]:
        drawn = []
        for k, value in enumerate(self.node.operands):
            if k in discrete:
                x = self._discrete[k][discrete[k]](value.shape, self.generator)
            else:
                x = FLOATS[name](value.shape, self.generator)
                if value.dtype.is_complex:
                    x = torch.complex(x, FLOATS[name](value.shape, self.generator))
            drawn.append(x.to(device=self.device, dtype=value.dtype))
        return tuple(drawn)

    def _discrete_draws(self) -> dict[int, Mapping[str, Draw]]:
        sizes = [s for v in self.node.operands for s in v.shape if s > 1]
        smallest = max(2, min(sizes, default=2))
        found: dict[int, Mapping[str, Draw]] = {}
        for k, value in enumerate(self.node.operands):
            if value.dtype == torch.bool:
                found[k] = _BOOLEANS
            elif not (value.dtype.is_floating_point or value.dtype.is_complex):
                limits = sorted({2, smallest})
                found[k] = _integer_draws(value, limits, sorted(set(sizes)))
        return found
