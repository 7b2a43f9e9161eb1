"""Reshapes: the dimensions before and after are written in the factors they have in common.

``[b, s, 768] -> [b, s, 12, 64]`` is ``b s (h d) -> b s h d``: heads may be split, and so may the
batch and the sequence. Which pieces are contiguous is decided by `rule.is_valid`.
"""

from __future__ import annotations

import math

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Rule, SizeArgument
from autopar.ir.rules.arguments import bind, floating, notation, position
from autopar.ir.rules.registry import register

#: Common factors of two shapes: the factor names of each dimension on both sides, all sizes, and
#: the names of those on one side only, which must stay whole.
CommonFactors = tuple[list[list[str]], list[list[str]], dict[str, int], list[str]]


def common_factors(before: tuple[int, ...], after: tuple[int, ...]) -> CommonFactors:
    """Write two shapes of the same number of elements in the factors they share.

    Both are read from the major side; where the sizes at hand have a common divisor it is a
    shared factor, so ``(6, 4) -> (4, 6)`` shares a 2 and leaves the rest whole.
    """
    sides = before, after
    named: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    sizes: dict[str, int] = {}
    whole: list[str] = []
    at = [0, 0]
    left = [1, 1]
    while True:
        for side in (0, 1):
            while left[side] == 1 and at[side] < len(sides[side]):
                left[side] = sides[side][at[side]]
                at[side] += 1
        if left == [1, 1]:
            return named[0], named[1], sizes, whole
        shared = math.gcd(*left)
        if shared > 1:
            name = f"d{len(sizes)}"
            sizes[name] = shared
            for side in (0, 1):
                named[side][at[side] - 1].append(name)
                left[side] //= shared
        if 1 not in left:
            _keep_whole(sides, named, sizes, whole, at, left)


def _keep_whole(
    sides: tuple[tuple[int, ...], tuple[int, ...]],
    named: tuple[list[list[str]], list[list[str]]],
    sizes: dict[str, int],
    whole: list[str],
    at: list[int],
    left: list[int],
) -> None:
    """Give every dimension its own factor, up to where the two sides meet again."""
    product = [1, 1]
    while product[0] != product[1] or product == [1, 1]:
        side = 0 if product[0] <= product[1] else 1
        if left[side] == 1:
            left[side] = sides[side][at[side]]
            at[side] += 1
        if left[side] > 1:
            name = f"d{len(sizes)}"
            sizes[name] = left[side]
            whole.append(name)
            named[side][at[side] - 1].append(name)
        product[side] *= left[side]
        left[side] = 1


@register(
    "aten._unsafe_view.default",
    "aten.flatten.using_ints",
    "aten.reshape.default",
    "aten.reshape_as.default",
    "aten.view.default",
    "aten.view_as.default",
    "aten.view_copy.default",
)
def reshape(node: Node) -> Rule | None:
    """``x`` to the sizes that the call spells, or to those of its second operand."""
    before, after = node.operands[0].shape, node.results[0].shape
    if 0 in before:
        return None
    source, result, factor_sizes, whole = common_factors(before, after)
    terms = [[_token(dim) for dim in side] for side in (source, result)]
    others = [terms[1]] * (len(node.operands) - 1)
    spelled = [name for name in ("size", "shape") if name in bind(node)]
    return declare(
        node,
        notation([terms[0], *others], [terms[1]]),
        whole=whole,
        factor_sizes=factor_sizes,
        sizes=[SizeArgument(position(node, name)) for name in spelled],
        linear=floating(node, (0,)),
    )


def _token(dim: list[str]) -> str:
    if not dim:
        return "1"
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})"
