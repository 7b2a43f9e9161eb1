"""All ranks of a mesh in one process: one thread per rank, collectives by rendezvous.

The code that runs is the very code of a real run; only the transport differs. The last rank to
arrive at a collective computes everybody's result. Ranks that do not agree, wait for one another
in a circle, or wait for one that has finished are told so at once: nothing hangs.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from autopar.ir.errors import DesyncError
from autopar.ir.mesh import Mesh
from autopar.runtime.exchange import Counts
from autopar.runtime.groups import Group, Landing, RankContext

_T = TypeVar("_T")

#: Seconds that ranks get to end after a failure; one that is stuck elsewhere is left behind.
STOP_GRACE = 5.0


def run_lockstep(mesh: Mesh, fn: Callable[[int], _T], *, timeout: float = 60.0) -> list[_T]:
    """Run `fn(rank)` for every rank of the mesh, each under its own active `RankContext`.

    Every rank runs in a thread, with the caller's grad mode and one intra-op thread; backward
    passes on CPU run in the same thread. Random numbers come from the generator that all
    threads share.

    timeout:
        seconds that may pass without any rank completing a collective or ending

    Returns the results in the order of ranks. Where a rank raises, all stop and that exception is
    raised here; where ranks disagree on a collective, DesyncError names the calls.
    """
    world = _World(mesh, timeout)
    results: list[Any] = [None] * mesh.size
    grad, threads_before = torch.is_grad_enabled(), torch.get_num_threads()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        context = RankContext(mesh, rank, _LockstepTransport(world, rank))
        try:
            with torch.set_grad_enabled(grad), context.active():
                results[rank] = fn(rank)
        except _Stopped:
            pass
        except BaseException as error:
            if hasattr(error, "add_note"):  # Python 3.11 on
                error.add_note(f"raised on rank {rank} of the mesh {mesh}")
            world.fail(error)
        finally:
            world.finish(rank)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, rank),
            name=f"lockstep rank {rank}",
            daemon=True,
        )
        for rank in range(mesh.size)
    ]
    try:
        for thread in threads:
            thread.start()
        world.watch()
    except BaseException as error:  # KeyboardInterrupt above all
        world.fail(error)
    finally:
        deadline = time.monotonic() + STOP_GRACE
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        torch.set_num_threads(threads_before)
    if world.error is not None:
        raise world.error
    return results


class _Stopped(BaseException):
    """Ends a rank because another one failed; not an Exception, so that no handler keeps it."""


class _Call(NamedTuple):
    """What the ranks of a group must agree on."""

    kind: str
    axes: tuple[str, ...]
    detail: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        detail = "".join(f", {d}" for d in self.detail)
        return f"{self.kind}[{', '.join(self.axes)}]({dtype}{list(self.shape)}{detail})"


@dataclass
class _Arrival:
    """One rank at a collective. `wake` is held until its result is there or all stop."""

    rank: int
    index: int
    call: _Call
    x: Tensor
    wake: threading.Lock = field(default_factory=threading.Lock)
    result: Tensor | None = None


_Combine = Callable[[list[Tensor]], Sequence[Tensor]]


class _World:
    """What the ranks share. `lock` guards everything below it."""

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.mesh = mesh
        self.timeout = timeout
        self.ended = threading.Event()
        self.lock = threading.RLock()
        self.error: BaseException | None = None
        self.progress = time.monotonic()
        self.waiting: dict[int, _Arrival] = {}
        self.finished: set[int] = set()
        #: Who has arrived at the next collective of a group, by the ranks of the group.
        self.meetings: dict[frozenset[int], list[_Arrival]] = {}

    def exchange(self, members: frozenset[int], arrival: _Arrival, combine: _Combine) -> Tensor:
        """Wait for the other members, all with the same call; this rank's result."""
        arrived = self._arrive(members, arrival)
        if arrived is None:
            arrival.wake.acquire()
            if arrival.result is None:
                raise _Stopped
            return arrival.result
        try:
            results = combine([a.x for a in arrived])
            for other, result in zip(arrived, results, strict=True):
                other.result = result
        except BaseException as error:
            raise self.fail(error) from None
        finally:
            self.progress = time.monotonic()
            for other in arrived:
                if other is not arrival:
                    other.wake.release()
        return results[arrival.index]

    def _arrive(self, members: frozenset[int], arrival: _Arrival) -> list[_Arrival] | None:
        """The whole meeting in group order for the last to arrive, None for the others."""
        with self.lock:
            if self.error is not None:
                raise _Stopped
            meeting = self.meetings.setdefault(members, [])
            if meeting and meeting[0].call != arrival.call:
                raise self.fail(DesyncError(_mismatch(meeting[0], arrival)))
            meeting.append(arrival)
            if len(meeting) == len(members):
                del self.meetings[members]
                for other in meeting[:-1]:
                    del self.waiting[other.rank]
                return sorted(meeting, key=lambda a: a.index)
            arrival.wake.acquire()
            self.waiting[arrival.rank] = arrival
            if self._stuck():
                raise self._fail_stuck()
        return None

    def _stuck(self) -> bool:
        """Whether ranks wait and no other rank is left that could come."""
        waiting = len(self.waiting)
        return waiting > 0 and waiting + len(self.finished) == self.mesh.size

    def _fail_stuck(self) -> BaseException:
        return self.fail(DesyncError(f"ranks wait for each other in vain: {self._describe()}"))

    def finish(self, rank: int) -> None:
        with self.lock:
            self.finished.add(rank)
            self.progress = time.monotonic()
            if self._stuck():
                self._fail_stuck()
            if len(self.finished) == self.mesh.size:
                self.ended.set()

    def fail(self, error: BaseException) -> BaseException:
        """Stop all ranks, and give the error back to be raised; the first one is kept."""
        with self.lock:
            if self.error is None:
                self.error = error
            for arrival in self.waiting.values():
                arrival.wake.release()
            self.waiting.clear()
            self.meetings.clear()
            self.ended.set()
        return error

    def watch(self) -> None:
        """Return when all ranks have finished or one has failed, or fail for want of progress."""
        while not self.ended.wait(max(0.0, self.progress + self.timeout - time.monotonic())):
            with self.lock:
                if time.monotonic() - self.progress >= self.timeout:
                    self.fail(
                        DesyncError(
                            f"no rank made progress for {self.timeout:g} s: {self._describe()}"
                        )
                    )

    def _describe(self) -> str:
        return "; ".join(self._describe_rank(rank) for rank in range(self.mesh.size))

    def _describe_rank(self, rank: int) -> str:
        if rank in self.waiting:
            return f"rank {rank} waits in {self.waiting[rank].call}"
        if rank in self.finished:
            return f"rank {rank} has finished"
        return f"rank {rank} is outside any collective"


