"""Saving and resuming a training run, under whatever plan and number of ranks."""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar import agreement
from autopar.checkpoint_files import (
    beside,
    find_checkpoint,
    prepare_folder,
    put_in_place,
    read_metadata,
    require_tensors,
)
from autopar.checkpoint_pieces import LoadPieces, Piece, SavePieces
from autopar.checkpoint_state import (
    MODEL,
    RECORD,
    OptimizerState,
    model_pieces,
    optimizer_pieces,
    optimizer_room,
    pack,
    random_state,
    set_random_state,
    unpack,
)
from autopar.face import Face
from autopar.ir.errors import CheckpointError
from autopar.ir.mesh import Mesh
from autopar.ir.trace_export import model_device
from autopar.muster import meet
from autopar.optimizer_offload import put_away
from autopar.runtime.groups import RankContext

#: The version of what `record` holds; a checkpoint of another version is refused.
VERSION = 1

log = logging.getLogger("autopar")

#: How long ranks wait for one another while a checkpoint is written in the background.
BACKGROUND_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held beside tensors: the `step` and `extra` it was saved with."""

    step: int | None
    extra: Any


class Saving:
    """A checkpoint that is being written in the background."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        #: Whether somebody was told that it failed.
        self.told = False
        self._thread = threading.Thread(target=self._run, args=(write,), name="autopar-save")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            # Said at once, since nobody may wait for this checkpoint.
            log.error("a checkpoint was not saved: %s", error)
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it is written, or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is whole; raises what the writing raised."""
        self._thread.join()
        if self._error is not None:
            self.told = True
            raise self._error


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Any = None,
    asynchronous: bool = False,
) -> Saving | None:
    """Write a checkpoint that any plan on any number of ranks can read; all ranks call it.

    folder:
        where ranks of all hosts can write. It is written under another name and renamed when it
        is whole; a checkpoint of this name is replaced then.
    model:
        a parallel module, or any module in a single process
    optimizer:
        made from the model's parameters
    step, extra:
        given back by `load_checkpoint`; `extra` is plain data (a data loader's `state_dict()`,
        a scheduler's), rank 0's is kept
    asynchronous:
        copy everything to the CPU, write in the background and return a `Saving`, whose `wait()`
        says when the checkpoint is whole. Training may go on meanwhile; the next save waits.

    The random states of every rank are saved as well. Raises CheckpointError on every rank where
    something cannot be saved; then a checkpoint of this name is as it was. Raises DesyncError
    where some ranks do not call it.
    """
    folder = Path(folder)
    context = _context_of(model)
    meet(context, "save_checkpoint")
    _wait_for_saving(model)
    error: Exception | None = None
    pieces: dict[str, Piece] = {}
    try:
        pieces = _pieces_of(model, optimizer, step, extra)
        if context.rank == 0:
            prepare_folder(folder)
    except CheckpointError as problem:
        error = problem
    agreement.share_outcome(context, error, f"saving {folder}")
    if not asynchronous:
        _write(folder, pieces, context.rank, _process_group(context))
        return None
    copies = {name: piece.copied() for name, piece in pieces.items()}
    background = _background_group(model)
    saving = Saving(lambda: _write(folder, copies, context.rank, background))
    _savings[model] = saving
    return saving


def _pieces_of(
    model: nn.Module, optimizer: Optimizer | None, step: int | None, extra: Any
) -> dict[str, Piece]:
    pieces = model_pieces(model)
    record: dict[str, Any] = {"version": VERSION, "step": step, "optimizer": None}
    if optimizer is not None:
        tensors, record["optimizer"] = optimizer_pieces(model, optimizer)
        pieces |= tensors
    context = _context_of(model)
    if context.rank == 0:
        pieces[RECORD] = Piece.whole(pack(record, "optimizer"))
        pieces["extra"] = Piece.whole(pack(extra, "extra"))
    state = pack(random_state(_home_of(model)), "the random states")
    pieces[f"random.{context.rank}"] = Piece.whole(state)
    return pieces


def _write(folder: Path, pieces: Mapping[str, Piece], rank: int, group: Any) -> None:
    """Write this rank's pieces; rank 0 gives the folder its name when all are written."""
    try:
        with _quiet():
            dcp.save(
                dict(pieces),
                storage_writer=dcp.FileSystemWriter(beside(folder, "saving"), overwrite=True),
                planner=SavePieces(),
                process_group=group,
                no_dist=group is None,
            )
    except (dcp.api.CheckpointException, OSError) as error:
        raise CheckpointError(f"{folder}: not saved: {_reason(error)}") from error
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            put_in_place(folder)
        except OSError as error:
            failure = [str(error)]
    if group is not None:
        dist.broadcast_object_list(failure, group=group, group_src=0)
    if failure[0] is not None:
        raise CheckpointError(f"{folder}: not renamed: {failure[0]}")


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    random_states: bool = True,
) -> Loaded:
    """Read what `save_checkpoint` wrote, under whatever plan; all ranks call it.

    model:
        a compiled parallel module, or any module in a single process. Each rank reads what its
        pieces need.
    optimizer:
        made from the model's parameters, in the same groups; its state and options are replaced
    random_states:
        put every rank's random states back. With another number of ranks than were saved, those
        of the saved ranks are handed out in turn.

    Raises CheckpointError, on every rank and before anything is overwritten, where the checkpoint
    is missing, has lost a file, is cut short, or is of another model or kind of optimizer;
    DesyncError where some ranks do not call it.
    """
    folder = Path(folder)
    context = _context_of(model)
    meet(context, "load_checkpoint")
    _wait_for_saving(model)
    error: Exception | None = None
    try:
        place = find_checkpoint(folder)
        metadata = read_metadata(place)
        pieces = model_pieces(model)
        shapes = {name.removeprefix(MODEL): piece.shape for name, piece in pieces.items()}
        require_tensors(folder, metadata, MODEL, shapes)
        record = _read_record(folder, place, metadata)
        room = _room(folder, model, optimizer, metadata, record)
    except CheckpointError as problem:
        error = problem
    agreement.share_outcome(context, error, f"loading {folder}")
    wanted = {**pieces, **(room.pieces if room is not None else {})}
    _read(place, wanted, context)
    if room is not None:
        room.install()
        put_away(room.optimizer)
    if isinstance(model, Face):
        model.mark_filled(*shapes)
    if random_states:
        saved = sum(name.startswith("random.") for name in metadata.state_dict_metadata)
        state = _read_bytes(place, metadata, f"random.{context.rank % saved}")
        set_random_state(state, _home_of(model))
    return Loaded(record["step"], _read_bytes(place, metadata, "extra"))


