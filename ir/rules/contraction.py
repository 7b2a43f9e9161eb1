"""Products of matrices: every factor may be split, a summed one leaves the result Partial.

All are linear in each operand; a bias is added once, so it is taken together with either.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.declare import declare
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Rule
from autopar.ir.rules.arguments import bind, floating
from autopar.ir.rules.registry import register

#: Operations for each point of the loop nest: a multiplication and an addition.
_MULTIPLY_ADD = 2

#: The alignment of rows that PyTorch's grouped product asks for.
_ALIGNED_BYTES = 16


@register("aten.linear.default")
def linear(node: Node) -> Rule:
    """``x [b…, i]``, ``w [o, i]``, ``b [o]`` (optional) to ``[b…, o]``."""
    weight = "o i" if len(node.operands[1].shape) == 2 else "i"
    output = "o" if weight == "o i" else ""
    biased = len(node.operands) == 3
    bias = f", {output}" if biased else ""
    return declare(
        node,
        f"b* i, {weight}{bias} -> b* {output}",
        linear=floating(node, *(((0, 2), (1, 2)) if biased else ((0,), (1,)))),
        joins=(2,) if biased else (),
        flops_per_point=_MULTIPLY_ADD,
        flatten_hint=True,
    )


@register("aten.matmul.default")
def matmul(node: Node) -> Rule:
    """Vectors, matrices, or batches of matrices whose leading dimensions are broadcast."""
    left, right = (len(v.shape) for v in node.operands)
    spec = {
        (True, True): "k, k -> ",
        (True, False): "k, b* k n -> b* n",
        (False, True): "b* m k, k -> b* m",
        (False, False): "b* m k, b* k n -> b* m n",
    }[left == 1, right == 1]
    return _product(node, spec, flatten_hint=right == 2)


@register("aten.mm.default")
def mm(node: Node) -> Rule:
    return _product(node, "m k, k n -> m n")


@register("aten.bmm.default")
def bmm(node: Node) -> Rule:
    return _product(node, "b m k, b k n -> b m n")


@register("aten.mv.default")
def mv(node: Node) -> Rule:
    return _product(node, "m k, k -> m")


@register("aten.dot.default", "aten.vdot.default")
def dot(node: Node) -> Rule:
    return _product(node, "k, k -> ")


@register("aten.ger.default", "aten.outer.default")
def outer(node: Node) -> Rule:
    return _product(node, "m, n -> m n")


@register("aten.inner.default")
def inner(node: Node) -> Rule | None:
    """The last dimensions are summed; a number has no rule."""
    left, right = (len(v.shape) for v in node.operands)
    if not left or not right:
        return None
    first = " ".join(f"m{k}" for k in range(left - 1))
    second = " ".join(f"n{k}" for k in range(right - 1))
    return _product(node, f"{first} k, {second} k -> {f'{first} {second}'.strip()}")


def _product(node: Node, spec: str, *, flatten_hint: bool = False) -> Rule:
    return declare(
        node,
        spec,
        linear=floating(node, (0,), (1,)),
        flops_per_point=_MULTIPLY_ADD,
        flatten_hint=flatten_hint,
    )


@register("aten.addmm.default")
def addmm(node: Node) -> Rule:
    return _sum_of_product(node, "m n", "m k, k n")


@register("aten.baddbmm.default")
def baddbmm(node: Node) -> Rule:
    return _sum_of_product(node, "b m n", "b m k, b k n")


@register("aten.addbmm.default")
def addbmm(node: Node) -> Rule:
    """The products of a batch are summed, so the batch is a summed factor too."""
    return _sum_of_product(node, "m n", "b m k, b k n")


@register("aten.addmv.default")
def addmv(node: Node) -> Rule:
    return _sum_of_product(node, "m", "m k, k")


@register("aten.addr.default")
def addr(node: Node) -> Rule:
    return _sum_of_product(node, "m n", "m, n")


def _sum_of_product(node: Node, result: str, factors: str) -> Rule:
    """``added + a @ b``, where `added` is broadcast to the result and joins the sum once."""
    rank = len(node.operands[0].shape)
    added = " ".join(result.split()[len(result.split()) - rank :])
    return declare(
        node,
        f"{added}, {factors} -> {result}",
        linear=floating(node, (0, 1), (0, 2)),
        joins=(0,),
        flops_per_point=_MULTIPLY_ADD,
        hint_order=(1, 2, 0),
    )


@register("aten.bilinear.default")
def bilinear(node: Node) -> Rule:
    """``x1 [b…, i]``, ``x2 [b…, j]``, ``w [o, i, j]``, ``b [o]`` (optional) to ``[b…, o]``."""
    biased = len(node.operands) == 4
    groups = [(k, 3) if biased else (k,) for k in range(3)]
    return declare(
        node,
        f"b* i, b* j, o i j{', o' if biased else ''} -> b* o",
        linear=floating(node, *groups),
        joins=(3,) if biased else (),
        flops_per_point=_MULTIPLY_ADD,
        filled=("i", "j"),
    )


@register("aten.einsum.default")
def einsum(node: Node) -> Rule | None:
    """The equation is the rule already. A repeated letter in a term (a diagonal) has no rule."""
    equation: str = bind(node)["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in (t.replace("...", "") for t in terms)):
        return None
    if not arrow:
        letters = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(letters)
    if "..." in left and "..." not in right:
        return None
    spec = f"{', '.join(map(_einsum_term, terms))} -> {_einsum_term(right)}"
    return declare(
        node,
        spec,
        linear=floating(node, *((k,) for k in range(len(terms)))),
        flops_per_point=_MULTIPLY_ADD,
    )


def _einsum_term(term: str) -> str:
    """Factors of an einsum term; capital letters get names that no role of a strategy has."""
    before, dots, after = term.partition("...")

    def spread(part: str) -> list[str]:
        return [c if c.islower() else c.lower() * 2 for c in part]

    return " ".join([*spread(before), *(["dots*"] if dots else []), *spread(after)])


@register("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(node: Node) -> Rule | None:
    """``x [t, k]`` in groups of rows, each with its own matrix of ``w [e, k, n]``, to ``[t, n]``.

    Where a group ends is known only at run time, and every rank is told of all groups. Then rows
    may be split, and so may the matrices: a rank makes the rows of its own groups and leaves zeros
    for the others. PyTorch's kernel wants rows of whole 16 bytes, so the last elements of a row
    stay together.
    """
    if [len(v.shape) for v in node.operands] != [2, 3, 1]:
        return None
    x, weight = node.operands[:2]
    lanes = _ALIGNED_BYTES // x.dtype.itemsize if node.op.startswith("aten.") else 1
    if x.shape[1] % lanes or weight.shape[2] % lanes:
        return None
    rule = declare(
        node,
        "t (k lanes), e (k lanes) (n columns), ends -> t (n columns)",
        whole=["ends", "lanes", "columns"],
        filled=["k", "t", "e"],
        assisted={"t": Assist(), "e": Assist()},
        assist="autopar.grouped_mm" if node.op.startswith("aten.") else "autopar.grouped_mm_each",
        factor_sizes={"lanes": lanes, "columns": lanes},
    )
    return replace(rule, flops=_MULTIPLY_ADD * x.numel * weight.shape[2])
