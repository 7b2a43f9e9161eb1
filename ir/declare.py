"""The notation in which operator rules are written.

One term per operand, separated by commas, then ``->`` and one term per result. A term lists the
dimensions (the empty term is a scalar), each

- ``name``: one factor,
- ``name*``: any number of dimensions, the factors ``name0, name1, …`` (aligned to the right),
- ``(h d)``: one dimension made of several factors, the major one first,
- ``1``: a dimension that is never split.

A dimension of size 1 where its factor is larger is a broadcast and gets no factor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from autopar.ir.errors import GraphError
from autopar.ir.graph import Node
from autopar.ir.rule import Assist, Dims, Factor, Rule, SizeArgument

_TOKEN = re.compile(r"\([^)]*\)|[A-Za-z_]\w*\*?|1")


def declare(
    node: Node,
    spec: str,
    *,
    whole: Sequence[str] = (),
    assisted: Mapping[str, Assist] | None = None,
    assist: str | None = None,
    always_assist: bool = False,
    linear: Sequence[Sequence[int]] = (),
    joins: Sequence[int] = (),
    sizes: Sequence[SizeArgument] = (),
    factor_sizes: Mapping[str, int] | None = None,
    flops_per_point: int = 0,
    special_per_point: tuple[int, int] = (0, 0),
    inner: Sequence[Sequence[str]] = (),
    hint_order: Sequence[int] = (),
    flatten_hint: bool = False,
    filled: Sequence[str] = (),
) -> Rule:
    """The rule of one call, from its notation and the shapes of its operands and results.

    `whole` names the factors that must not be split, `assisted` those that need the runtime
    operator `assist`; `flops_per_point` and `special_per_point` (forward and backward) are counted
    for every point of the whole loop nest;
    `factor_sizes` gives sizes that no dimension shows by itself. The remaining arguments are
    those of `Rule`.

    Raises GraphError where the notation does not fit the call.
    """
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise GraphError(f"{node.op}: rule {spec!r} has no '->'")
    shapes = [v.shape for v in node.operands], [v.shape for v in node.results]
    terms = tuple(
        _terms(node, spec, side, len(side_shapes))
        for side, side_shapes in zip((left, right), shapes, strict=True)
    )
    for side, side_terms, side_shapes in zip(("operands", "results"), terms, shapes, strict=True):
        if len(side_terms) != len(side_shapes):
            raise GraphError(
                f"{node.op}: rule {spec!r} has {len(side_terms)} {side}, "
                f"the call has {len(side_shapes)}"
            )
    named = [
        [_expand(node, term, shape) for term, shape in zip(ts, ss, strict=True)]
        for ts, ss in zip(terms, shapes, strict=True)
    ]
    known = dict(factor_sizes or {})
    _infer_sizes(node, spec, named, shapes, known)
    operands, results = (
        tuple(
            _drop_broadcast(dims, shape, known)
            for dims, shape in zip(side, side_shapes, strict=True)
        )
        for side, side_shapes in zip(named, shapes, strict=True)
    )
    assisted = assisted or {}
    order = dict.fromkeys(n for dims in operands + results for dim in dims for n in dim)
    factors = tuple(
        Factor(n, known[n], _base(n) not in whole and n not in whole, _lookup(assisted, n))
        for n in order
    )
    points = math.prod(f.size for f in factors)
    return Rule(
        factors=factors,
        operands=operands,
        results=results,
        linear=tuple(tuple(group) for group in linear),
        joins=tuple(joins),
        sizes=tuple(sizes),
        flops=flops_per_point * points,
        special=(special_per_point[0] * points, special_per_point[1] * points),
        inner=tuple(tuple(names) for names in inner),
        assist=assist,
        always_assist=always_assist,
        hint_order=tuple(hint_order),
        flatten_hint=flatten_hint,
        filled=tuple(filled),
    )


def _terms(node: Node, spec: str, side: str, tensors: int) -> list[list[str]]:
    """The tokens of each term; an empty side is one scalar, or nothing where nothing is due."""
    if not tensors and not side.strip():
        return []
    for term in side.split(","):
        unread = _TOKEN.sub(" ", term).strip()
        if unread:
            raise GraphError(f"{node.op}: rule {spec!r}: cannot read {unread!r}")
    return [_TOKEN.findall(term) for term in side.split(",")]


def _base(name: str) -> str:
    """`b` for the factor `b3` that came from `b*`."""
    return name.rstrip("0123456789")


def _lookup(assisted: Mapping[str, Assist], name: str) -> Assist | None:
    return assisted.get(name) or assisted.get(_base(name))


def _expand(node: Node, tokens: list[str], shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """The factors of each dimension of one term, its `name*` written out."""
    stars = [t for t in tokens if t.endswith("*")]
    spare = len(shape) - (len(tokens) - len(stars))
    if len(stars) > 1 or spare < 0 or (not stars and spare):
        raise GraphError(f"{node.op}: the term {' '.join(tokens)!r} does not fit shape {shape}")
    dims: list[tuple[str, ...]] = []
    for token in tokens:
        if token == "1":
            dims.append(())
        elif token.endswith("*"):
            # Aligned to the right as broadcasting is: b0 is always the last of them.
            dims.extend((f"{token[:-1]}{k}",) for k in reversed(range(spare)))
        elif token.startswith("("):
            dims.append(tuple(token[1:-1].split()))
        else:
            dims.append((token,))
    return dims


def _infer_sizes(
    node: Node,
    spec: str,
    named: list[list[list[tuple[str, ...]]]],
    shapes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
    known: dict[str, int],
) -> None:
    """Fill in the size of every factor, or refuse the rule."""
    pairs = [
        (dim, size)
        for side, side_shapes in zip(named, shapes, strict=True)
        for dims, shape in zip(side, side_shapes, strict=True)
        for dim, size in zip(dims, shape, strict=True)
    ]
    for dim, size in pairs:
        if len(dim) == 1:
            # A broadcast dimension shows 1 and says nothing of the factor's size.
            known.setdefault(dim[0], 1)
            if size != 1:
                known[dim[0]] = max(known[dim[0]], size) if size else 0
    for dim, size in pairs:
        unknown = [n for n in dim if n not in known]
        if len(unknown) == 1 and len(dim) > 1:
            known[unknown[0]] = size // max(1, math.prod(known[n] for n in dim if n in known))
    for dim, size in pairs:
        missing = [n for n in dim if n not in known]
        if missing:
            raise GraphError(f"{node.op}: rule {spec!r}: no dimension gives the size of {missing}")
        if dim and size != 1 and math.prod(known[n] for n in dim) != size:
            raise GraphError(
                f"{node.op}: rule {spec!r}: factors {dim} give "
                f"{math.prod(known[n] for n in dim)}, the dimension has {size}"
            )


def _drop_broadcast(
    dims: list[tuple[str, ...]], shape: tuple[int, ...], known: Mapping[str, int]
) -> Dims:
    return tuple(
        () if size == 1 and math.prod(known[n] for n in dim) != 1 else dim
        for dim, size in zip(dims, shape, strict=True)
    )
