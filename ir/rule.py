"""Operator rules: one declaration per operator, everything else derived from it.

A rule names the *factors* (loop dimensions) of every operand and result, like an einsum. For
``linear(x, w, b)``::

    b* i, o i, o -> b* o        i is summed; linear in x; b joins the sum once

From it follow the strategies of the operator, the layouts each strategy asks of the operands and
gives the results, its cost, and the local call. How the four states come out of a split is in
docs/design.md ("A rule is one declaration"); the notation is close to Shardy's factor mappings.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.cut import chunk, fills, is_offered, largest, simplest_unit
from autopar.ir.errors import GraphError
from autopar.ir.layout import INVARIANT, PARTIAL, REPLICATE, Layout
from autopar.ir.mesh import Mesh

#: For each dimension of a tensor the factors it is made of, the major one first. A dimension
#: without a factor (size 1, broadcast) is an empty tuple.
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Assist:
    """How a factor may be split although the plain local call would be wrong.

    The local call becomes the runtime operator `Rule.assist`.

    forward, backward:
        how many all-reduces over the splitting axes the operator makes in each direction
    over:
        the factors whose (local) sizes give the number of elements in each all-reduce
    absent:
        the state of a result that lacks the factor: "P" (a term of the sum) or "I" (the operator
        itself completes it)
    itemsize:
        bytes of an element; None: those of the operator's first operand
    """

    forward: int = 0
    backward: int = 0
    over: tuple[str, ...] = ()
    absent: str = PARTIAL
    itemsize: int | None = None


@dataclass(frozen=True)
class Factor:
    """One loop dimension of an operator.

    splittable:
        False for a *whole* factor, which no axis may split (a sorted dimension, a rolled one)
    assist:
        set where splitting needs the runtime operator `Rule.assist`
    """

    name: str
    size: int
    splittable: bool = True
    assist: Assist | None = None


@dataclass(frozen=True)
class SizeArgument:
    """An argument that spells sizes: locally it becomes the local shape of a result.

    argument:
        its position in `Node.args`, or its name in `Node.kwargs`
    result:
        the result whose shape it spells
    factor:
        set where the argument is one number, the size of this factor (the groups of a
        convolution), instead of a shape
    """

    argument: int | str
    result: int = 0
    factor: str | None = None


@dataclass(frozen=True)
class Rule:
    """The declaration of one operator call.

    factors:
        every factor by name, with its size
    operands, results:
        the factors of each tensor operand (in `Node.operands` order) and of each result
    linear:
        groups of operands in which the operator is jointly linear: with every operand of a group
        Partial (and the others whole) the results are Partial
    joins:
        operands added to a sum once (a bias): Partial along an axis that splits a summed factor
    sizes:
        arguments that spell local sizes
    flops:
        floating point operations of the whole forward call
    special:
        how many exponentials the whole call takes, forward and backward; another function counts
        as so many of them as it takes the time of
    inner:
        the factors of every tensor of the call's own size that it makes for itself: written
        forward, read backward, where its gradient is written and read as well
    assist:
        the runtime operator (``"autopar.<name>"``) that replaces the call when an axis splits an
        assisted factor. It takes the call's own (local) arguments and the keyword ``split``, a
        tuple of ``(factor, axes, whole size)`` for every split factor.
    always_assist:
        replace the call even when nothing is split (random operators)
    opaque:
        the operator is unknown to the compiler: every operand and result stays Invariant
    hint_order:
        the operands in the order a MindSpore-form strategy lists them (default: as they are)
    flatten_hint:
        operand 0 may be hinted in two entries, all leading dimensions taken as one
    filled:
        factors of which no rank's piece may be empty, because the operator fails on such a piece
        although other ranks' results depend on its call
    note:
        where the rule comes from if not from the compiler's table, or why there is none
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    joins: tuple[int, ...] = ()
    sizes: tuple[SizeArgument, ...] = ()
    flops: int = 0
    special: tuple[int, int] = (0, 0)
    inner: tuple[tuple[str, ...], ...] = ()
    assist: str | None = None
    always_assist: bool = False
    opaque: bool = False
    hint_order: tuple[int, ...] = ()
    flatten_hint: bool = False
    filled: tuple[str, ...] = ()
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        known = {f.name for f in self.factors}
        used = {n for dims in self.operands + self.results for dim in dims for n in dim}
        if used - known:
            raise GraphError(f"rule: factors {sorted(used - known)} are used but not declared")
        for name in sorted(known):
            if name in (INVARIANT, REPLICATE) or re.fullmatch(rf"{PARTIAL}\d+", name):
                raise GraphError(f"rule: a factor cannot be called {name!r}, it is a role")
        for dims in self.operands + self.results:
            found = [n for dim in dims for n in dim if self.by_name[n].splittable]
            if len(set(found)) != len(found):
                raise GraphError(f"rule: a splittable factor is used twice in one tensor: {dims}")
        if self.assist is None and any(f.assist for f in self.factors):
            raise GraphError("rule: assisted factors need the name of a runtime operator")

    def __hash__(self) -> int:
        # Rules key the planner's caches, and hashing one anew walks all of its factors.
        if "_hash" not in self.__dict__:
            key = (self.factors, self.operands, self.results, self.linear, self.joins)
            object.__setattr__(self, "_hash", hash(key))
        return self.__dict__["_hash"]

    def __getstate__(self) -> dict[str, object]:
        # Hashes of strings differ between processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @cached_property
    def by_name(self) -> dict[str, Factor]:
        return {f.name: f for f in self.factors}

    @cached_property
    def has_composite(self) -> bool:
        """Whether some dimension is made of several factors."""
        return any(len(dim) > 1 for dims in self.operands + self.results for dim in dims)

    def is_reduced(self, factor: str) -> bool:
        """Whether the factor is in an operand and in no result."""
        return not any(factor in dim for dims in self.results for dim in dims)


