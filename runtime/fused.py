"""Parameters on their way into a graph, many at a time: the operator ``autopar.fused``.

Forward takes a whole bucket through each of its steps in one collective, which `begin` can start
before it is needed. Backward takes all its
gradients back so, as soon as the last of them exists, beside the rest of the backward pass where
nothing has to see them earlier (`autopar.runtime.delivery`).

Under mixed precision a bucket casts its tensors, so that less is sent, and takes their gradients
back in the dtype in which they are to be summed.

While `RankContext.accumulating` is set, sums over ranks are put off: gradients stay terms.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor

from autopar.ir.fused import CAST_STEP
from autopar.runtime import flat
from autopar.runtime.collectives import (
    AllGather,
    AllReduce,
    Mask,
    Pad,
    ReduceScatter,
    Slice,
    Step,
    ToInvariant,
    ToReplicate,
)
from autopar.runtime.compiling import is_compiling
from autopar.runtime.delivery import (
    Delivery,
    Journey,
    KeepTerms,
    Leg,
    Receiver,
    receivers,
    take_terms,
)
from autopar.runtime.flat import Cut, Landings
from autopar.runtime.groups import Group, RankContext, current
from autopar.runtime.local_parameter import gradient_of
from autopar.runtime.operators import operator
from autopar.runtime.owned import is_ours

#: How many buckets a rank remembers, more than all graphs have that are in use.
MAX_BUCKETS = 4096

#: The steps of `autopar.ir.fused.FUSABLE`.
_STEPS: dict[str, Callable[..., Step]] = {
    "autopar.all_gather": AllGather,
    "autopar.all_reduce": AllReduce,
    "autopar.mask": Mask,
    "autopar.pad": Pad,
    "autopar.slice": Slice,
    "autopar.to_invariant": ToInvariant,
    "autopar.to_replicate": ToReplicate,
}


@dataclass(frozen=True)
class Cast:
    """The casting of all values of a bucket.

    after:
        how many stages come before it
    dtype, reduced:
        what values are cast to, and what gradients are on their way back
    source:
        the dtype of the values as they come, which gradients have in the end
    """

    after: int
    dtype: torch.dtype
    reduced: torch.dtype
    source: torch.dtype


@dataclass(frozen=True, eq=False)
class Bucket:
    """The steps of a fused call [stage][value], and where it runs."""

    context: RankContext
    stages: tuple[tuple[Step, ...], ...]
    cast: Cast | None = None
    #: The ways back that were asked for, by members and whether gradients may be written to.
    _back: dict[Any, tuple[list[Leg], list[Leg]]] = field(default_factory=dict, init=False)

    @staticmethod
    def of(
        context: RankContext,
        steps: tuple[tuple[Any, ...], ...],
        reduced: torch.dtype | None,
        source: torch.dtype,
    ) -> Bucket:
        """The one of a fused call on values of a dtype; its steps are made once."""
        key = steps, reduced, source
        known: Bucket | None = context.buckets.get(key)
        if known is not None:
            return known
        stages: list[tuple[Step, ...]] = []
        cast = None
        for op, axes, arguments in steps:
            if op == CAST_STEP:
                dtype = arguments[0][0]
                cast = Cast(len(stages), dtype, reduced or dtype, source)
                continue
            group = context.group(axes)
            stages.append(tuple(_STEPS[op](group, *given) for given in arguments))
        if len(context.buckets) >= MAX_BUCKETS:
            context.buckets.clear()
        made = context.buckets[key] = Bucket(context, tuple(stages), cast)
        return made

    def only(self, members: Sequence[int]) -> Bucket:
        """The one of some of its values."""
        return Bucket(
            self.context, tuple(tuple(s[m] for m in members) for s in self.stages), self.cast
        )

    @cached_property
    def summing(self) -> tuple[int, ...]:
        """The stages whose duals sum gradients over ranks at the end of their way.

        Masks on the way do not matter: they are on other axes, where they may as well come after.
        """
        lead = itertools.takewhile(
            lambda stage: isinstance(stage[1][0], (ToReplicate, Mask)), enumerate(self.stages)
        )
        return tuple(k for k, steps in lead if isinstance(steps[0], ToReplicate))

    @cached_property
    def sums(self) -> tuple[Group, ...]:
        """The groups over which gradients are summed at the end of their way."""
        return tuple(self.stages[k][0].group for k in self.summing)

    @cached_property
    def _legs(self) -> list[Leg]:
        if self.cast is None:
            return _legs_of(self.stages)
        before, behind = self.stages[: self.cast.after], self.stages[self.cast.after :]
        return [*_legs_of(before), _casting(self.cast.dtype), *_legs_of(behind)]

    def _legs_back(self, members: tuple[int, ...], ours: bool) -> tuple[list[Leg], list[Leg]]:
        """The way of some members' gradients: before they are summed over ranks, and from then."""
        known = self._back.get((members, ours))
        if known is not None:
            return known

        def duals(stages: Iterable[int]) -> list[Leg]:
            return _legs_of(([self.stages[k][m].dual for m in members] for k in stages), ours)

        back = range(len(self.stages) - 1, -1, -1)
        first = duals(k for k in back if k not in self.summing)
        if self.cast is not None:
            first.insert(0, _casting(self.cast.reduced))
        made = self._back[members, ours] = first, duals(k for k in back if k in self.summing)
        return made

    def journey(self, xs: Sequence[Tensor]) -> Journey:
        """The tensors on their way through all steps; nothing of gradients."""
        return Journey([x.detach() for x in xs], self._legs)

    def journey_back(
        self,
        grads: Sequence[Tensor],
        members: Sequence[int],
        terms: Sequence[Tensor | None] | None = None,
        *,
        sums: bool = True,
        ours: bool = False,
    ) -> Journey:
        """The gradients of some members on their way to the parameters.

        terms:
            what is summed along with them over the ranks
        sums:
            whether they are summed at all; otherwise they arrive as terms
        ours:
            whether the gradients may be written to
        """
        first, last = self._legs_back(tuple(members), ours)
        back = list(first)
        if terms is not None:
            back.append(Leg(lambda grads: _with_terms(grads, terms), sent=False))
        if sums:
            back += last
        if self.cast is not None:
            back.append(_casting(self.cast.source))
        return Journey(grads, back)


