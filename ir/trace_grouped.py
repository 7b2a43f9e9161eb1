"""A loop of products over the pieces of a tensor, as one product of groups.

Experts are often written as a loop over pieces whose sizes are numbers out of a tensor::

    pieces = x.split(sizes.tolist())
    y = torch.cat([F.linear(piece, weight[i]) for i, piece in enumerate(pieces)])

Each piece has a size of its own, which no value of the IR may have. Put together again they have
the rows of `x`, and the whole is what the grouped product of mixtures of experts computes::

    ends = sizes.cumsum(0)
    y = grouped_mm(x, weight.transpose(1, 2), ends)

That one has fixed shapes and a rule. The loop is recognised while a model is traced, by where each
tensor of the ``cat`` comes from; what it made is left unused.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

#: The module that registers the grouped product of any dtype.
_HOME = "transformers.integrations.moe"

#: What is checked of the sizes on every call.
_COMPLETE = "the sizes of a split, which add up to the rows that are split"


@dataclass(frozen=True)
class _Piece:
    """Piece `number` of `whole`, cut along its rows at the sizes in a tensor."""

    whole: Tensor
    sizes: Tensor
    number: int


@dataclass(frozen=True)
class _Product:
    """A piece times a matrix, which is transposed for ``linear``."""

    piece: _Piece
    weight: Tensor
    transposed: bool


class GroupedProducts:
    """What is known of the tensors of one trace; `look` is shown every call of a function."""

    def __init__(self) -> None:
        _register()
        self._numbers: dict[Any, tuple[Tensor, int]] = {}
        # By id, with the tensor itself, so that no id is used twice.
        self._pieces: dict[int, tuple[Tensor, _Piece]] = {}
        self._products: dict[int, tuple[Tensor, _Product]] = {}
        self._entries: dict[int, tuple[Tensor, Tensor, int]] = {}

    def replaced(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """What is traced in place of a call; None for every other."""
        if func not in _CATS or not self._products:
            return None
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        plain = args and len(args) + len(kwargs) <= 2 and set(kwargs) <= {"dim"}
        return self._joined(args[0]) if plain and dim in (0, -2) else None

    def look(self, func: Any, args: tuple[Any, ...], kwargs: Any, made: Any) -> None:
        """Remember where the results of a call come from."""
        if func is Tensor.item and isinstance(made, SymInt) and id(args[0]) in self._entries:
            self._numbers[made.node._expr] = self._entries[id(args[0])][1:]
        elif func in _UNBINDS and args and args[0].dim() == 1 and _may_be_sizes(args[0]):
            # So does `tolist` of a traced tensor.
            self._entries.update({id(n): (n, args[0], k) for k, n in enumerate(made)})
        elif func in _SPLITS and self._numbers and len(args) + len(kwargs) <= 3:
            rest = [*args[1:2], *(n for key, n in kwargs.items() if key.startswith("split"))]
            dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            if args and rest and dim in (0, -args[0].dim()):
                self._split(made, args[0], rest[0])
        elif func is Tensor.__getitem__ and type(args[1]) is int:
            if self._pieces or _may_be_sizes(made):
                self._entries[id(made)] = (made, *args)
        elif func in _PRODUCTS and self._pieces and _has_no_bias(args, kwargs):
            self._multiplied(func, made, *args[:2])

    def _split(self, made: Any, x: Tensor, sizes: Any) -> None:
        if not isinstance(sizes, (tuple, list)) or x.dim() != 2:
            return
        known = [self._numbers.get(s.node._expr) for s in sizes if isinstance(s, SymInt)]
        source = known[0][0] if known and known[0] is not None else None
        every = [None if k is None else k[1] for k in known] == list(range(len(sizes)))
        if source is None or not every or any(k is None or k[0] is not source for k in known):
            return
        if tuple(source.shape) == (len(sizes),):
            for k, piece in enumerate(made):
                self._pieces[id(piece)] = (piece, _Piece(x, source, k))

    def _multiplied(self, func: Any, made: Any, x: Any, weight: Any) -> None:
        found = self._pieces.get(id(x))
        if found is not None and isinstance(weight, Tensor) and weight.dim() == 2:
            product = _Product(found[1], weight, func is F.linear)
            self._products[id(made)] = (made, product)

    def _joined(self, tensors: Any) -> Tensor | None:
        """The grouped product that a ``cat`` of products comes to."""
        found = [self._products.get(id(x)) for x in tensors]
        products = [f[1] for f in found if f is not None]
        if not products or len(products) < len(found):
            return None
        first = products[0]
        in_order = [p.piece.number for p in products] == list(range(first.piece.sizes.shape[0]))
        if not in_order or any(
            p.piece.whole is not first.piece.whole
            or p.piece.sizes is not first.piece.sizes
            or p.transposed != first.transposed
            or p.weight.shape != first.weight.shape
            for p in products
        ):
            return None
        grouped = grouped_product()
        if grouped is None:
            return None
        weight = self._stacked([p.weight for p in products])
        if first.transposed:
            weight = weight.transpose(1, 2)
        whole, sizes = first.piece.whole, first.piece.sizes
        # `split` refuses other sizes, the grouped product would leave rows out.
        torch.ops.autopar_trace.decided(sizes.sum() == whole.shape[0], True, _COMPLETE)
        made: Tensor = grouped(whole, weight, sizes.cumsum(0))
        return made

    def _stacked(self, weights: Sequence[Tensor]) -> Tensor:
        """Matrices as one tensor: the one whose entries they are, where there is one."""
        entries = [self._entries.get(id(w)) for w in weights]
        first = entries[0]
        if first is not None and first[1].shape[0] == len(weights):
            whole = first[1]
            if all(e is not None and e[1] is whole and e[2] == k for k, e in enumerate(entries)):
                return whole
        return torch.stack(list(weights))


_CATS: set[Any] = {torch.cat, torch.concat, torch.concatenate}
_UNBINDS: set[Any] = {torch.unbind, Tensor.unbind}
_SPLITS: set[Any] = {torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes}
_PRODUCTS: set[Any] = {
    F.linear,
    torch.matmul,
    torch.mm,
    Tensor.matmul,
    Tensor.mm,
    Tensor.__matmul__,
}


def _may_be_sizes(x: Tensor) -> bool:
    """Whether a tensor may hold the sizes of pieces, or one of them."""
    whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return whole and x.dim() <= 1 and all(isinstance(n, int) for n in x.shape)


def _has_no_bias(args: tuple[Any, ...], kwargs: Any) -> bool:
    return len(args) >= 2 and all(x is None for x in (*args[2:], *kwargs.values()))


def grouped_product() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The operator for groups of any size and dtype; None without transformers."""
    return getattr(torch.ops.transformers, "grouped_mm_fallback", None)


def _register() -> None:
    """Have the operator registered. Not while tracing: what is imported then sees a compiler."""
    if "transformers" in sys.modules and _HOME not in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(_HOME)
