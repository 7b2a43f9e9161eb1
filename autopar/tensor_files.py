"""Files of named whole tensors, read block by block.

A safetensors file is a length, a header in JSON and the tensors one after the other, row by row
(https://huggingface.co/docs/safetensors). So a block of one can be read by itself. Files of
`torch.save` are mapped into memory, where only the pages that are read come in.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autopar.ir.errors import CheckpointError

#: The dtypes of the format that PyTorch has.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip

#: How many bytes are read at once where a block is not contiguous in the file.
CHUNK_BYTES = 8 << 20

_LARGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    begin:
        where it starts in a safetensors file, in bytes
    values:
        the tensor itself, mapped into memory, in a file of `torch.save`
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0
    values: Tensor | None = None

    def read(self, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A block of it, on the CPU. Raises CheckpointError where the file is cut short."""
        if self.values is not None:
            block = self.values
            for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                block = block.narrow(dim, start, size)
            return block
        with open(self.file, "rb") as file:
            return self._read(file, starts, sizes)

    def _read(self, file: BinaryIO, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        block = torch.empty(tuple(sizes), dtype=self.dtype)
        if not block.numel():
            return block
        if not self.shape or tuple(sizes[1:]) == self.shape[1:]:
            row = math.prod(self.shape[1:]) * self.dtype.itemsize
            self._fill(file, block, self.begin + (starts[0] * row if starts else 0))
            return block
        # Rows of the first dimension, some at a time, of which a part is kept.
        row_shape = self.shape[1:]
        row = math.prod(row_shape) * self.dtype.itemsize
        step = max(1, CHUNK_BYTES // row)
        for first in range(0, sizes[0], step):
            count = min(step, sizes[0] - first)
            rows = torch.empty((count, *row_shape), dtype=self.dtype)
            self._fill(file, rows, self.begin + (starts[0] + first) * row)
            for dim in range(1, len(self.shape)):
                rows = rows.narrow(dim, starts[dim], sizes[dim])
            block[first : first + count] = rows
        return block

    def _fill(self, file: BinaryIO, target: Tensor, begin: int) -> None:
        file.seek(begin)
        raw = target.view(-1).view(torch.uint8).numpy()
        if file.readinto(raw) != raw.nbytes:  # type: ignore[attr-defined]
            raise CheckpointError(f"{self.file}: cut short")


def stored_tensors(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a file, or of all files of a folder, by name.

    source:
        a ``.safetensors`` file, a file of `torch.save`, or a folder of them as Hugging Face
        writes it (with or without an index)

    Raises CheckpointError naming the file where there are none, or where one is missing, cut
    short, or something else.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(Path(source)):
        read = _safetensors if file.suffix == ".safetensors" else _torch_file
        found |= read(file)
    return found


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such file or folder")
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (source / index).exists():
            return _indexed(source, source / index)
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        files = sorted(source.glob(pattern))
        if files:
            return files
    raise CheckpointError(f"{source}: holds no *.safetensors, *.bin, *.pt or *.pth")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of files: {error}") from None
    for name in names:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder}: the file {name!r}, named in the index, is missing")
    return [folder / name for name in names]


def _safetensors(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"{file}: cut short, or no safetensors file")
        header = stream.read(length)
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        found = {
            name: StoredTensor(
                file,
                _DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                8 + length + entry["data_offsets"][0],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        end = max(
            (e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"), default=0
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: no safetensors file that can be read: {error!r}") from None
    if size < 8 + length + end:
        raise CheckpointError(f"{file}: cut short: {size} bytes instead of {8 + length + end}")
    return found


def _torch_file(file: Path) -> dict[str, StoredTensor]:
    tensors: Any = None
    with contextlib.suppress(Exception):  # whatever a strange file makes of unpickling
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if isinstance(tensors, Mapping) and set(tensors) & {"state_dict", "model"}:
        tensors = tensors.get("state_dict", tensors.get("model"))
    if not isinstance(tensors, Mapping) or not all(isinstance(n, str) for n in tensors):
        raise CheckpointError(f"{file}: cannot be read as a state dict of tensors")
    return {
        name: StoredTensor(file, value.dtype, tuple(value.shape), values=value)
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }
