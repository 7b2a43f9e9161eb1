"""A checkpoint's folder: written beside its name and renamed, checked before it is read.

    name                 the checkpoint
    name.saving          one that is being written, or was when its writers were killed
    name.previous        for a moment, the one that a new one of the same name replaces

Whenever the writers are stopped, a whole checkpoint is under `name` or `name.previous`.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autopar.ir.errors import CheckpointError

#: The file that `torch.distributed.checkpoint` writes last.
METADATA = ".metadata"

#: How many names a message lists.
NAMED = 3


def beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


def prepare_folder(folder: Path) -> Path:
    """An empty folder to write the checkpoint `folder` in.

    Raises CheckpointError where the name is taken by something that is no checkpoint, or where
    the folder cannot be made.
    """
    if folder.exists() and not (folder / METADATA).exists() and not _is_empty(folder):
        raise CheckpointError(f"{folder}: exists and is no checkpoint; give another name")
    saving = beside(folder, "saving")
    try:
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None
    return saving


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def put_in_place(folder: Path) -> None:
    """Give the checkpoint that was written in `prepare_folder(folder)` its name."""
    saving, previous = beside(folder, "saving"), beside(folder, "previous")
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)
    os.replace(saving, folder)
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Have the renaming written to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_checkpoint(folder: Path) -> Path:
    """Where the checkpoint of a name is; raises CheckpointError where there is none."""
    for place in (folder, beside(folder, "previous")):
        if (place / METADATA).exists():
            return place
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such checkpoint")
    raise CheckpointError(f"{folder}: not a checkpoint, it has no file {METADATA!r}")


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds, after a look at its files.

    Raises CheckpointError where one is missing or cut short.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (OSError, EOFError, ValueError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder / METADATA}: cannot be read: {error}") from None
    needed: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        end = stored.offset + stored.length
        needed[stored.relative_path] = max(end, needed.get(stored.relative_path, 0))
    for name, size in needed.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(
                f"{folder}: the file {name!r} is missing; all files of a checkpoint must lie in "
                "one folder that every rank can read"
            ) from None
        if found < size:
            raise CheckpointError(
                f"{folder}: the file {name!r} is cut short: {found} bytes instead of {size}"
            )
    return metadata


def require_tensors(
    folder: Path, metadata: Metadata, prefix: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless a checkpoint holds exactly these tensors under a prefix."""
    stored = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    problems = []
    missing = [name for name in shapes if name not in stored]
    if missing:
        problems.append(f"it lacks {_some(missing)}")
    unknown = [name for name in stored if name not in shapes]
    if unknown:
        problems.append(f"the model lacks {_some(unknown)}")
    for name, shape in shapes.items():
        if stored.get(name, shape) != shape:
            problems.append(f"{name!r} is {stored[name]} in it, {shape} in the model")
            break
    if problems:
        raise CheckpointError(f"{folder}: of another model: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    listed = ", ".join(map(repr, names[:NAMED]))
    return f"{listed} and {len(names) - NAMED} more" if len(names) > NAMED else listed
