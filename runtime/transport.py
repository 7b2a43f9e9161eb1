"""Groups of real processes, over the functional collectives of `torch.distributed`.

Those operators are the ones `torch.compile` understands. gloo gives wrong values for views that
are not contiguous, so `Group` hands over contiguous tensors only.

gloo's own reduce-scatter takes twice as long as its all-to-all followed by a local sum, which
sends the same bytes (`benchmarks/collectives.py`), so that is what runs there. Its all-reduce and
all-gather pass on what they have from rank to rank; of small tensors, where only the number of
messages matters, every rank sends a copy to every other at once instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.ir.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.compiling import is_compiling
from autopar.runtime.exchange import Counts
from autopar.runtime.groups import Group, Landing, release

_c10d = torch.ops._c10d_functional

#: Up to how many bytes, of the copies for all ranks, gloo's processes send each other small tensors
#: directly. Source: `benchmarks/collectives.py` on two and four processes.
_SMALL = 1 << 18
#: What gloo's all-to-all takes.
_EXCHANGED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


class ProcessTransport:
    """The process groups of one process in a mesh, and its `DeviceMesh`.

    Arguments and errors are those of `RankContext.from_process_group`.
    """

    def __init__(
        self, mesh: Mesh, device_mesh: DeviceMesh | None, device_type: str, timeout: timedelta
    ) -> None:
        self.mesh = mesh
        self.device_mesh = device_mesh
        self.rank = 0
        self._timeout = timeout
        #: The rank in the world of each rank of the mesh.
        self._world_ranks = list(range(mesh.size))
        #: Axes in mesh order -> the process group over them that this process is in.
        self._process_groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        if device_mesh is None and mesh.size > 1:
            self.device_mesh = _new_device_mesh(mesh, device_type, timeout)
        if self.device_mesh is not None:
            _check_device_mesh(mesh, self.device_mesh)
            self._world_ranks = self.device_mesh.mesh.flatten().tolist()
            self.rank = _position(self._world_ranks, mesh)
            for name, size in mesh.axes:
                if size > 1:
                    self._process_groups[(name,)] = self.device_mesh.get_group(name)

    def prepare(self, axes_list: Sequence[tuple[str, ...]]) -> None:
        # One communicator serves every order of its axes, so it goes by the mesh's order.
        for axes in sorted({self._in_mesh_order(axes) for axes in axes_list}):
            if axes not in self._process_groups:
                self._process_groups[axes] = self._new_process_group(axes)

    def connect(self, axes: tuple[str, ...]) -> Group:
        process_group = self._process_groups.get(self._in_mesh_order(axes))
        if process_group is None:
            raise MeshError(
                f"group over {axes}: it was not prepared, and creating it now could deadlock; "
                f"name it in RankContext.prepare on every rank (prepared: "
                f"{sorted(self._process_groups)})"
            )
        members = [self._world_ranks[r] for r in self.mesh.group(self.rank, axes)]
        return _ProcessGroup(
            axes, members.index(self._world_ranks[self.rank]), members, process_group
        )

    def _in_mesh_order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in self.mesh.names if name in axes)

    def _new_process_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Every process creates every group over the axes; the one it is in is returned."""
        # Processes outside the mesh do not come here and must not be waited for.
        local = len(self._world_ranks) < dist.get_world_size()
        mine = None
        for members in sorted({self.mesh.group(r, axes) for r in range(self.mesh.size)}):
            group = dist.new_group(
                [self._world_ranks[r] for r in members],
                timeout=self._timeout,
                use_local_synchronization=local,
                group_desc="mesh_" + "_".join(axes),
            )
            if self.rank in members:
                mine = group
        assert mine is not None
        return mine


