"""Groups of ranks that communicate, and the place of one rank in the mesh.

A `Group` is one communicator over a tuple of mesh axes, seen from one rank. It works out how
tensors are cut and joined; a transport (`runtime/transport.py` over `torch.distributed`,
`runtime/lockstep.py` inside one process) moves the pieces. Nothing here knows of gradients:
the differentiable steps are in `runtime/collectives.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.errors import LayoutError, MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.compiling import is_compiling
from autopar.runtime.counting import record
from autopar.runtime.exchange import Blocks, Counts, Overlaps
from autopar.runtime.random import RandomState, default_generator

#: How long ranks wait for one another before an operation fails.
DEFAULT_TIMEOUT = timedelta(minutes=10)

REDUCTIONS = ("sum", "max", "min")

#: How large the piece of each rank of a group is, in its order; None where all are equal.
Sizes = tuple[int, ...] | None

#: A collective on its way: waits for it and gives its result.
Landing = Callable[[], Tensor]


class Group:
    """The ranks along some mesh axes, seen from one of them.

    axes:
        the axes, major first; ranks are ordered as they run along them
    size, index:
        how many ranks there are, and the position of this one
    places, by_place, in_order:
        where, in what a transport stacks, the piece of each rank lies (process groups have an order
        of their own), whose piece each place holds, and whether that is the order of the group

    Tensors may have any strides. What communication returns is new, contiguous and carries no
    gradient; in a group of one rank it is the argument, detached. Pieces have one size along the
    dimension that is cut unless `sizes` gives that of each rank; along others they always do.
    Where sizes differ, gathering and scattering pad to the largest and trim, since not every
    transport takes different shapes.
    """

    def __init__(
        self, axes: tuple[str, ...], size: int, index: int, places: Sequence[int] | None = None
    ) -> None:
        self.axes = axes
        self.size = size
        self.index = index
        self.places = tuple(range(size) if places is None else places)
        self.by_place = tuple(sorted(range(size), key=self.places.__getitem__))
        self.in_order = self.places == tuple(range(size))
        #: This rank's number in the mesh, where a context made the group.
        self.rank: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that keeps a value where the others have zeros."""
        return self.index == 0

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Combine the tensors of all ranks elementwise by "sum", "max" or "min"."""
        if op not in REDUCTIONS:
            raise ValueError(f"all_reduce: unknown reduction {op!r}, expected one of {REDUCTIONS}")
        x = x.detach()
        if self.size == 1:
            return x
        self._count("all_reduce", x, 1)
        return self._all_reduce(x.contiguous(), _reduction(x, op))

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes = None) -> Tensor:
        """The tensors of all ranks, concatenated along a dimension in the order of the group."""
        x = x.detach()
        if self.size == 1:
            return x
        if not _differ(sizes):
            self._count("all_gather", x, self.size)
            return self.join(self._all_gather(x.contiguous(), dim), dim % x.dim())
        assert sizes is not None
        padded = _padded(x, dim, max(sizes))
        self._count("all_gather", padded, self.size)
        pieces = self.unstack(self._all_gather(padded, dim))
        trimmed = [p.narrow(dim, 0, size) for p, size in zip(pieces, sizes, strict=True)]
        return torch.cat(trimmed, dim)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes = None) -> Tensor:
        """This rank's block, along a dimension, of the sum of the tensors of all ranks."""
        x = x.detach()
        if self.size == 1:
            return x
        if not _differ(sizes):
            pieces = self._split("reduce_scatter", x, dim)
            self._count("reduce_scatter", pieces, 1)
            return self._reduce_scatter(pieces, _reduction(x, "sum"), dim)
        assert sizes is not None
        most = max(sizes)
        pieces = self.stack([_padded(p, dim, most) for p in x.split(sizes, dim)])
        self._count("reduce_scatter", pieces, 1)
        piece = self._reduce_scatter(pieces, _reduction(x, "sum"), dim)
        return piece.narrow(dim, 0, sizes[self.index]).contiguous()

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        split_sizes: Sizes = None,
        concat_sizes: Sizes = None,
    ) -> Tensor:
        """Send the i-th block along `split_dim` to rank i; join what comes along `concat_dim`."""
        x = x.detach()
        if self.size == 1:
            return x
        if not _differ(split_sizes) and not _differ(concat_sizes):
            pieces = self._split("all_to_all", x, split_dim)
            self._count("all_to_all", pieces, 1)
            arrived = self._all_to_all(pieces, (split_dim, concat_dim))
            return self.join(arrived, concat_dim % x.dim())
        assert split_sizes is not None and concat_sizes is not None
        each = math.prod(resized(resized(x.shape, split_dim, 1), concat_dim, 1))
        counts = Blocks(concat_sizes, split_sizes, each)
        shape = resized(x.shape, split_dim, split_sizes[self.index])
        return self._send(x, split_dim, split_sizes, counts, shape, concat_dim, concat_sizes)

    def recut(self, x: Tensor, dim: int, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
        """This rank's block in other sizes: ranks send each other what the new blocks need."""
        x = x.detach()
        if self.size == 1 or before == after:
            return x
        each = math.prod(size for d, size in enumerate(x.shape) if d != dim % x.dim())
        counts = Overlaps(before, after, each)
        given, taken = counts.given(self.index), counts.taken(self.index)
        return self._send(x, dim, given, counts, list(x.shape), dim, taken)

    def block(self, x: Tensor, dim: int, sizes: Sizes = None) -> Tensor:
        """This rank's block of a tensor along a dimension, as a view."""
        if self.size == 1:
            return x
        if _differ(sizes):
            assert sizes is not None
            return x.narrow(dim, sum(sizes[: self.index]), sizes[self.index])
        size = self._block_size("slice", x, dim)
        return x.narrow(dim, self.index * size, size)

    def stack(self, pieces: Sequence[Tensor]) -> Tensor:
        """One piece for each rank -> `(size, *shape)`, as transports take it."""
        return torch.stack([pieces[rank] for rank in self.by_place])

    def unstack(self, stacked: Tensor) -> list[Tensor]:
        """The piece of each rank, from what a transport stacks."""
        found = stacked.unbind()
        return [found[place] for place in self.places]

    # Collectives that may run beside what follows. The tensors are contiguous and belong to the
    # collective from here on; pieces are stacked in front, each in its place.

    def start_all_reduce(self, x: Tensor) -> Landing:
        """The sum over the ranks: `shape` -> `shape`."""
        self._count("all_reduce", x, 1)
        return self._start_all_reduce(x)

    def start_all_gather(self, x: Tensor) -> Landing:
        """The tensors of all ranks: `shape` -> `(size, *shape)`."""
        self._count("all_gather", x, self.size)
        return self._start_all_gather(x)

    def start_reduce_scatter(self, pieces: Tensor) -> Landing:
        """This rank's piece of the sum: `(size, *shape)` -> `shape`."""
        self._count("reduce_scatter", pieces, 1)
        return self._start_reduce_scatter(pieces)

    def _count(self, kind: str, x: Tensor, times: int) -> None:
        record(self.rank, kind, self.axes, times * x.numel() * x.element_size())

    def _send(
        self,
        x: Tensor,
        split_dim: int,
        split_sizes: Sequence[int],
        counts: Counts,
        shape: Sequence[int],
        concat_dim: int,
        concat_sizes: Sequence[int],
    ) -> Tensor:
        """Send the i-th block along one dimension to rank i; join what comes along another.

        What comes has `shape`, but for its size along `concat_dim`.
        """
        flat = torch.cat([piece.reshape(-1) for piece in x.split(split_sizes, split_dim)])
        self._count("all_to_all", flat, 1)
        received = self._all_to_all_v(flat, counts).split(counts.received(self.index))
        shapes = [resized(shape, concat_dim, size) for size in concat_sizes]
        return torch.cat([r.view(s) for r, s in zip(received, shapes, strict=True)], concat_dim)

    def _split(self, what: str, x: Tensor, dim: int) -> Tensor:
        """The blocks of a tensor along a dimension, stacked in front and contiguous."""
        size = self._block_size(what, x, dim)
        if not self.in_order:
            return self.stack(x.split(size, dim))
        return x.unflatten(dim, (self.size, size)).movedim(dim % x.dim(), 0).contiguous()

    def join(self, stacked: Tensor, dim: int) -> Tensor:
        """Concatenate stacked pieces; a copy only where they are out of order or a larger
        dimension is outside `dim`."""
        if not self.in_order:
            return torch.cat(self.unstack(stacked), dim)
        return stacked.movedim(0, dim).flatten(dim, dim + 1)

    def _block_size(self, what: str, x: Tensor, dim: int) -> int:
        size, rest = divmod(x.shape[dim], self.size)
        if rest:
            raise LayoutError(
                f"{what} over {self.axes}: dimension {dim} of {tuple(x.shape)} "
                f"does not divide into {self.size} equal blocks"
            )
        return size

    # What a transport provides, on contiguous tensors, pieces stacked in front, each in its place.
    # `dim` and `dims` move no data: they are there for transports that compare the ranks' calls.

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        raise NotImplementedError

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        """`shape` -> `(size, *shape)`."""
        raise NotImplementedError

    def _reduce_scatter(self, pieces: Tensor, op: str, dim: int) -> Tensor:
        """`(size, *shape)` -> `shape`."""
        raise NotImplementedError

    def _all_to_all(self, pieces: Tensor, dims: tuple[int, int]) -> Tensor:
        """`(size, *shape)` -> `(size, *shape)`."""
        raise NotImplementedError

    def _start_all_reduce(self, x: Tensor) -> Landing:
        return _landed(self._all_reduce(x, "sum"))

    def _start_all_gather(self, x: Tensor) -> Landing:
        return _landed(self._all_gather(x, 0))

    def _start_reduce_scatter(self, pieces: Tensor) -> Landing:
        return _landed(self._reduce_scatter(pieces, "sum", 0))

    def _all_to_all_v(self, flat: Tensor, counts: Counts) -> Tensor:
        """Send each rank its part, what goes to rank 0 first.

        `flat` is a vector, and so is what comes back, what came from rank 0 first.
        """
        raise NotImplementedError


def release(x: Tensor) -> None:
    """Give back the memory of a tensor that nobody reads any more, whoever still holds it.

    A thread of gloo lets go of what it sent some time after the rank has gone on.
    """
    if x.device.type != "meta" and not is_compiling():
        x.untyped_storage().resize_(0)


def _landed(x: Tensor) -> Landing:
    return lambda: x


def _differ(sizes: Sizes) -> bool:
    return sizes is not None and len(set(sizes)) > 1


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """A shape with another size in one dimension."""
    resized = list(shape)
    resized[dim] = size
    return resized


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """A contiguous tensor that reaches up to `size` in one dimension, zeros behind `x`."""
    if x.shape[dim] == size:
        return x.contiguous()
    padded = x.new_zeros(resized(x.shape, dim, size))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _reduction(x: Tensor, op: str) -> str:
    """A sum of booleans is an "or"; added up as bytes it would overflow."""
    return "max" if op == "sum" and x.dtype == torch.bool else op


class Transport(Protocol):
    """Makes the groups of one rank."""

    def prepare(self, axes_list: Sequence[tuple[str, ...]]) -> None:
        """Create what the named groups need; every rank calls this with the same list."""
        ...

    def connect(self, axes: tuple[str, ...]) -> Group:
        """The group over the axes, each of size greater than one."""
        ...


class RankContext:
    """One rank's place in the mesh, and the groups it communicates over.

    mesh, rank:
        the mesh and this rank's number in it (row-major)
    coordinates:
        this rank's position along each axis
    device_mesh:
        the `torch.distributed` mesh that parameters live on; None inside a lockstep simulation
        and on a mesh of one rank
    random:
        where this rank stands in the random numbers that all ranks agree on
    accumulating:
        whether backward passes leave the gradients of data parallel parameters as terms, to be
        summed over the ranks later (`autopar.runtime.delivery`)
    """

    def __init__(
        self, mesh: Mesh, rank: int, transport: Transport, device_mesh: DeviceMesh | None = None
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.coordinates = mesh.coordinates(rank)
        self.device_mesh = device_mesh
        self._transport = transport
        self._groups: dict[tuple[str, ...], Group] = {}
        #: What `autopar.runtime.fused` made for the buckets of this rank, by what they do.
        self.buckets: dict[Any, Any] = {}
        self.random = RandomState()
        self.accumulating = False

    @property
    def exact_rng(self) -> bool:
        """Whether random operators draw exactly what a single device would."""
        return self.random.exact is not None

    def use_exact_rng(self, seed: int) -> None:
        """From here on draw what one device draws after ``torch.manual_seed(seed)``."""
        self.random = RandomState(exact=torch.Generator().manual_seed(seed))

    def use_default_rng(self, device: torch.device) -> None:
        """From here on draw from PyTorch's default generator of a device, as one device does.

        The ranks must have seeded it alike, and take the same numbers from it elsewhere.
        """
        self.random = RandomState(exact=default_generator(device))

    @staticmethod
    def from_process_group(
        mesh: Mesh,
        *,
        device_mesh: DeviceMesh | None = None,
        device_type: str = "cpu",
        groups: Iterable[tuple[str, ...]] = (),
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> RankContext:
        """The context of this process, over `torch.distributed`; all ranks call it together.

        device_mesh:
            the user's mesh, where there is one; otherwise one is made on `device_type`, after
            starting the default process group from the environment if nobody has
        groups:
            tuples of axes to prepare (see `prepare`)
        timeout:
            for the process groups created here

        Raises MeshError where the mesh does not fit the world. A mesh of one rank needs no
        process group.
        """
        from autopar.runtime.transport import ProcessTransport

        transport = ProcessTransport(mesh, device_mesh, device_type, timeout)
        context = RankContext(mesh, transport.rank, transport, transport.device_mesh)
        context.prepare(groups)
        return context

    def prepare(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Create the communicators of every named tuple of axes, before they are used.

        Creating one is itself a collective: every rank of the mesh must call this, naming the
        same groups (in any order).
        """
        self._transport.prepare(sorted({self._essential(axes) for axes in groups} - {()}))

    def group(self, axes: tuple[str, ...]) -> Group:
        """The ranks along the axes, major first. Axes of size 1 drop out.

        Raises MeshError for an axis that the mesh lacks, and for a group of real processes that
        was not prepared.
        """
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = self._connect(self._essential(axes))
        return group

    def _connect(self, axes: tuple[str, ...]) -> Group:
        group = self._transport.connect(axes) if axes else Group((), 1, 0)
        group.rank = self.rank
        return group

    def _essential(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(axes)) != len(axes):
            raise MeshError(f"group over {axes}: an axis may be named once")
        return tuple(a for a in axes if self.mesh.axis_size(a) > 1)

    @contextmanager
    def active(self) -> Iterator[RankContext]:
        """Make this the context that `current` gives, in this thread."""
        stack = _stack()
        stack.append(self)
        try:
            yield self
        finally:
            stack.pop()


_local = threading.local()


def _stack() -> list[RankContext]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def current() -> RankContext:
    """The context that is active in this thread. Raises MeshError where none is."""
    stack = _stack()
    if not stack:
        raise MeshError(
            "no rank is active in this thread: run the code under "
            "`RankContext.active()`, or inside `run_lockstep`"
        )
    return stack[-1]
