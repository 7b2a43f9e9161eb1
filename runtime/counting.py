"""How much the ranks really send: every collective of a group reports here before it starts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Sent(NamedTuple):
    """One collective.

    kind:
        ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``
    axes:
        the mesh axes it ran over
    nbytes:
        size of the tensor the group works on, as in a plan: the reduced one, the gathered one,
        the one to be scattered; for an all-to-all one rank's piece
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int


class Communication:
    """The collectives that one rank took part in, in order."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.sent: list[Sent] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that groups worked on, all together."""
        return sum(each.nbytes for each in self.sent)

    def of(self, kind: str, *axes: str) -> list[Sent]:
        """Those of one kind, over these axes or (none given) over any."""
        return [each for each in self.sent if each.kind == kind and (not axes or each.axes == axes)]

    def __str__(self) -> str:
        counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for kind, axes, nbytes in self.sent:
            counted[kind, axes] += 1
            total[kind, axes] += nbytes
        lines = (
            f"{count} {kind}[{'+'.join(axes)}], {total[kind, axes]} bytes"
            for (kind, axes), count in counted.items()
        )
        return "\n".join(lines) or "no communication"


# Backward passes may run in threads of the autograd engine, so this is not a context variable.
_active: list[Communication] = []
_lock = threading.Lock()


@contextmanager
def count_communication(rank: int | None = None) -> Iterator[Communication]:
    """Count the collectives that start while the block runs, in all threads of this process.

    rank:
        the rank of the mesh to count for; default: every rank in this process. That is one rank
        of a real run, and all of them in a lockstep simulation

    What the ranks compare before the first call of a kind is counted, too.
    """
    counted = Communication(rank)
    with _lock:
        _active.append(counted)
    try:
        yield counted
    finally:
        with _lock:
            _active[:] = [each for each in _active if each is not counted]


def record(rank: int | None, kind: str, axes: tuple[str, ...], nbytes: int) -> None:
    """Report one collective of a rank to whoever counts."""
    for counted in _active:
        if counted.rank is None or counted.rank == rank:
            with _lock:
                counted.sent.append(Sent(kind, axes, nbytes))