def _in_real_numbers(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Complex numbers travel as pairs of real ones: gloo's all-to-all and NCCL know no others."""

    @wraps(collective)
    def run(group: _ProcessGroup, x: Tensor, *rest: Any) -> Any:
        if not x.is_complex():
            return collective(group, x, *rest)
        result = collective(group, torch.view_as_real(x.resolve_conj()), *rest)
        if isinstance(result, Tensor):
            return torch.view_as_complex(result)
        return lambda: torch.view_as_complex(result())

    return run


class _ProcessGroup(Group):
    def __init__(
        self,
        axes: tuple[str, ...],
        index: int,
        members: list[int],
        process_group: dist.ProcessGroup,
    ) -> None:
        """`members`: the world ranks, as the group orders them; a process group sorts its own."""
        ranks = dist.get_process_group_ranks(process_group)
        super().__init__(axes, len(members), index, [ranks.index(member) for member in members])
        self._name = process_group.group_name
        self._process_group = process_group

    @_in_real_numbers
    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        if self._is_small(x):
            return _fold(_c10d.wait_tensor(self._send_copies(x)), op)
        return _c10d.wait_tensor(_c10d.all_reduce(x, op, self._name))

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._start_all_gather(x)()

    def _reduce_scatter(self, pieces: Tensor, op: str, dim: int) -> Tensor:
        return self._start_scatter(pieces, op)()

    @_in_real_numbers
    def _all_to_all(self, pieces: Tensor, dims: tuple[int, int]) -> Tensor:
        return _c10d.wait_tensor(self._exchange(pieces))

    @_in_real_numbers
    def _start_all_reduce(self, x: Tensor) -> Landing:
        if self._is_small(x):
            copies = self._send_copies(x)
            return lambda: _fold(_c10d.wait_tensor(copies), "sum")
        # What torch.compile takes down must not write to its operands; it finds out itself
        # that nobody else reads this one.
        in_place = not is_compiling()
        run = _c10d.all_reduce_ if in_place else _c10d.all_reduce
        summed = run(x, "sum", self._name)
        return lambda: _c10d.wait_tensor(summed)

    @_in_real_numbers
    def _start_all_gather(self, x: Tensor) -> Landing:
        if self._is_small(x):
            copies = self._send_copies(x)
            return lambda: _c10d.wait_tensor(copies)
        stacked = _c10d.all_gather_into_tensor(x.unsqueeze(0), self.size, self._name)
        return lambda: _c10d.wait_tensor(stacked)

    def _start_reduce_scatter(self, pieces: Tensor) -> Landing:
        return self._start_scatter(pieces, "sum")

    @_in_real_numbers
    def _start_scatter(self, pieces: Tensor, op: str) -> Landing:
        if self._is_gloo(pieces):
            received = self._exchange(pieces)

            def land() -> Tensor:
                total = _fold(_c10d.wait_tensor(received), op)
                release(received)
                return total

            return land
        piece = _c10d.reduce_scatter_tensor(pieces, op, self.size, self._name)
        return lambda: _c10d.wait_tensor(piece).squeeze(0)

    def _is_gloo(self, x: Tensor) -> bool:
        return self._process_group._get_backend(x.device).name() == "gloo"

    def _is_small(self, x: Tensor) -> bool:
        """Whether a copy to every rank is faster than what passes parts on from rank to rank."""
        copies = self.size * x.numel() * x.element_size()
        return 0 < copies <= _SMALL and x.dtype in _EXCHANGED and self._is_gloo(x)

    def _send_copies(self, x: Tensor) -> Tensor:
        """Start to send a tensor to every process; the i-th that comes is the i-th process'."""
        return self._exchange(x.unsqueeze(0).expand(self.size, *x.shape).contiguous())

    def _exchange(self, pieces: Tensor) -> Tensor:
        """Start to send the i-th piece to the i-th process of the process group."""
        one_each = [1] * self.size
        return _c10d.all_to_all_single(pieces, one_each, one_each, self._name)

    @_in_real_numbers
    def _all_to_all_v(self, flat: Tensor, counts: Counts) -> Tensor:
        # In the order of the process group's own ranks, and back.
        sends, comes = counts.sent(self.index), counts.received(self.index)
        receives = [comes[rank] for rank in self.by_place]
        pieces = flat.split(sends)
        received = _c10d.all_to_all_single(
            torch.cat([pieces[rank] for rank in self.by_place]),
            receives,
            [sends[rank] for rank in self.by_place],
            self._name,
        )
        parts = _c10d.wait_tensor(received).split(receives)
        return torch.cat([parts[place] for place in self.places])


def _fold(pieces: Tensor, op: str) -> Tensor:
    """The elementwise reduction of stacked pieces; booleans come with "max" or "min"."""
    if op == "sum":
        return pieces.sum(0, dtype=pieces.dtype)
    return pieces.amax(0) if op == "max" else pieces.amin(0)


def _new_device_mesh(mesh: Mesh, device_type: str, timeout: timedelta) -> DeviceMesh:
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            raise MeshError(
                f"mesh {mesh}: it needs {mesh.size} processes and there is no process group; "
                "launch with torchrun, or call torch.distributed.init_process_group first"
            )
        dist.init_process_group(timeout=timeout)
    if dist.get_world_size() != mesh.size:
        raise MeshError(
            f"mesh {mesh}: it has {mesh.size} ranks, the world has {dist.get_world_size()}; "
            "to use a part of the world pass a DeviceMesh over it"
        )
    device_mesh = init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.names)
    for group in device_mesh.get_all_groups():
        if group is not dist.group.WORLD:  # that one has the timeout of whoever started it
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return device_mesh


def _check_device_mesh(mesh: Mesh, device_mesh: DeviceMesh) -> None:
    names, sizes = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
    if names != mesh.names or sizes != mesh.sizes:
        raise MeshError(f"device mesh of axes {names} and sizes {sizes}: expected the mesh {mesh}")


def _position(world_ranks: list[int], mesh: Mesh) -> int:
    rank = dist.get_rank()
    if rank not in world_ranks:
        raise MeshError(f"rank {rank} of the world is not in the mesh {mesh}: {world_ranks}")
    return world_ranks.index(rank)