def _legs_of(stages: Iterable[Sequence[Step]], ours: bool = False) -> list[Leg]:
    """What some stages do; behind some steps tensors are the same, and only gradients are not."""
    return [
        _leg(steps, ours)
        for steps in stages
        if steps[0].group.size > 1 and not isinstance(steps[0], (ToReplicate, ToInvariant))
    ]


def _leg(steps: Sequence[Step], ours: bool = False) -> Leg:
    """Takes one tensor through each of some steps of one kind, over one group.

    ours:
        whether the tensors may be written to
    """
    first = steps[0]
    group = first.group
    if isinstance(first, AllReduce):
        return Leg(lambda xs: flat.start_all_reduce(group, xs, ours))
    if isinstance(first, AllGather):
        return Leg(lambda xs: flat.start_all_gather(group, xs, _cuts(steps)))
    if isinstance(first, ReduceScatter):
        cuts = _cuts(steps)
        return Leg(lambda xs: flat.start_reduce_scatter(group, xs, cuts, ours), shrinks=True)

    def run_each(xs: list[Tensor]) -> Landings:
        made = [step.run(x) for step, x in zip(steps, xs, strict=True)]
        return lambda: made

    return Leg(run_each, sent=False)


def _casting(dtype: torch.dtype) -> Leg:
    def cast_each(xs: list[Tensor]) -> Landings:
        made = [x.to(dtype) for x in xs]
        return lambda: made

    return Leg(cast_each, sent=False)


def _cuts(steps: Sequence[Step]) -> list[Cut]:
    return [Cut(s.dim, s.sizes) for s in steps if isinstance(s, (AllGather, ReduceScatter))]


def _with_terms(grads: list[Tensor], terms: Sequence[Tensor | None]) -> Landings:
    total = [g if t is None else g + t for g, t in zip(grads, terms, strict=True)]
    return lambda: total


@dataclass(frozen=True)
class Begun:
    """A bucket on its way, whose first collective has been started.

    xs:
        what it was given: local tensors, or parameters of which it takes the local tensors
    pieces:
        the local tensors
    """

    bucket: Bucket
    xs: tuple[Tensor, ...]
    pieces: tuple[Tensor, ...]
    journey: Journey


