"""Calls of an operator on other sizes than the traced ones, on which it can be tried.

Sizes that are equal in the traced call stay equal. Different ones become different small numbers,
none a multiple of another, so that a size tells which dimension it came from. Not every operator
takes them (heads must divide a width, a window a sequence), so others follow until it runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Node, Value, map_values
from autopar.ir.probe_rule import CannotRun, Subject, subject_of

#: Small sizes, none a multiple of another.
_SMALL = (6, 7, 8, 9, 10, 11, 13, 15, 17)

#: Sizes at which a window of a few rows no longer spans everything.
_LARGER = (20, 16, 18, 24, 32)

#: The largest number that is taken for one that a size must be a multiple of.
_KEPT = 64

#: Elements, times the largest size, that a call may have which is tried.
_AFFORDABLE = 1 << 20

#: Elements that an intermediate tensor may have which is quadratic in one size.
_QUADRATIC = 1 << 24


@dataclass(frozen=True)
class Resized:
    """A call on other sizes.

    sizes:
        traced size -> the size here; sizes of 0 and 1 never change
    lists, numbers:
        whether sizes among the call's lists and numbers were changed as well
    """

    subject: Subject
    sizes: Mapping[int, int]
    lists: bool = False
    numbers: bool = False


def trial(node: Node) -> Resized:
    """A traced call on small sizes. Raises Unsure where the operator runs on none that is tried."""
    classes = _classes(node)
    small = dict(zip(classes, itertools.cycle(_SMALL), strict=False))
    failure: CannotRun | None = None
    for sizes in (small, *_shrunk(node, classes)):
        for lists, numbers in _spellings(node, sizes):
            try:
                subject = subject_of(resized(node, sizes, lists, numbers))
            except CannotRun as error:
                failure = failure or error
                continue
            found = Resized(subject, sizes, lists, numbers)
            return found if sizes is small else _nearer(node, found, small)
    assert failure is not None
    raise failure


def _shrunk(node: Node, classes: Sequence[int]) -> Iterator[dict[int, int]]:
    """The traced sizes, halved together as long as they are too large to be tried."""
    for step in (1 << k for k in range(20)):
        sizes = {s: s // step if s % step == 0 and s // step > 1 else s for s in classes}
        if is_affordable(node, sizes):
            yield sizes
            return
    # Some sizes could not be halved as often as others.
    yield {s: min(s, _least(s)) for s in classes}


def _least(size: int) -> int:
    """A size halved down to what is just not small."""
    while size % 2 == 0 and size > 2 * _SMALL[0]:
        size //= 2
    return size


def _elements(node: Node, sizes: Mapping[int, int]) -> int:
    """The elements of the operands, counting twice a tensor's largest size: for what is between."""
    shapes = [[sizes.get(s, s) for s in v.shape] for v in node.operands]
    return sum(math.prod(shape) * max(shape, default=1) for shape in shapes)


def _nearer(node: Node, found: Resized, small: Mapping[int, int]) -> Resized:
    """The call with as many of its sizes as possible made small and different."""
    numbers = sorted({n for n in _numbers(node) if 1 < n <= _KEPT})
    for size, wanted in small.items():
        fitting = [n * m for n in numbers for m in (2, 3, 4)]
        others = [s for key, s in found.sizes.items() if key != size and s >= 2]
        ratios = [s * m for s in others for m in (2, 3)]
        options = [n for n in (wanted, 2 * wanted, *fitting, *ratios) if n >= 4]
        for option in dict.fromkeys(options):
            if option == found.sizes[size]:
                break
            sizes = {**found.sizes, size: option}
            try:
                subject = subject_of(resized(node, sizes, found.lists, found.numbers))
            except CannotRun:
                continue
            found = Resized(subject, sizes, found.lists, found.numbers)
            break
    return found


