"""Ranks tell each other what they hold, and stop with a message where they differ."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.errors import AutoparError, DesyncError
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


def require_equal(context: RankContext, digest: str, what: str) -> None:
    """Raise DesyncError on every rank unless all ranks hold the same `what`."""
    digests = gather(context, digest)
    groups: dict[str, list[int]] = {}
    for rank, each in enumerate(digests):
        groups.setdefault(each, []).append(rank)
    if len(groups) > 1:
        sides = ", ".join(f"ranks {ranks} hold {d[:12]}" for d, ranks in groups.items())
        raise DesyncError(f"{what} differs between ranks: {sides}")


def from_first_rank(context: RankContext, make: Any, stage: str) -> Any:
    """What `make()` returns on the first rank, on every rank; its AutoparError likewise."""
    outcome: tuple[Any, BaseException | None] = (None, None)
    if context.rank == 0:
        try:
            outcome = (make(), None)
        except AutoparError as error:
            outcome = (None, error)
    value, error = gather(context, outcome)[0]
    if error is not None:
        raise error
    return value


def tensor_digest(tensor: Tensor) -> str:
    """A digest of a tensor's type and contents."""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    body = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + body).hexdigest()


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