@operator("fused")
def fused(
    xs: tuple[Tensor, ...],
    steps: tuple[tuple[Any, ...], ...],
    reduced: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Each tensor through the same steps, one collective per step (`autopar.ir.fused`).

    Where pieces are uneven, the arguments of a step end in their sizes.

    reduced:
        the dtype in which gradients are summed, where a step casts (default: what it casts to)
    """
    return finish(begin(xs, steps, reduced))


@_disable_dynamo
def begin(
    xs: tuple[Tensor, ...],
    steps: tuple[tuple[Any, ...], ...],
    reduced: torch.dtype | None = None,
) -> Begun:
    """Start a bucket; what is called before `finish` may run beside its first collective."""
    bucket = Bucket.of(current(), steps, reduced, xs[0].dtype)
    pieces = tuple(x._local_tensor if isinstance(x, DTensor) else x for x in xs)
    return Begun(bucket, xs, pieces, bucket.journey(pieces))


@_disable_dynamo
def finish(begun: Begun) -> tuple[Tensor, ...]:
    """The results of a bucket that was started."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in begun.xs):
        return _Fused.apply(begun, *begun.xs)
    return tuple(begun.journey.finish())


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Begun, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = begun.bucket
        ctx.inputs = xs
        made = tuple(begun.journey.finish())
        ctx.shapes = [y.shape for y in made]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ours = is_ours(grads)
        bucket: Bucket = ctx.bucket
        needs = ctx.needs_input_grad[1:]
        needed = [g if need else None for g, need in zip(grads, needs, strict=True)]
        found: dict[int, Tensor | None] = {}
        if torch.is_grad_enabled():
            found = {k: _single_back(bucket, k, g) for k, g in enumerate(needed)}
        else:
            # What torch.compile takes down must return its gradients.
            to = None if is_compiling() else receivers(ctx)
            if to is not None:
                _send(bucket, needed, to, ctx.shapes, ours)
                return (None,) * (1 + len(grads))
            members = [k for k, g in enumerate(needed) if g is not None]
            present = [g for g in needed if g is not None]
            if present:
                arrived = bucket.journey_back(present, members, ours=ours).finish()
                found.update(zip(members, arrived, strict=True))
        for k, x in enumerate(ctx.inputs):
            grad = found.get(k)
            if grad is not None and isinstance(x, DTensor):
                found[k] = gradient_of(x, grad)
        return (None, *(found.get(k) for k in range(len(grads))))


def _single_back(bucket: Bucket, member: int, grad: Tensor | None) -> Tensor | None:
    """A gradient taken back by steps that can themselves be differentiated."""
    if grad is not None:
        grad = grad if bucket.cast is None else grad.to(bucket.cast.reduced)
        for steps in reversed(bucket.stages):
            grad = steps[member].dual(grad)
        grad = grad if bucket.cast is None else grad.to(bucket.cast.source)
    return grad


def _send(
    bucket: Bucket,
    grads: Sequence[Tensor | None],
    to: Sequence[Receiver | None],
    shapes: Sequence[torch.Size],
    ours: bool,
) -> None:
    """Start what brings the gradients to the parameters; the end of the pass hands them out.

    shapes:
        of the gradients that may come
    ours:
        whether those that came may be written to
    """
    wanted = {k: r for k, r in enumerate(to) if r is not None and r.wanted}
    axes = tuple(axis for group in bucket.sums for axis in group.axes)
    put_off = bool(axes) and bucket.context.accumulating
    put_off = put_off and all(isinstance(r.leaf, DTensor) for r in wanted.values())
    held: dict[int, Tensor] = {}
    if axes and not put_off:
        terms = {k: take_terms(r.leaf, axes) for k, r in wanted.items()}
        held = {k: term for k, term in terms.items() if term is not None}
    members = [k for k in wanted if grads[k] is not None or k in held]
    if not members:
        return
    present = []
    for k in members:
        grad = grads[k]
        present.append(held[k].new_zeros(shapes[k]) if grad is None else grad)
    destinations = [wanted[k] for k in members]
    delivery = Delivery.of_this_pass()
    delivery.make_way()
    if not put_off:
        terms_of = [held.get(k) for k in members] if held else None
        journey = bucket.journey_back(present, members, terms_of, ours=ours)
        delivery.add(journey, destinations)
        return
    keep = KeepTerms(axes, all(group.is_first for group in bucket.sums))
    journey = bucket.journey_back(present, members, sums=False)
    if len(bucket.stages) > len(bucket.sums):
        delivery.add(journey, destinations, keep)
    else:
        keep(destinations, journey.finish())
