"""Ranks tell each other what they hold, and stop with a message where they differ."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.calls import entry_changes
from autopar.ir.calling import Entry
from autopar.ir.errors import AutoparError, DesyncError
from autopar.ir.layout import Layout
from autopar.runtime.groups import RankContext


def gather(context: RankContext, item: Any) -> list[Any]:
    """One (small, picklable) item from every rank of the mesh, by rank number.

    The group over all axes must be prepared.
    """
    group = context.group(context.mesh.names)
    if group.size == 1:
        return [item]
    device = context.device_mesh.device_type if context.device_mesh is not None else "cpu"
    data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
    length = torch.tensor([data.numel()], device=device)
    lengths = group.all_gather(length, 0).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data.to(device)
    rows = group.all_gather(padded[None], 0).cpu()
    return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]


def share_outcome(context: RankContext, error: BaseException | None, stage: str) -> None:
    """Raise on every rank when any rank failed: its own error, or who failed and why."""
    failures = gather(context, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise DesyncError(f"{stage}: rank {rank} failed with {failure}")


def require_equal(context: RankContext, digest: str, what: str, way_out: str) -> None:
    """Raise DesyncError on every rank unless all ranks hold the same `what`."""
    digests = gather(context, digest)
    groups: dict[str, list[int]] = {}
    for rank, each in enumerate(digests):
        groups.setdefault(each, []).append(rank)
    if len(groups) > 1:
        sides = ", ".join(f"ranks {ranks} hold {d[:12]}" for d, ranks in groups.items())
        raise DesyncError(f"{what} differs between ranks: {sides}; {way_out}")


def require_equal_calls(
    context: RankContext, entries: tuple[Entry, ...] | None, error: Exception | None
) -> None:
    """Raise on every rank unless all were called alike: as `share_outcome`, or a DesyncError.

    entries:
        what this rank was called with (`flatten_call`); None where `error` says that it could
        not be read
    """
    told = None if error is None else f"{type(error).__name__}: {error}"
    everywhere = gather(context, (told, entries, context.accumulating))
    if error is not None:
        raise error
    for rank, (failure, theirs, accumulating) in enumerate(everywhere):
        if failure is not None:
            raise DesyncError(f"checking the call: rank {rank} failed with {failure}")
        for path, first, now in entry_changes(everywhere[0][1], theirs):
            raise DesyncError(
                f"{path}: rank 0 was called with {first}, rank {rank} with {now}; all ranks make "
                "the same calls"
            )
        if accumulating != everywhere[0][2]:
            inside, outside = (0, rank) if everywhere[0][2] else (rank, 0)
            raise DesyncError(
                f"no_sync: rank {inside} called the module inside of it, rank {outside} outside; "
                "all ranks enter it for the same backward passes"
            )


def from_first_rank(context: RankContext, make: Callable[[], Any], stage: str) -> Any:
    """What `make()` returns on the first rank, on every rank.

    Where it raises, every rank does: an AutoparError as it is, for anything else the other ranks
    get a DesyncError that says what happened.
    """
    value: Any = None
    mine: Exception | None = None
    if context.rank == 0:
        try:
            value = make()
        except Exception as error:
            mine = error
    ours = isinstance(mine, AutoparError)
    told = None if mine is None or ours else f"{type(mine).__name__}: {mine}"
    value, shared, told = gather(context, (value, mine if ours else None, told))[0]
    if mine is not None:
        raise mine
    if shared is not None:
        raise shared
    if told is not None:
        raise DesyncError(f"{stage}: rank 0 failed with {told}")
    return value


#: Integers of the width of an element: their sum is exact, whatever the order of the additions.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """A number that tells differently filled tensors apart; fast, and exact on any device."""
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return int(flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


def require_equal_state(context: RankContext, tensors: Mapping[str, Tensor]) -> None:
    """Raise DesyncError, naming the first that differs, unless all ranks hold equal tensors."""
    if context.mesh.size == 1:
        return
    everywhere = gather(context, {name: checksum(tensor) for name, tensor in tensors.items()})
    for name in tensors:
        for rank, theirs in enumerate(everywhere):
            if theirs.get(name) != everywhere[0].get(name):
                raise DesyncError(
                    f"{name!r} has other values on rank {rank} than on rank 0; seed all ranks "
                    "alike, or load the same checkpoint, before autoparallelize"
                )


def tensor_digest(tensor: Tensor) -> str:
    """A digest of a tensor's type and contents."""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    body = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + body).hexdigest()


def piece_digest(tensor: Tensor, layout: Layout | None, context: RankContext) -> dict[str, str]:
    """One entry: which piece of an input a rank was given -> the digest of its contents.

    layout:
        how the whole is divided, where a plain tensor is a piece; None where it is the whole
    """
    here = context.coordinates
    if isinstance(tensor, DTensor):
        named = zip(context.mesh.names, tensor.placements, strict=False)
        part = str([(str(p), here[axis]) for axis, p in named if p.is_shard()])
        tensor = tensor.to_local()
    elif layout is not None:
        part = str([context.mesh.index(here, axes) for axes in layout.dims])
    else:
        part = "whole"
    return {part: tensor_digest(tensor)}


def require_equal_inputs(
    context: RankContext, names: Sequence[str], digests: Sequence[dict[str, str]]
) -> None:
    """Raise DesyncError unless ranks that need the same piece of an input hold the same.

    digests:
        for each input: one entry, the piece that this rank holds -> the digest of its contents
    """
    everywhere = gather(context, list(digests))
    for i, name in enumerate(names):
        seen: dict[str, tuple[int, str]] = {}
        for rank, theirs in enumerate(everywhere):
            for piece, digest in theirs[i].items():
                first = seen.setdefault(piece, (rank, digest))
                if first[1] != digest:
                    raise DesyncError(
                        f"input {name!r} differs between ranks {first[0]} and {rank}, which must "
                        "be given the same: check how the data loader divides the batch "
                        "(plan.input_layouts says what each rank needs)"
                    )
