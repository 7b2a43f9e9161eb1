"""Pieces of tensors, written and read through `torch.distributed.checkpoint`.

A checkpoint holds whole tensors as the blocks that ranks had of them. Each block says where in the
tensor it lies, so that a reader finds what it needs under any other division. What is written is
the format of `torch.distributed.checkpoint`; only how pieces are found differs from a `DTensor`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Piece:
    """One rank's block of a tensor.

    local:
        the block itself; reading fills it
    start:
        where it begins in the whole
    shape:
        of the whole
    """

    local: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(tensor: Tensor) -> Piece:
        return Piece(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))

    @staticmethod
    def of(tensor: Tensor) -> Piece:
        """The piece that a DTensor holds here, or a whole tensor."""
        if not isinstance(tensor, DTensor):
            return Piece.whole(tensor)
        if any(p.is_partial() for p in tensor.placements):
            wanted = [Replicate() if p.is_partial() else p for p in tensor.placements]
            tensor = tensor.redistribute(tensor.device_mesh, wanted)
        _, start = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return Piece(tensor.to_local().detach(), tuple(start), tuple(tensor.shape))

    def copied(self) -> Piece:
        """The same piece in memory of its own, on the CPU."""
        return Piece(self.local.to("cpu", copy=True), self.start, self.shape)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.start), self.local.shape)


def _that_hold_something(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Without the empty blocks of dimensions that are smaller than the number of ranks."""
    return {
        name: piece
        for name, piece in pieces.items()
        if piece.local.numel() or not math.prod(piece.shape)
    }


class SavePieces(DefaultSavePlanner):
    """What this rank writes; a block that several ranks hold is written by one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.state_dict = _that_hold_something(self.state_dict)
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].local


class LoadPieces(DefaultLoadPlanner):
    """What this rank reads: whatever overlaps its blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: Any,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = _that_hold_something(state_dict)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def _write_item(name: str, piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, piece.start),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=piece.chunk,
            properties=TensorProperties.create_from_tensor(piece.local),
            size=torch.Size(piece.shape),
        ),
    )
