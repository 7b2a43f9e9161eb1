"""The search for ways to cut one call: guesses, and what their pieces come to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autopar.ir.declaration import Declaration
from autopar.ir.graph import Node
from autopar.ir.probe import difference, run
from autopar.ir.probe_rule import Subject, Unsure, factor_cuts, refute_factor
from autopar.ir.rule import Rule, SizeArgument

#: How many ways to tie one dimension to those of other tensors are tried.
_TIES = 300

#: How many kinds of inputs a guess must survive before it is looked at closely.
QUICK = 2

#: The names of the factors that are found.
LETTERS = "abcdefghijklmnopqrstuvwxyz"

#: Where an argument is: its position in `Node.args`, or its name.
Where = int | str


@dataclass(frozen=True)
class Split:
    """One way to cut a call: a factor before it has a name.

    operands:
        operand -> the dimension that is cut
    results:
        for each result the dimension along which its pieces concatenate, None where they add up
    argument:
        the argument that is the factor's size, and becomes the size of a piece
    shapes:
        (argument, result) pairs: arguments that spell the shape of a result
    joins:
        operands that are given in terms (a bias, added once)
    """

    operands: tuple[tuple[int, int], ...]
    results: tuple[int | None, ...]
    argument: Where | None = None
    shapes: tuple[tuple[Where, int], ...] = ()
    joins: tuple[int, ...] = ()

    def size(self, node: Node) -> int:
        """The number of elements of the factor in a call."""
        if self.argument is not None:
            return int(_argument(node, self.argument))
        return min(node.operands[k].shape[d] for k, d in self.operands)

    def fits(self, node: Node) -> bool:
        """Whether every dimension it cuts is a multiple of its size."""
        size = self.size(node)
        cut = [node.operands[k].shape[d] for k, d in self.operands]
        cut += [
            value.shape[d]
            for value, d in zip(node.results, self.results, strict=True)
            if d is not None
        ]
        return size > 1 and not any(n % size for n in cut)


def declaration(
    node: Node, splits: Sequence[Split], linear: Sequence[tuple[int, ...]] = ()
) -> Declaration:
    """The declaration of a call's splits, its factors named by letters."""
    sides = [[["1"] * len(v.shape) for v in side] for side in (node.operands, node.results)]
    sizes: dict[Where, SizeArgument] = {}
    rests = itertools.count()
    whole: tuple[str, ...] = ()
    for split, name in zip(splits, LETTERS, strict=False):
        size = split.size(node)
        places = [(0, k, d) for k, d in split.operands]
        places += [(1, k, d) for k, d in enumerate(split.results) if d is not None]
        for side, k, d in places:
            value = (node.operands, node.results)[side][k]
            if value.shape[d] == size:
                sides[side][k][d] = name
            else:
                sides[side][k][d] = f"({name} rest{next(rests)})"
                whole = ("rest",)
        if split.argument is not None:
            sizes[split.argument] = SizeArgument(split.argument, factor=name)
        for where, result in split.shapes:
            sizes[where] = SizeArgument(where, result=result)
    left, right = (", ".join(" ".join(term) for term in side) for side in sides)
    joins = tuple(sorted({k for split in splits for k in split.joins}))
    return Declaration(f"{left} -> {right}", whole, tuple(linear), joins, tuple(sizes.values()))


def rule_of(node: Node, *splits: Split, linear: Sequence[tuple[int, ...]] = ()) -> Rule:
    return declaration(node, splits, linear).rule(node)


def find_splits(subject: Subject) -> list[Split]:
    """Every way to cut the subject's call that holds on its sizes, each dimension once."""
    found: list[Split] = []
    node = subject.node
    for k, value in enumerate(node.operands):
        for d, size in enumerate(value.shape):
            taken = {place for split in found for place in split.operands}
            if size == 1 or (k, d) in taken:
                continue
            for guess in itertools.islice(_guesses(node, k, d, taken), _TIES):
                split = _try(subject, guess)
                if split is not None and _goes_with(split, found):
                    found.append(split)
                    break
    return found


@dataclass(frozen=True)
class _Guess:
    """A split whose results are not known yet.

    shape:
        (argument, result, dimension): an argument that spells a result's shape, and which entry
        of it to cut
    """

    size: int
    operands: tuple[tuple[int, int], ...]
    argument: Where | None = None
    shape: tuple[Where, int, int] | None = None


def _guesses(node: Node, k: int, d: int, taken: set[tuple[int, int]]) -> Iterator[_Guess]:
    """Cuts of one dimension, alone and with others: those that involve the least first."""
    mine = node.operands[k].shape[d]
    numbers = [(where, n) for where, n in _scalars(node) if n > 1 and mine % n == 0]
    for size, argument in [(mine, None), *((n, where) for where, n in numbers)]:
        ties = sorted(_ties(node, k, size, taken), key=len)
        for others in ties:
            places = tuple(sorted([(k, d), *others]))
            yield _Guess(size, places, argument)
            for shape in _spelled_shapes(node, size):
                yield _Guess(size, places, argument, shape)