def _room(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    metadata: Metadata,
    record: Mapping[str, Any],
) -> OptimizerState | None:
    if optimizer is None:
        return None
    if record["optimizer"] is None:
        raise CheckpointError(f"{folder}: was saved without an optimizer")
    return optimizer_room(model, optimizer, metadata, record["optimizer"])


def _read_record(folder: Path, place: Path, metadata: Metadata) -> dict[str, Any]:
    if RECORD not in metadata.state_dict_metadata:
        raise CheckpointError(f"{folder}: was not written by autopar.save_checkpoint")
    record = _read_bytes(place, metadata, RECORD)
    if record["version"] != VERSION:
        raise CheckpointError(f"{folder}: of version {record['version']}, this is {VERSION}")
    return record


def _read_bytes(place: Path, metadata: Metadata, name: str) -> Any:
    """Plain data of a checkpoint; no communication."""
    (size,) = metadata.state_dict_metadata[name].size  # type: ignore[union-attr]
    data = torch.empty(size, dtype=torch.uint8)
    _read(place, {name: Piece.whole(data)}, None)
    return unpack(data)


def _read(place: Path, pieces: Mapping[str, Piece], context: RankContext | None) -> None:
    group = None if context is None else _process_group(context)
    try:
        with _quiet(), torch.no_grad():
            dcp.load(
                dict(pieces),
                storage_reader=dcp.FileSystemReader(place),
                planner=LoadPieces(),
                process_group=group,
                no_dist=group is None,
            )
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{place}: cannot be read, and the model may hold a part of it: {_reason(error)}"
        ) from error


def full_state_dict(model: nn.Module, *, everywhere: bool = False) -> dict[str, Tensor]:
    """The model's `state_dict` in whole tensors on the CPU, as one device would save it.

    All ranks call it together: tensors are put together one after the other. Rank 0 gets the
    result, the others an empty dict; with `everywhere`, all get it. Raises DesyncError where some
    ranks do not call it.
    """
    context = _context_of(model)
    meet(context, "full_state_dict")
    keep = everywhere or context.rank == 0
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            found[name] = whole.detach().to("cpu", copy=True)
    return found


# -- ranks ------------------------------------------------------------------------------------

#: What is being written in the background, by its model.
_savings: weakref.WeakKeyDictionary[nn.Module, Saving] = weakref.WeakKeyDictionary()
#: The process groups of background writers, by their model.
_groups: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def _wait_for_saving(model: nn.Module) -> None:
    saving = _savings.pop(model, None)
    if saving is not None and not saving.told:
        saving.wait()


def _context_of(model: nn.Module) -> RankContext:
    if isinstance(model, Face):
        return model.context
    return RankContext.from_process_group(Mesh.of(1))


def _home_of(model: nn.Module) -> torch.device:
    return model.home if isinstance(model, Face) else model_device(model, ())


def _process_group(context: RankContext) -> Any:
    """The ranks of the mesh as a process group; None for one rank."""
    mesh = context.device_mesh
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _background_group(model: nn.Module) -> Any:
    """A process group for a writer's own messages; all ranks make it together."""
    group = _process_group(_context_of(model))
    if group is not None and model not in _groups:
        _groups[model] = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=BACKGROUND_TIMEOUT,
            use_local_synchronization=True,
        )
    return _groups.get(model)


class _quiet(warnings.catch_warnings):  # noqa: N801 (a context manager)
    """Without the warnings of `torch.distributed.checkpoint` about a single process."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered


def _reason(error: BaseException) -> str:
    """The first failure among those of the ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(error)
