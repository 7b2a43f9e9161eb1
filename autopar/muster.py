"""Ranks meet before what all of them must do, through the store and not the network.

A rank that calls `full_state_dict` by itself would wait in its first collective until the process
group gives up, with a message about sockets; worse, its collective could meet one that another
rank makes elsewhere. So before anything is sent each rank writes down where it has come to, and
waits until the others have come to the same place.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.ir.errors import DesyncError
from autopar.runtime.groups import DEFAULT_TIMEOUT, RankContext

#: After this long a log message names the ranks that are waited for.
IMPATIENT = timedelta(seconds=10)
#: The part of the process group's own time-out after which waiting ends: an error that says what is
#: missing should come before those of ranks that wait in a collective.
PATIENCE = 0.8
#: The pauses between two looks at who has come, in seconds: they double.
_SHORTEST, _LONGEST = 1e-3, 0.1

_MISSING = "It puts together what all ranks hold, so every rank calls it, not only the first one"

log = logging.getLogger("autopar")

#: Ranks of a mesh (of the world) -> how often they have met.
_meetings: dict[tuple[int, ...], int] = {}


def meet(context: RankContext, what: str, missing: str = _MISSING) -> None:
    """Wait until every rank of the mesh has come here for the same thing.

    what:
        the call, in the user's words
    missing:
        what an error says of ranks that did not come

    Raises DesyncError where ranks came for different things, and where some have not come in time.
    The next meeting is not disturbed by one that failed.
    """
    if context.device_mesh is None or context.mesh.size == 1:
        return
    ranks = tuple(context.device_mesh.mesh.flatten().tolist())
    number = _meetings.get(ranks, 0)
    store = _store_of(ranks, number)
    everyone = [str(rank) for rank in range(context.mesh.size)]
    store.set(str(context.rank), what)
    try:
        _wait(store, everyone, _limit(context), what, missing)
    except DesyncError:
        store.delete_key(str(context.rank))
        raise
    came_for = _read(store, everyone)
    # Everybody has read the meeting before this one.
    _meetings[ranks] = number + 1
    if number:
        _store_of(ranks, number - 1).delete_key(str(context.rank))
    for rank, other in enumerate(came_for):
        if other != came_for[0]:
            raise DesyncError(
                f"rank 0 has called {came_for[0]}, rank {rank} {other}; all ranks call the same "
                "functions in the same order"
            )


def _read(store: dist.Store, keys: list[str]) -> list[str]:
    """What lies in a store under some keys, in one message where it knows how."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]


def _store_of(ranks: tuple[int, ...], number: int) -> dist.Store:
    """Where ranks write that they have come to one of their meetings."""
    prefix = f"autopar/{'-'.join(map(str, ranks))}/{number}"
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def _limit(context: RankContext) -> timedelta:
    """How long to wait: less than the ranks would wait for each other in a collective."""
    assert context.device_mesh is not None
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device(context.device_mesh.device_type))
    timeout = getattr(getattr(backend, "options", None), "_timeout", DEFAULT_TIMEOUT)
    return PATIENCE * timeout


def _wait(
    store: dist.Store, everyone: list[str], limit: timedelta, what: str, missing_words: str
) -> None:
    """Look again and again: a wait inside of the store would keep other threads from using it."""
    start, pause, said = time.monotonic(), _SHORTEST, False
    while not store.check(everyone):
        waited = timedelta(seconds=time.monotonic() - start)
        if waited > (limit if said else min(limit, IMPATIENT)):
            missing = [rank for rank in everyone if not store.check([rank])]
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            if missing and waited > limit:
                raise DesyncError(f"{what}: {who} did not call it. {missing_words}")
            if missing and not said:
                log.warning("%s: waiting for %s; all ranks must call it", what, who)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
