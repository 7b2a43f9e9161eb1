"""What a call keeps besides its operands and results, under every split of its factors.

Each factor that may be split is split once, by the smallest prime of its size, and the local call
observed: the internals that became smaller run along that factor. So their bytes under any
strategy follow without observing each. Where the split needs an assisted operator, that one is
observed; what it keeps is taken to shrink as its first operand does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Factor, Rule, Strategy, is_valid, operand_layout
from autopar.passes.localise import local_call
from autopar.passes.memory.saved import (
    Backward,
    Call,
    Forward,
    Resolve,
    Spec,
    observe,
    observe_backward,
)

#: Makes, for a mesh, what one rank runs for an operator (`autopar.dry_run.dry_operators`).
Probe = Callable[[Mesh], Resolve]

_AXIS = "probe"
_ALONE = Mesh.of({_AXIS: 1})


@dataclass(frozen=True)
class Piece:
    """Bytes of something the whole call needs, and the factors it shrinks with."""

    nbytes: int
    factors: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Assisted:
    """The call with an assisted factor split.

    operands:
        which operands are saved
    internals, forward, backward:
        as in `Kept`; bytes on one rank, times the pieces of the split
    """

    operands: frozenset[int]
    internals: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Kept:
    """What one call keeps and uses besides operands and results; all of it for no split.

    internals:
        what autograd keeps
    forward, backward:
        what is used for a moment while either runs
    assisted:
        factor -> what changes where it is split
    """

    internals: tuple[Piece, ...] = ()
    forward: Piece = Piece(0)
    backward: Piece = Piece(0)
    assisted: Mapping[str, Assisted] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seen:
    forward: Forward
    backward: Backward

    @property
    def internals(self) -> list[int]:
        """Bytes of the storages that are saved and hold no operand or result."""
        made = set(self.forward.homes)
        first = len(self.backward.grads)
        return [
            self.forward.fresh[k - first]
            for k in sorted(self.forward.saved)
            if k >= first and k not in made
        ]


def kept_by(
    node: Node,
    rule: Rule,
    operands: Sequence[Spec],
    resolve: Resolve,
    probe: Probe | None = None,
) -> Kept:
    """Observe a call of an unpartitioned graph; nothing is kept where that is not possible.

    operands:
        the whole tensors it reads
    probe:
        needed to see assisted operators; without it they are taken to keep what the unsplit
        operator does
    """
    whole = _see(
        *_runnable(node, rule, Strategy.invariant(_ALONE), _ALONE, resolve, probe), operands
    )
    if whole is None:
        return Kept()
    sizes = [whole.internals, [whole.forward.workspace], [whole.backward.workspace]]
    factors: list[list[set[str]]] = [[set() for _ in group] for group in sizes]
    assisted: dict[str, Assisted] = {}
    nothing = not any(nbytes for group in sizes for nbytes in group)
    for factor in rule.factors:
        if nothing and factor.assist is None:
            continue
        pieces = _smallest_prime(factor.size)
        split = _split(node, rule, factor, pieces, operands, resolve, probe)
        if split is None:
            continue
        if factor.assist is not None:
            assisted[factor.name] = Assisted(
                frozenset(k for k in split.forward.saved if k < len(operands)),
                sum(split.internals) * pieces,
                split.forward.workspace * pieces,
                split.backward.workspace * pieces,
            )
            continue
        parts = [split.internals, [split.forward.workspace], [split.backward.workspace]]
        for names, before, after in zip(factors, sizes, parts, strict=True):
            if len(before) == len(after):
                for found, b, a in zip(names, before, after, strict=True):
                    if a < b:
                        found.add(factor.name)
    internals, (forward,), (backward,) = (
        tuple(Piece(n, frozenset(found)) for n, found in zip(group, names, strict=True))
        for group, names in zip(sizes, factors, strict=True)
    )
    return Kept(internals, forward, backward, assisted)


def _split(
    node: Node,
    rule: Rule,
    factor: Factor,
    pieces: int,
    operands: Sequence[Spec],
    resolve: Resolve,
    probe: Probe | None,
) -> _Seen | None:
    """The local call with one factor split; None where it cannot be split or seen."""
    if not factor.splittable or pieces < 2 or (factor.assist is not None and probe is None):
        return None
    mesh = Mesh.of({_AXIS: pieces})
    strategy = Strategy(((_AXIS, factor.name),))
    if not is_valid(rule, strategy, mesh):
        return None
    local = []
    for i, spec in enumerate(operands):
        layout = operand_layout(rule, strategy, i, node.operand_grad(i), mesh)
        local.append(spec.resized(layout.local_shape(spec.shape, mesh)))
    return _see(*_runnable(node, rule, strategy, mesh, resolve, probe), local)


def _runnable(
    node: Node, rule: Rule, strategy: Strategy, mesh: Mesh, resolve: Resolve, probe: Probe | None
) -> tuple[Node, Resolve, str]:
    """The local call, what runs it, and what that depends on."""
    local = local_call(node, rule, strategy, mesh)
    if "split" not in local.kwargs:
        return local, resolve, ""
    if probe is not None:
        return local, probe(mesh), str(mesh)
    kwargs = {k: v for k, v in local.kwargs.items() if k != "split"}
    return replace(local, op=node.op, kwargs=kwargs), resolve, ""


def _see(call: Node, resolve: Resolve, where: str, operands: Sequence[Spec]) -> _Seen | None:
    try:
        observed = Call.make(call, operands, resolve, where)
        forward = observe(observed)
        incoming = tuple(
            Spec.contiguous(made.shape, made.dtype) if made.grad else None
            for made in forward.results
        )
        return _Seen(forward, observe_backward(observed, incoming))
    except Exception:  # any failure of a foreign operator means only that it cannot be observed
        return None


def _smallest_prime(number: int) -> int:
    return next((k for k in range(2, int(number**0.5) + 1) if number % k == 0), number)
