"""Gathered copies that are not kept for the backward pass, but gathered again there.

What a gather made is known by its storage. Where autograd wants to save such a tensor, it is given
a description instead; the first description that the backward pass opens gathers anew, for all
that came of that gather, and the last one lets go of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from autopar.runtime.compiling import is_compiling
from autopar.runtime.fused import Begun, finish
from autopar.runtime.groups import current
from autopar.runtime.operators import resolve


class Gathered:
    """What one gather made, and can make again.

    make:
        gathers; all ranks of the group call it in the same order
    sources:
        what it reads, which must not be written to between forward and backward
    """

    def __init__(self, make: Callable[[], Sequence[Tensor]], sources: Sequence[Tensor]) -> None:
        self._make = make
        self._sources = [(x, x._version) for x in sources]
        self._saved = self._opened = 0
        self._made: Sequence[Tensor] | None = None

    def save(self, member: int, x: Tensor) -> Saved:
        """In the place of a tensor that shares its storage with one of the results."""
        self._saved += 1
        return Saved(self, member, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def open(self, saved: Saved) -> Tensor:
        if self._made is None:
            if any(x._version != version for x, version in self._sources):
                raise RuntimeError(
                    "a parameter that is gathered again for the backward pass was written to "
                    "since its forward pass: call backward() before the optimizer's step"
                )
            with torch.no_grad():
                self._made = self._make()
        x = self._made[saved.member].as_strided(saved.shape, saved.stride, saved.offset)
        self._opened += 1
        if self._opened == self._saved:
            # A graph that is kept may be gone through again, which gathers again.
            self._opened, self._made = 0, None
        return x


@dataclass(frozen=True, eq=False)
class Saved:
    """A tensor in the storage of one result of a gather."""

    gathered: Gathered
    member: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def open(self) -> Tensor:
        return self.gathered.open(self)


#: Storage -> the gather that made it, and which result lies in it; as long as it is alive.
_KNOWN: dict[int, tuple[Gathered, int]] = {}


def saved_gather(x: Tensor) -> Saved | None:
    """The description of a tensor that a gather made which can be made again."""
    known = _KNOWN.get(x.untyped_storage()._cdata)
    return None if known is None else known[0].save(known[1], x)


@_disable_dynamo
def finish_again(begun: Begun, members: tuple[int, ...]) -> tuple[Tensor, ...]:
    """As `finish`; some of what comes out is gathered again for the backward pass."""
    stages = tuple(tuple(steps[k] for k in members) for steps in begun.bucket.stages)
    bucket, xs = replace(begun.bucket, stages=stages), [begun.xs[k] for k in members]
    made = finish(begun)
    gathered = Gathered(lambda: bucket.journey(xs).finish(), xs)
    _remember(gathered, [made[k] for k in members], begun.xs)
    return made


@_disable_dynamo
def step_again(op: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A reshard step; what comes out is made again for the backward pass."""
    run, context = resolve(op), current()
    made = run(x, *args, **kwargs)
    earlier = saved_gather(x)
    source = None if earlier else x.detach()

    def again() -> Sequence[Tensor]:
        start = earlier.open() if earlier is not None else source
        with context.active():
            return [run(start, *args, **kwargs)]

    _remember(Gathered(again, [] if source is None else [source]), [made], [x])
    return made


def _remember(gathered: Gathered, made: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    if is_compiling():  # torch.compile decides itself what it keeps
        return
    theirs = {x.untyped_storage()._cdata for x in xs}
    for member, y in enumerate(made):
        storage = y.untyped_storage()
        key = storage._cdata
        if key not in theirs and key not in _KNOWN:
            _KNOWN[key] = gathered, member
            weakref.finalize(storage, _KNOWN.pop, key, None).atexit = False
