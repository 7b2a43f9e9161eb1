"""Gathered copies that are not kept for the backward pass, but gathered again there.

What a gather made is known by its storage. Where autograd wants to save such a tensor, it is given
a description instead; the first description that the backward pass opens gathers anew, for all
that came of that gather, and the last one lets go of it.

Buckets are asked for in the backward pass in the opposite order. When one has arrived, the one that
came before it in the forward pass is sent for, so that it is under way while the part of the graph
between them is computed; as in the forward pass there is never more than one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from autopar.runtime.compiling import is_compiling
from autopar.runtime.fused import Begun, finish
from autopar.runtime.groups import RankContext, current
from autopar.runtime.operators import resolve

#: Starts to gather; what it gives waits for the tensors.
Begin = Callable[[], Callable[[], Sequence[Tensor]]]


class Gathered:
    """What one gather made, and can make again.

    begin:
        gathers; all ranks of the group call it in the same order
    sources:
        what it reads, which must not be written to between forward and backward
    before:
        what is asked for next in the backward pass, if that is known
    """

    def __init__(
        self, begin: Begin, sources: Sequence[Tensor], before: Gathered | None = None
    ) -> None:
        self._begin = begin
        self._sources = [(x, x._version) for x in sources]
        self._before = before
        self._saved = self._opened = 0
        self._gone_through = False
        self._landing: Callable[[], Sequence[Tensor]] | None = None
        self._made: Sequence[Tensor] | None = None

    def save(self, member: int, x: Tensor) -> Saved:
        """In the place of a tensor that shares its storage with one of the results."""
        self._saved += 1
        return Saved(self, member, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def open(self, saved: Saved) -> Tensor:
        if self._made is None:
            if self._is_written:
                raise RuntimeError(
                    "a parameter that is gathered again for the backward pass was written to "
                    "since its forward pass: call backward() before the optimizer's step"
                )
            with torch.no_grad():
                landing = self._landing or self._begin()
                self._made, self._landing = landing(), None
                if self._before is not None:
                    self._before._prefetch()
        x = self._made[saved.member].as_strided(saved.shape, saved.stride, saved.offset)
        self._opened += 1
        if self._opened == self._saved:
            # A graph that is kept may be gone through again, which gathers again.
            self._opened, self._made, self._gone_through = 0, None, True
        return x

    @property
    def _is_written(self) -> bool:
        return any(x._version != version for x, version in self._sources)

    def _prefetch(self) -> None:
        """Start to gather what is going to be asked for."""
        # All ranks saved the same and open it in the same order, so they agree about this.
        wanted = self._saved > 0 and self._made is None and self._landing is None
        if wanted and not self._gone_through and not self._is_written:
            self._landing = self._begin()


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


#: The last bucket of a rank's forward pass.
_LAST: WeakKeyDictionary[RankContext, weakref.ref[Gathered]] = WeakKeyDictionary()


@_disable_dynamo
def finish_again(begun: Begun, members: tuple[int, ...], first: bool) -> tuple[Tensor, ...]:
    """As `finish`; some of what comes out is gathered again for the backward pass.

    first:
        whether there was no such bucket before it in this graph
    """
    bucket, xs = begun.bucket.only(members), [begun.pieces[k] for k in members]
    made = finish(begun)
    last = None if first else _LAST.get(bucket.context)
    gathered = Gathered(lambda: bucket.journey(xs).finish, xs, last() if last else None)
    _LAST[bucket.context] = weakref.ref(gathered)
    _remember(gathered, [made[k] for k in members], begun.pieces)
    return made


@_disable_dynamo
def step_again(op: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A reshard step; what comes out is made again for the backward pass."""
    run, context = resolve(op), current()
    made = run(x, *args, **kwargs)
    earlier = saved_gather(x)
    source = None if earlier else x.detach()

    def again() -> Callable[[], Sequence[Tensor]]:
        start = earlier.open() if earlier is not None else source
        with context.active():
            gathered = [run(start, *args, **kwargs)]
        return lambda: gathered

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
