"""Does a rule hold, on given tensors? The pieces that a cut makes are run and put together.

This is the definition of a rule, taken literally and without communication: every rank's operands
are cut out of the whole ones as the four states say, the operator runs on each, and what the ranks
hold is put together and compared with the operator run whole, results and gradients alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Node, map_values
from autopar.ir.layout import PARTIAL, REPLICATE
from autopar.ir.rule import Dims, Rule
from autopar.ir.trace_grad import overload

#: What PyTorch says of an operator without a backward.
_NO_BACKWARD = ("no autograd formula was registered", "derivative for", "is not implemented for")

#: dtype -> the largest error, relative to the numbers at hand.
Tolerance = Callable[[torch.dtype], float]

#: A position along every cut -> what the rank there holds.
Pieces = dict[tuple[int, ...], Tensor]


class NoBackward(Exception):  # noqa: N818  (an outcome, not an error)
    """The operator has no backward, so that no gradient can be wrong."""


@dataclass(frozen=True)
class Cut:
    """What one imagined mesh axis does.

    role:
        a factor of the rule, "P<k>" or "R", as in a `Strategy`
    sizes:
        the sizes of the factor's pieces, one for each rank; for other roles only their number
        counts
    """

    role: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        if self.role == REPLICATE:
            return "giving each rank a term of the gradients"
        if self.role.startswith(PARTIAL) and self.role[1:].isdigit():
            return f"giving each rank a term of linear group {self.role[1:]}"
        return f"splitting {self.role!r} into {' + '.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class Whole:
    """One call run whole; `cotangents` and `gradients` are None where no gradient flows."""

    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]

    @cached_property
    def scale(self) -> float:
        """The largest finite number that went in, at least 1: what cancels is as uncertain."""
        given = (*self.tensors, *(g for g in self.cotangents if g is not None))
        return max(1.0, *(_largest(x) for x in given))

    @cached_property
    def is_finite(self) -> bool:
        """Whether all operands are."""
        return all(bool(torch.isfinite(x).all()) for x in self.tensors)


@dataclass(frozen=True)
class _State:
    """How the pieces of one tensor come about along one cut.

    kind:
        "split" along `dim` in runs of `unit` elements, "terms" of a sum, or "copies"
    """

    kind: str
    dim: int = 0
    unit: int = 1


def run(node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a call on these tensors. Raises what the operator raises."""
    queue = iter(tensors)
    device = tensors[0].device if tensors else torch.device("cpu")

    def place(item: Any) -> Any:
        if isinstance(item, (tuple, list)):
            return type(item)(place(part) for part in item)
        return device if isinstance(item, torch.device) else item

    args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
    made = overload(node.op)(
        *(place(item) for item in args), **{key: place(item) for key, item in kwargs.items()}
    )
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def run_whole(node: Node, tensors: Sequence[Tensor], generator: torch.Generator) -> Whole:
    """Run a call and its backward, from random gradients of its results.

    Raises what the operator raises.
    """
    leaves = _leaves(node, tensors)
    results = run(node, leaves)
    cotangents = tuple(
        noise(y, generator) if value.grad else None
        for y, value in zip(results, node.results, strict=True)
    )
    gradients = _gradients(node, leaves, results, cotangents)
    return Whole(tuple(tensors), tuple(y.detach() for y in results), cotangents, gradients)


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers of about the size of a tensor's entries (not below 1), of its dtype."""
    finite = like.detach().abs()
    finite = finite[torch.isfinite(finite)]
    scale = max(1.0, float(finite.double().mean()) if finite.numel() else 1.0)
    wide = torch.complex128 if like.is_complex() else torch.float64
    drawn = torch.randn(like.shape, dtype=wide, generator=generator) * scale
    if not (like.is_floating_point() or like.is_complex()):
        drawn = drawn.round() * 3
    return drawn.to(device=like.device, dtype=like.dtype)


