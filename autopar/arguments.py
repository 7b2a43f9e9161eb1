"""The tensors of a call: what each rank was given, and what its graph needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.calls import Call
from autopar.ir.calling import Entry, TensorArgument
from autopar.ir.errors import InputError
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.materialise import as_global, placements
from autopar.runtime.groups import RankContext
from autopar.runtime.pieces import piece


@dataclass(frozen=True)
class LocalInput:
    """Which piece of an input a plain tensor is, where every rank gives its own.

    layout:
        how the whole is divided
    whole, local:
        the shape of the whole and of this rank's piece, in the example call
    """

    layout: Layout
    whole: tuple[int, ...]
    local: tuple[int, ...]


def local_inputs(graph: Graph, context: RankContext) -> dict[str, LocalInput]:
    """What the pieces of each input are under the plan of a partitioned graph, by path."""
    found = {}
    for node in graph.sources("input"):
        (value,) = node.results
        assert value.layout is not None
        whole = torch.empty(value.shape, device="meta")
        local = tuple(piece(whole, value.layout, context.mesh, context.coordinates).shape)
        found[node.target] = LocalInput(value.layout, value.shape, local)
    return found


def whole_entries(
    entries: Sequence[Entry], tensors: Mapping[str, Tensor], known: Mapping[str, LocalInput]
) -> tuple[Entry, ...]:
    """The entries of a call with the shapes of the whole tensors in the place of the pieces'.

    Raises InputError for a plain tensor that is not the piece that the example made it.
    """

    def whole(path: str, entry: Any) -> Entry:
        if not isinstance(entry, TensorArgument) or isinstance(tensors[path], DTensor):
            return path, entry
        way_out = (
            "The piece of one rank does not say how large the whole is: give a DTensor, which "
            "does (autopar.DistributedBatches makes them)"
        )
        if path not in known:
            raise InputError(f"{path}: not in the example call. {way_out}")
        expected = known[path]
        if entry.shape != expected.local:
            raise InputError(
                f"{path}: expected shape {expected.local}, got {entry.shape}. {way_out}"
            )
        return path, replace(entry, shape=expected.whole)

    return tuple(whole(path, entry) for path, entry in entries)


def example_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], call: Call, device: torch.device
) -> tuple[Any, Any]:
    """The call with whole tensors on `device` or meta, of which a trace needs only the shapes."""
    entries = dict(call.key.entries)
    whole = {id(tensor): entries[path] for path, tensor in call.tensors.items()}

    def stand_in(tensor: Tensor) -> Tensor:
        entry = whole[id(tensor)]
        usual = not isinstance(tensor, DTensor) and not tensor.is_inference()
        if usual and tensor.device == device and tuple(tensor.shape) == entry.shape:
            return tensor
        made = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return made.requires_grad_(entry.requires_grad)

    return pytree.tree_map_only(Tensor, stand_in, (tuple(args), dict(kwargs)))


def local_tensor(
    tensor: Tensor,
    path: str,
    layout: Layout,
    context: RankContext,
    device: torch.device,
    known: Mapping[str, LocalInput] | None,
) -> Tensor:
    """This rank's piece of an input as its graph wants it.

    known:
        what plain tensors are pieces of; None where they are whole

    A DTensor, and a piece under another layout than the graph's, are redistributed where their
    layouts differ, which communicates.
    """
    if not isinstance(tensor, DTensor):
        tensor = tensor.to(device)
        if known is None:
            return piece(tensor, layout, context.mesh, context.coordinates)
        given = known[path]
        if given.layout == layout:
            return tensor
        tensor = as_global(tensor, given.layout, given.whole, context)
        if not isinstance(tensor, DTensor):
            return tensor
    mesh = context.device_mesh
    if mesh is None:
        return tensor.full_tensor().to(device)
    if tensor.device_mesh != mesh:
        raise InputError(f"{path}: a DTensor on {tensor.device_mesh}, the module runs on {mesh}")
    wanted = placements(layout, context.mesh)
    if list(tensor.placements) != wanted:
        tensor = tensor.redistribute(mesh, wanted)
    return tensor.to_local()