def _mismatch(one: _Arrival, other: _Arrival) -> str:
    return f"ranks disagree: rank {one.rank} calls {one.call}, rank {other.rank} calls {other.call}"


class _LockstepTransport:
    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank

    def prepare(self, axes_list: Sequence[tuple[str, ...]]) -> None:
        """Nothing: groups cost nothing here."""

    def connect(self, axes: tuple[str, ...]) -> Group:
        return _LockstepGroup(axes, self._world, self._rank)


class _LockstepGroup(Group):
    def __init__(self, axes: tuple[str, ...], world: _World, rank: int) -> None:
        members = world.mesh.group(rank, axes)
        super().__init__(axes, len(members), members.index(rank))
        self._world = world
        self._rank = rank
        self._members = frozenset(members)

    def _exchange(
        self,
        kind: str,
        x: Tensor,
        combine: _Combine,
        *detail: Any,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """`shape`: what the ranks must agree on, if not the shape of `x`."""
        call = _Call(kind, self.axes, detail, tuple(x.shape) if shape is None else shape, x.dtype)
        return self._world.exchange(
            self._members, _Arrival(self._rank, self.index, call, x), combine
        )

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        return self._exchange("all_reduce", x, _REDUCE[op], op)

    def _start_all_reduce(self, x: Tensor) -> Landing:
        # In place, as process groups do it: who hands over what others hold is found out.
        x.copy_(self._all_reduce(x, "sum"))
        return lambda: x

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._exchange("all_gather", x, _gather, dim)

    def _reduce_scatter(self, pieces: Tensor, op: str, dim: int) -> Tensor:
        return self._exchange("reduce_scatter", pieces, _REDUCE_SCATTER[op], op, dim)

    def _all_to_all(self, pieces: Tensor, dims: tuple[int, int]) -> Tensor:
        return self._exchange("all_to_all", pieces, _transpose, *dims)

    def _all_to_all_v(self, flat: Tensor, counts: Counts) -> Tensor:
        table = [counts.sent(rank) for rank in range(self.size)]
        total = (sum(map(sum, table)),)
        return self._exchange("all_to_all_v", flat, _route(table), counts, shape=total)


# What everybody gets, from what everybody brought. No two ranks share memory afterwards.


def _folded(fold: Callable[..., Tensor], xs: list[Tensor]) -> Tensor:
    total = fold(xs[0], xs[1])
    for x in xs[2:]:
        fold(total, x, out=total)
    return total


def _copies(x: Tensor, count: int) -> list[Tensor]:
    return [x, *(x.clone() for _ in range(count - 1))]


def _reduce_by(fold: Callable[..., Tensor]) -> _Combine:
    return lambda xs: _copies(_folded(fold, xs), len(xs))


def _reduce_scatter_by(fold: Callable[..., Tensor]) -> _Combine:
    return lambda xs: [piece.clone() for piece in _folded(fold, xs)]


def _gather(xs: list[Tensor]) -> list[Tensor]:
    return _copies(torch.stack(xs), len(xs))


def _transpose(xs: list[Tensor]) -> list[Tensor]:
    return [torch.stack(pieces) for pieces in zip(*xs, strict=True)]


def _route(counts: list[list[int]]) -> _Combine:
    def route(xs: list[Tensor]) -> list[Tensor]:
        sent = [x.split(row) for x, row in zip(xs, counts, strict=True)]
        return [torch.cat(pieces) for pieces in zip(*sent, strict=True)]

    return route


_FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_REDUCE = {op: _reduce_by(fold) for op, fold in _FOLDS.items()}
_REDUCE_SCATTER = {op: _reduce_scatter_by(fold) for op, fold in _FOLDS.items()}