def difference(
    node: Node,
    rule: Rule,
    cuts: Sequence[Cut],
    whole: Whole,
    generator: torch.Generator,
    tolerance: Tolerance,
) -> str:
    """What differs between a call cut as a rule says and the call run whole; "" for nothing.

    cuts:
        the imagined mesh axes; a cut of a minor factor comes after those of the major ones in
        front of it, which leave single elements
    tolerance:
        the largest error of a dtype, relative to the largest number
    """
    operands = [_states(rule, rule.operands[k], cuts, k) for k in range(len(node.operands))]
    results = [_states(rule, dims, cuts, None) for dims in rule.results]
    owed = [[_dual(state) for state in states] for states in results]
    given = [
        _pieces(x, states, cuts, generator)
        for x, states in zip(whole.tensors, operands, strict=True)
    ]
    arriving = [
        None if g is None else _pieces(g, states, cuts, generator)
        for g, states in zip(whole.cotangents, owed, strict=True)
    ]
    made: list[Pieces] = [{} for _ in results]
    back: list[Pieces] = [{} for _ in operands]
    for at in itertools.product(*(range(len(cut.sizes)) for cut in cuts)):
        local = _local(node, rule, cuts, at)
        try:
            leaves = _leaves(node, [pieces[at] for pieces in given])
            ys = run(local, leaves)
            gs = [None if pieces is None else pieces[at] for pieces in arriving]
            for y, g in zip(ys, gs, strict=True):
                if g is not None and y.shape != g.shape:
                    return f"a piece of a result has the shape {tuple(y.shape)}"
            grads = _gradients(node, leaves, ys, gs)
        except Exception as error:
            return f"on a piece the operator fails: {one_line(error)}"
        for k, y in enumerate(ys):
            made[k][at] = y.detach()
        for k, grad in enumerate(grads):
            if grad is not None:
                back[k][at] = grad
    for k, want in enumerate(whole.results):
        if found := _differs(made[k], results[k], want, tolerance, whole.scale):
            return f"result {k} {found}"
    for k, grad in enumerate(whole.gradients):
        if grad is not None:
            dual = [_dual(state) for state in operands[k]]
            if found := _differs(back[k], dual, grad, tolerance, whole.scale):
                return f"the gradient of operand {k} {found}"
    return ""


def compare(got: Tensor, want: Tensor, tolerance: Tolerance, scale: float = 1.0) -> str:
    """How one tensor differs from another; "" where it does not.

    scale:
        the size of the numbers that were added and subtracted on the way
    """
    if got.shape != want.shape:
        return f"has the shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"is of {got.dtype} instead of {want.dtype}"
    if not _inexact(want):
        return "" if torch.equal(got, want) else "differs"
    if not want.numel() or float((got - want).abs().max()) <= tolerance(want.dtype) * scale:
        return ""
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(got), finite):
        return "is not finite in other places"
    largest = _largest(want)
    error = _largest((got - want)[finite])
    if error <= tolerance(want.dtype) * (scale + largest):
        return ""
    return f"differs by {error:.3g} (its largest entry is {largest:.3g})"