def larger(node: Node, small: Resized, along: Sequence[int]) -> Iterator[Resized]:
    """The call with some traced sizes larger than in `small`: moderately, then as traced.

    Sizes too large to run are lowered. Raises CannotRun where the operator does not run on the
    traced sizes (or the lowered ones).
    """
    truth, base = max(along), min(along)
    others = {s: n for s, n in small.sizes.items() if s not in along}
    few = dict(zip(others, itertools.cycle((2, 3, 4)), strict=False))

    def scaled(step: int) -> dict[int, int]:
        return {s: step * max(1, small.sizes[s] // small.sizes[base]) for s in along}

    steps = [n for n in _LARGER if small.sizes[base] < n < truth]
    moderate = _first(node, small, [{**others, **scaled(n)} for n in steps])
    if moderate is not None:
        yield moderate
    options: list[dict[int, int]] = []
    for rest in (few, others):
        most = math.isqrt(_QUADRATIC // max(1, math.prod(rest.values())))
        if truth <= most:
            options.append({**rest, **{s: s for s in along}})
        else:
            options.extend({**rest, **scaled(n)} for n in _lowered(truth, most))
    traced = {s: s for s in small.sizes}
    if is_affordable(node, traced):
        options.append(traced)
    found = _first(node, small, options)
    if found is None:
        raise CannotRun(f"it cannot be run on larger sizes than {small.sizes[truth]}")
    yield found


def as_traced(node: Node, small: Resized) -> Resized | None:
    """The call on all its traced sizes; None where they are too many elements to try."""
    traced = {s: s for s in small.sizes}
    return _first(node, small, [traced]) if is_affordable(node, traced) else None


def is_affordable(node: Node, sizes: Mapping[int, int]) -> bool:
    """Whether a call on some sizes is small enough to be tried."""
    return _elements(node, sizes) <= _AFFORDABLE


def _lowered(size: int, most: int) -> list[int]:
    """Sizes below `most`, first one that divides the given size."""
    found = [size // k for k in range(2, size) if size % k == 0 and size // k <= most]
    return [*found[:1], most - most % 8, most]


def _first(node: Node, small: Resized, options: Sequence[dict[int, int]]) -> Resized | None:
    """The call on the first sizes on which it runs."""
    for sizes in options:
        try:
            subject = subject_of(resized(node, sizes, small.lists, small.numbers), brief=True)
        except CannotRun:
            continue
        return Resized(subject, sizes, small.lists, small.numbers)
    return None


def _classes(node: Node) -> list[int]:
    """The different sizes of the operands, in the order they are met."""
    return list(dict.fromkeys(s for v in node.operands for s in v.shape if s > 1))


def _numbers(node: Node) -> list[int]:
    """Every whole number among the arguments."""
    found: list[int] = []

    def look(item: Any) -> None:
        if isinstance(item, (tuple, list)):
            for part in item:
                look(part)
        elif isinstance(item, int) and not isinstance(item, bool):
            found.append(item)

    look([*node.args, *node.kwargs.values()])
    return found


def _spellings(node: Node, sizes: Mapping[int, int]) -> list[tuple[bool, bool]]:
    """Whether sizes in lists and numbers are changed: neither first, both last."""
    found = [(False, False)]
    items = [*node.args, *node.kwargs.values()]
    if any(_in_lists(item, sizes) for item in items):
        found.append((True, False))
    if any(_is_size(item, sizes) for item in items):
        found.append((True, True))
    return found


def _in_lists(item: Any, sizes: Mapping[int, int]) -> bool:
    return isinstance(item, (tuple, list)) and any(_is_size(part, sizes) for part in item)


def _is_size(item: Any, sizes: Mapping[int, int]) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item in sizes


def resized(node: Node, sizes: Mapping[int, int], lists: bool, numbers: bool) -> Node:
    """The call on other sizes; the shapes of its results are not worked out."""

    def resize(value: Value) -> Value:
        shape = tuple(sizes.get(s, s) for s in value.shape)
        return Value(value.name, shape, value.dtype, value.grad)

    def respell(item: Any) -> Any:
        if lists and _in_lists(item, sizes):
            return type(item)(sizes[p] if _is_size(p, sizes) else p for p in item)
        return sizes[item] if numbers and _is_size(item, sizes) else item

    args = tuple(respell(item) for item in node.args)
    kwargs = {key: respell(item) for key, item in node.kwargs.items()}
    new_args, new_kwargs = map_values((args, kwargs), resize)
    return Node(node.op, new_args, new_kwargs, node.results)