@dataclass(frozen=True)
class Strategy:
    """For one operator, what each mesh axis does.

    `roles` pairs every axis of the mesh with a factor name (the axis splits it), "I" (every rank
    computes the same), "R" (the same, gradients passed on as terms) or "P<k>" (the operands of
    the k-th linear group are terms, and so are the results). Axes of one factor are listed with
    the major one first; otherwise the order is the mesh's.
    """

    roles: tuple[tuple[str, str], ...]

    @staticmethod
    def invariant(mesh: Mesh) -> Strategy:
        return Strategy(tuple((axis, INVARIANT) for axis in mesh.names))

    @cached_property
    def role(self) -> dict[str, str]:
        return dict(self.roles)

    def axes_of(self, factor: str) -> tuple[str, ...]:
        """The axes that split a factor, major first."""
        return tuple(axis for axis, role in self.roles if role == factor)

    def __str__(self) -> str:
        return " ".join(f"{axis}:{role}" for axis, role in self.roles)


def is_copy_role(role: str, rule: Rule) -> bool:
    """Whether a role splits no factor of the rule."""
    return role not in rule.by_name


def opaque_rule(operand_ranks: Sequence[int], result_ranks: Sequence[int], note: str = "") -> Rule:
    """The rule of an unknown operator: nothing is split, everything is Invariant."""
    return Rule(
        factors=(),
        operands=tuple(((),) * rank for rank in operand_ranks),
        results=tuple(((),) * rank for rank in result_ranks),
        opaque=True,
        note=note,
    )


def operand_layout(rule: Rule, strategy: Strategy, index: int, grad: bool, mesh: Mesh) -> Layout:
    """The layout a strategy asks of one operand; `grad`: a gradient flows back through it."""
    dims = rule.operands[index]
    replicate, partial = [], []
    for axis, role in strategy.roles:
        if role == INVARIANT:
            continue
        if role in rule.by_name:
            if any(role in dim for dim in dims):
                continue
            if index in rule.joins and rule.is_reduced(role):
                partial.append(axis)
            elif grad:
                replicate.append(axis)
        elif role.startswith(PARTIAL) and index in rule.linear[int(role[1:])]:
            partial.append(axis)
        elif grad:
            replicate.append(axis)
    return _layout(rule, strategy, dims, replicate, partial, mesh)


def result_layout(rule: Rule, strategy: Strategy, index: int, grad: bool, mesh: Mesh) -> Layout:
    """The layout a strategy gives one result; `grad`: a gradient flows through it."""
    dims = rule.results[index]
    replicate, partial = [], []
    for axis, role in strategy.roles:
        if role == INVARIANT:
            continue
        if role in rule.by_name:
            if any(role in dim for dim in dims):
                continue
            assist = rule.by_name[role].assist
            if assist is None or assist.absent == PARTIAL:
                partial.append(axis)
        elif role.startswith(PARTIAL):
            partial.append(axis)
        elif grad:
            replicate.append(axis)
    return _layout(rule, strategy, dims, replicate, partial, mesh)


def _layout(
    rule: Rule,
    strategy: Strategy,
    dims: Dims,
    replicate: Sequence[str],
    partial: Sequence[str],
    mesh: Mesh,
) -> Layout:
    split = tuple(tuple(a for f in dim for a in strategy.axes_of(f)) for dim in dims)
    units: tuple[int, ...] = ()
    if rule.has_composite:
        units = tuple(_unit(rule, strategy, dim, mesh) if len(dim) > 1 else 1 for dim in dims)
    return Layout.make(split, replicate, partial, units)