def _largest(x: Tensor) -> float:
    """The largest absolute value of a tensor's finite entries, 0 if there is none."""
    x = x.detach()
    if not _inexact(x):
        return float(x.double().abs().max()) if x.numel() else 0.0
    return float(x.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if x.numel() else 0.0


# --- states ------------------------------------------------------------------------------------


def _states(rule: Rule, dims: Dims, cuts: Sequence[Cut], operand: int | None) -> list[_State]:
    """The state of a tensor's value along every cut; `operand` is its number, None for a result."""
    states = []
    for cut in cuts:
        if cut.role in rule.by_name:
            place = next((d for d, dim in enumerate(dims) if cut.role in dim), None)
            if place is not None:
                minor = dims[place][dims[place].index(cut.role) + 1 :]
                unit = math.prod(rule.by_name[name].size for name in minor)
                states.append(_State("split", place, unit))
                continue
            joins = operand in rule.joins and rule.is_reduced(cut.role)
            states.append(_State("terms" if operand is None or joins else "copies"))
        elif cut.role == REPLICATE:
            states.append(_State("copies"))
        else:
            group = rule.linear[int(cut.role[1:])]
            states.append(_State("terms" if operand is None or operand in group else "copies"))
    return states


def _dual(state: _State) -> _State:
    """The state of a gradient whose value is in a state."""
    kind = {"terms": "copies", "copies": "terms"}.get(state.kind, state.kind)
    return _State(kind, state.dim, state.unit)


def _pieces(
    x: Tensor, states: Sequence[_State], cuts: Sequence[Cut], generator: torch.Generator
) -> Pieces:
    held: Pieces = {(): x.detach()}
    for state, cut in zip(states, cuts, strict=True):
        finer: Pieces = {}
        for at, part in held.items():
            count = len(cut.sizes)
            if state.kind == "split":
                parts = part.split([size * state.unit for size in cut.sizes], state.dim)
            elif state.kind == "terms":
                rest = [noise(part, generator) for _ in range(count - 1)]
                parts = (part - sum(rest, torch.zeros_like(part)), *rest)
            else:
                parts = (part,) * count
            finer.update({(*at, k): piece for k, piece in enumerate(parts)})
        held = finer
    return held


def _differs(
    pieces: Pieces,
    states: Sequence[_State],
    want: Tensor,
    tolerance: Tolerance,
    scale: float,
) -> str:
    """How what the ranks hold together differs from a whole tensor."""
    for state in reversed(states):
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for at, piece in sorted(pieces.items(), key=lambda item: item[0]):
            rows.setdefault(at[:-1], []).append(piece)
        try:
            if state.kind == "split":
                pieces = {at: torch.cat(row, state.dim) for at, row in rows.items()}
            elif state.kind == "terms":
                pieces = {at: sum(row[1:], row[0]) for at, row in rows.items()}
            else:
                for row in rows.values():
                    for other in row[1:]:
                        if compare(other, row[0], tolerance, scale):
                            return "is not the same on all ranks"
                pieces = {at: row[0] for at, row in rows.items()}
        except RuntimeError as error:  # pieces whose shapes do not fit together, terms of bools
            return f"has pieces that do not fit together: {one_line(error)}"
    return compare(pieces[()], want, tolerance, scale)


def _local(node: Node, rule: Rule, cuts: Sequence[Cut], at: tuple[int, ...]) -> Node:
    """The call of one rank: arguments that spell sizes are made local."""
    if not rule.sizes:
        return node
    args, kwargs = list(node.args), dict(node.kwargs)
    size_of = {cut.role: cut.sizes[k] for cut, k in zip(cuts, at, strict=True)}
    for spelled in rule.sizes:
        where: Any = args if isinstance(spelled.argument, int) else kwargs
        if spelled.factor is not None:
            whole = rule.by_name[spelled.factor].size if spelled.factor in rule.by_name else None
            if whole is not None:
                where[spelled.argument] = size_of.get(spelled.factor, whole)
            continue
        dims = rule.results[spelled.result]
        where[spelled.argument] = [
            math.prod(size_of.get(name, rule.by_name[name].size) for name in dim) if dim else size
            for dim, size in zip(dims, node.results[spelled.result].shape, strict=True)
        ]
    return Node(node.op, tuple(args), kwargs, node.results)


# --- running -----------------------------------------------------------------------------------


def _leaves(node: Node, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        x.detach().clone().requires_grad_(node.operand_grad(k) and _inexact(x))
        for k, x in enumerate(tensors)
    ]


def _gradients(
    node: Node,
    leaves: Sequence[Tensor],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradient of every operand that has one; zeros where the operator gives none."""
    flowing = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None]
    wanted = [x for x in leaves if x.requires_grad]
    if not flowing or not wanted:
        return (None,) * len(leaves)
    if not all(y.requires_grad for y, _ in flowing):
        raise NoBackward("a result carries no gradient")
    try:
        made = torch.autograd.grad(
            [y for y, _ in flowing], wanted, [g for _, g in flowing], allow_unused=True
        )
    except (RuntimeError, NotImplementedError) as error:
        if any(words in str(error) for words in _NO_BACKWARD):
            raise NoBackward(one_line(error)) from error
        raise
    found = iter(made)
    gradients = []
    for x in leaves:
        grad = next(found) if x.requires_grad else None
        gradients.append(torch.zeros_like(x) if grad is None and x.requires_grad else grad)
    return tuple(gradients)


def _inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def one_line(error: BaseException) -> str:
    """What kind of error it is, and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:200] if text else type(error).__name__