def _ties(
    node: Node, k: int, size: int, taken: set[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Which dimensions of the other operands may be cut along with one of operand `k`."""
    options: list[list[tuple[int, int] | None]] = []
    for j, value in enumerate(node.operands):
        fitting = [
            (j, d)
            for d, n in enumerate(value.shape)
            if j != k and n > 1 and n % size == 0 and (j, d) not in taken
        ]
        options.append([None, *sorted(fitting, key=lambda at: value.shape[at[1]])])
    for choice in itertools.islice(itertools.product(*options), 4 * _TIES):
        yield tuple(place for place in choice if place is not None)


def _scalars(node: Node) -> list[tuple[Where, int]]:
    """Every argument that is a whole number."""
    items: list[tuple[Where, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    return [(at, n) for at, n in items if isinstance(n, int) and not isinstance(n, bool)]


def _spelled_shapes(node: Node, size: int) -> Iterator[tuple[Where, int, int]]:
    """Arguments that spell the shape of a result, with each entry that could be cut."""
    items: list[tuple[Where, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for where, item in items:
        for r, value in enumerate(node.results):
            if isinstance(item, (tuple, list)) and item and tuple(item) == value.shape:
                for d, n in enumerate(value.shape):
                    if n % size == 0:
                        yield where, r, d


def _argument(node: Node, where: Where) -> Any:
    return node.kwargs[where] if isinstance(where, str) else node.args[where]


def _try(subject: Subject, guess: _Guess) -> Split | None:
    """The split that a guess comes to, if it holds."""
    split = _results_of(subject, guess)
    if split is None or not split.fits(subject.node):
        return None
    candidates = [split]
    if all(d is None for d in split.results):
        # Operands outside of the cut may be added to a sum once.
        cut = dict(split.operands)
        outside = [
            k
            for k, v in enumerate(subject.node.operands)
            if k not in cut and v.dtype.is_floating_point
        ]
        candidates += [replace(split, joins=(k,)) for k in outside]
        candidates += [replace(split, joins=two) for two in itertools.combinations(outside, 2)]
    return next((c for c in candidates if holds(subject, c)), None)


def holds(subject: Subject, split: Split, *, each: int = 2) -> bool:
    """Whether no cut of a split and no input is found that gives something else."""
    rule = rule_of(subject.node, split)
    name = LETTERS[0]
    first = next(factor_cuts(rule, name), None)
    if first is None:
        return False
    for _, whole in subject.wholes()[:QUICK]:
        if difference(subject.node, rule, first, whole, subject.generator, subject.tolerance):
            return False
    return not refute_factor(subject, rule, name, each=each)


def _results_of(subject: Subject, guess: _Guess) -> Split | None:
    """Run the two pieces of a guess; None where their results do not fit together."""
    node = subject.node
    wholes = subject.wholes()
    if not wholes:
        raise Unsure("it accepts too few kinds of inputs to be judged")
    given = wholes[0][1]
    sizes = (guess.size - guess.size // 2, guess.size // 2)
    cut = dict(guess.operands)
    starts = (0, sizes[0])
    made: list[tuple[Tensor, ...]] = []
    for start, size in zip(starts, sizes, strict=True):
        tensors = []
        for k, x in enumerate(given.tensors):
            if k in cut:
                unit = x.shape[cut[k]] // guess.size
                x = x.narrow(cut[k], start * unit, size * unit)
            tensors.append(x.clone())
        try:
            made.append(run(_spelled(node, guess, size), tensors))
        except Exception:  # such pieces are none that the operator takes
            return None
    if any(len(parts) != len(node.results) for parts in made):
        return None
    results: list[int | None] = []
    for value, *parts in zip(node.results, *made, strict=True):
        place = _place(value.shape, [tuple(y.shape) for y in parts], sizes, guess.size)
        if place is None:
            return None
        results.append(None if place < 0 else place)
    shapes = (guess.shape[:2],) if guess.shape else ()
    return Split(guess.operands, tuple(results), guess.argument, shapes)


def _spelled(node: Node, guess: _Guess, size: int) -> Node:
    """The call with the arguments that spell sizes made those of a piece."""
    args, kwargs = list(node.args), dict(node.kwargs)

    def put(where: Where, item: Any) -> None:
        if isinstance(where, str):
            kwargs[where] = item
        else:
            args[where] = item

    if guess.argument is not None:
        put(guess.argument, size)
    if guess.shape is not None:
        where, _, d = guess.shape
        entries = list(_argument(node, where))
        entries[d] = entries[d] // guess.size * size
        put(where, entries)
    return Node(node.op, tuple(args), kwargs, node.results)


def _place(
    whole: tuple[int, ...], parts: Sequence[tuple[int, ...]], sizes: Sequence[int], size: int
) -> int | None:
    """The dimension along which two pieces make up a result; -1 if they may add up; else None."""
    if all(part == whole for part in parts):
        return -1
    for d, n in enumerate(whole):
        wanted = [(*whole[:d], n // size * piece, *whole[d + 1 :]) for piece in sizes]
        if n % size == 0 and list(parts) == wanted:
            return d
    return None


def _goes_with(split: Split, others: Sequence[Split]) -> bool:
    """Whether a split leaves each dimension and argument to one factor, and agrees on the joins."""
    for other in others:
        both = zip(split.results, other.results, strict=True)
        if any(a is not None and a == b for a, b in both):
            return False
        if split.argument is not None and split.argument == other.argument:
            return False
    return _agree_on_joins([*others, split])


def _agree_on_joins(splits: Sequence[Split]) -> bool:
    """An operand that joins one sum must join every sum that lacks it."""
    joins = {k for split in splits for k in split.joins}
    return all(
        k in split.joins or k in dict(split.operands)
        for split in splits
        if all(d is None for d in split.results)
        for k in joins
    )
