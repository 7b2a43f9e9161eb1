"""From a model to the pieces of it that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.trace import Program
from autopar.runtime.groups import RankContext
from autopar.runtime.pieces import piece


class Shell(nn.Module):
    """The place of one module of the model; holds its parameters and its training flag."""


def placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """The DTensor placements of a layout of Shard and Invariant states."""
    found: list[Placement] = []
    for axis in mesh.names:
        state = layout.state(axis)
        found.append(DShard(state) if isinstance(state, int) else DReplicate())
    return found


def as_global(local: Tensor, layout: Layout, shape: Sequence[int], context: RankContext) -> Tensor:
    """This rank's piece of a tensor of some shape as a DTensor, where there is a mesh of ranks."""
    if context.device_mesh is None:
        return local
    return DTensor.from_local(
        local,
        context.device_mesh,
        placements(layout, context.mesh),
        run_check=False,
        shape=torch.Size(shape),
        stride=make_contiguous_strides_for(tuple(shape)),
    )


def held(whole: Tensor, layout: Layout, context: RankContext, device: torch.device) -> Tensor:
    """This rank's own copy of its piece of a tensor, as a DTensor where there are several ranks.

    A tensor on the meta device has no values; the piece is then allocated and not filled.
    """
    part = piece(whole.detach(), layout, context.mesh, context.coordinates)
    if part.is_meta:
        local = torch.empty(part.shape, dtype=part.dtype, device=device)
    else:
        local = part.to(device, copy=True)
    return as_global(local, layout, whole.shape, context)


def box_of(
    layout: Layout, shape: Sequence[int], context: RankContext
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's piece of a tensor of some shape begins, and its shape."""
    starts, sizes = [], []
    for d, size in enumerate(shape):
        line = [size if i == d else 1 for i in range(len(shape))]
        positions = torch.arange(size).view(line).expand(tuple(shape))
        part = piece(positions, layout, context.mesh, context.coordinates)
        starts.append(int(part.flatten()[0]) if part.numel() else 0)
        sizes.append(part.shape[d])
    return tuple(starts), tuple(sizes)


def no_value(dtype: torch.dtype) -> float | int | bool:
    """What stands where no value was given: not a number, where the dtype has such a thing."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def build_shells(root: nn.Module, model: nn.Module) -> None:
    """Give `root` a tree of shells that mirrors the modules of a model, shared ones shared."""
    shells: dict[int, Shell] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            shell = shells.setdefault(id(module), Shell())
            shell.training = module.training
            parent, _, name = path.rpartition(".")
            _submodule(root, parent)._modules[name] = shell


def fill_shells(
    root: nn.Module,
    model: nn.Module,
    program: Program,
    layouts: Mapping[str, Layout],
    context: RankContext,
    device: torch.device,
) -> frozenset[str]:
    """Put this rank's pieces of a model's parameters, and its buffers, into its shells.

    Returns the names of those that have no values, because the model's are on the meta device.
    """
    empty = set()
    for state in program.params.values():
        whole = model.get_parameter(state.name)
        layout = layouts.get(state.name, Layout.whole(len(state.shape)))
        parameter = nn.Parameter(held(whole, layout, context, device), whole.requires_grad)
        if whole.is_meta:
            empty.add(state.name)
        for name in state.names:
            owner, leaf = _owner(root, name)
            owner._parameters[leaf] = parameter
    for state in program.buffers.values():
        values = model.get_buffer(state.name).detach()
        if values.is_meta:
            empty.add(state.name)
            buffer = torch.empty(values.shape, dtype=values.dtype, device=device)
        else:
            buffer = values.clone()
        for name in state.names:
            owner, leaf = _owner(root, name)
            owner._buffers[leaf] = buffer
            if not state.persistent:
                owner._non_persistent_buffers_set.add(leaf)
    return frozenset(empty)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return _submodule(root, parent), leaf


def _submodule(root: nn.Module, path: str) -> nn.Module:
    # `root` itself refuses to be asked before it is compiled.
    return nn.Module.get_submodule(root, path)