def _unit(rule: Rule, strategy: Strategy, dim: tuple[str, ...], mesh: Mesh) -> int:
    """The elements that stay together in a composite dimension: those behind the last split."""
    axes = tuple(a for f in dim for a in strategy.axes_of(f))
    if not axes:
        return 1
    sizes = [rule.by_name[f].size for f in dim]
    last = max(k for k, f in enumerate(dim) if strategy.axes_of(f))
    return simplest_unit(math.prod(sizes), mesh.sizes_of(axes), math.prod(sizes[last + 1 :]))


def local_factor_size(
    rule: Rule,
    strategy: Strategy,
    factor: str,
    mesh: Mesh,
    coordinates: Mapping[str, int] | None = None,
) -> int:
    """The size of a factor on the rank at `coordinates`; without them, the largest of any rank."""
    size, axes = rule.by_name[factor].size, strategy.axes_of(factor)
    if not coordinates:
        return largest(size, mesh.sizes_of(axes))
    for axis in axes:
        start, stop = chunk(size, mesh.axis_size(axis), coordinates[axis])
        size = stop - start
    return size


def is_valid(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether every split factor is splittable and contiguous, and empty only where it may be.

    A minor factor of a composite dimension may be split only where its major factors are split
    down to single elements: only then is a rank's piece one block of the dimension.
    """
    return _is_contiguous(rule, strategy, mesh) and all(
        factor.splittable
        and factor.size > 1
        and (factor.name not in rule.filled or fills(factor.size, counts))
        for factor, counts in _cuts(rule, strategy, mesh)
    )


def is_searched(rule: Rule, strategy: Strategy, mesh: Mesh, asked: Collection[str] = ()) -> bool:
    """Whether a strategy is valid, and its cuts are ones that a search should consider.

    asked:
        the factors of which any valid cut will do (a hint asks for it)
    """
    return is_valid(rule, strategy, mesh) and all(
        factor.name in asked or is_offered(factor.size, counts)
        for factor, counts in _cuts(rule, strategy, mesh)
    )


def _cuts(rule: Rule, strategy: Strategy, mesh: Mesh) -> Iterator[tuple[Factor, tuple[int, ...]]]:
    """Every factor that is split, with the sizes of the axes that split it."""
    for name in dict.fromkeys(role for _, role in strategy.roles if role in rule.by_name):
        yield rule.by_name[name], mesh.sizes_of(strategy.axes_of(name))


def _is_contiguous(rule: Rule, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether every minor factor that is split stands behind major ones of one element each.

    A dimension with a factor of size 0 has no elements, so no units in which it could be cut.
    """
    if not rule.has_composite:
        return True
    for factor, _ in _cuts(rule, strategy, mesh):
        for dims in rule.operands + rule.results:
            for dim in dims:
                if factor.name in dim and not all(rule.by_name[name].size for name in dim):
                    return False
                for major in dim[: dim.index(factor.name)] if factor.name in dim else ():
                    axes = strategy.axes_of(major)
                    if rule.by_name[major].size != mesh.axis_size(*axes):
                        return False
    return True


def strategies(
    rule: Rule,
    mesh: Mesh,
    *,
    grad: bool,
    axis_orders: bool = False,
    asked: Collection[str] = (),
) -> tuple[Strategy, ...]:
    """The valid strategies of a rule on a mesh that a search should consider, in a fixed order.

    grad:
        whether a gradient flows through the operator; without one "R" is the same as "I"
    axis_orders:
        also list the orders other than the mesh's of several axes that split one factor
    asked:
        the factors of which every valid cut is listed, the best or not (a hint asks for it)
    """
    if rule.opaque:
        return (Strategy.invariant(mesh),)
    roles = [f.name for f in rule.factors if f.splittable and f.size > 1]
    roles.append(INVARIANT)
    if grad:
        roles.append(REPLICATE)
    roles.extend(f"{PARTIAL}{k}" for k in range(len(rule.linear)))
    found: list[Strategy] = []
    for choice in itertools.product(roles, repeat=len(mesh.axes)):
        base = Strategy(tuple(zip(mesh.names, choice, strict=True)))
        for strategy in _axis_orders(base, rule) if axis_orders else (base,):
            if is_searched(rule, strategy, mesh, asked):
                found.append(strategy)
    return tuple(found)


def _axis_orders(strategy: Strategy, rule: Rule) -> list[Strategy]:
    """The strategy with every order of the axes that share a factor."""
    return [
        Strategy(permuted)
        for permuted in itertools.permutations(strategy.roles)
        if all(_may_replace(a, b, rule) for a, b in zip(strategy.roles, permuted, strict=True))
    ]


def _may_replace(mine: tuple[str, str], other: tuple[str, str], rule: Rule) -> bool:
    """Whether a pair of axis and role may stand in another's place: both split one factor."""
    return mine == other or (mine[1] == other[1] and not is_copy_role(mine[1], rule))


def flops_of_factors(rule_factors: Sequence[Factor], per_point: int = 1) -> int:
    """`per_point` operations for every point of the loop nest."""
    return per_point * math.prod(f.size for f in rule_factors)
