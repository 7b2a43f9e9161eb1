"""Operators as one rank runs them, for tensors without data: collectives that move nothing.

The planner observes what an operator keeps in memory. The compiler's own operators communicate,
so they run here among groups whose collectives return zeros of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autopar.ir.fused import WAITS
from autopar.ir.mesh import Mesh
from autopar.runtime.exchange import Counts
from autopar.runtime.groups import Group, Landing, RankContext, resized
from autopar.runtime.operators import resolve


def dry_context(mesh: Mesh, backend: str = "nccl") -> RankContext:
    """The first rank of a mesh, alone: collectives allocate what real ones do, and send nothing.

    The first rank's pieces are the largest.

    backend:
        whose collectives (`autopar.passes.device.BACKENDS`)
    """
    group = _GlooGroup if backend == "gloo" else _DryGroup
    return RankContext(mesh, 0, _DryTransport(mesh, group))


def dry_operators(mesh: Mesh, backend: str = "nccl") -> Callable[[str], Callable[..., Any]]:
    """Operator name -> a callable that does on one rank of the mesh all but communicate.

    backend:
        as for `dry_context`
    """
    context = dry_context(mesh, backend)

    def dry(op: str) -> Callable[..., Any]:
        operator = resolve(op)

        def run(*args: Any, **kwargs: Any) -> Any:
            with context.active():
                return operator(*args, **kwargs)

        return run

    return dry


class _DryTransport:
    def __init__(self, mesh: Mesh, group: type[_DryGroup]) -> None:
        self.mesh, self.group = mesh, group

    def prepare(self, axes_list: Sequence[tuple[str, ...]]) -> None:
        pass

    def connect(self, axes: tuple[str, ...]) -> Group:
        members = self.mesh.group(0, axes)
        ordered = sorted(members)
        return self.group(axes, len(members), 0, [ordered.index(rank) for rank in members])


class _DryGroup(Group):
    """What each collective returns, as far as its shape goes.

    Those that may run beside what follows call `WAITS` where they are waited for.
    """

    @property
    def is_first(self) -> bool:
        """Where the first rank keeps a value the others make zeros, which is what costs memory."""
        return False

    # Without a look at each piece: there may be one for each of a thousand ranks.

    def stack(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0].new_zeros((self.size, *pieces[0].shape))

    def join(self, stacked: Tensor, dim: int) -> Tensor:
        if self.in_order:
            return super().join(stacked, dim)
        piece = stacked.shape[1:]
        return stacked.new_zeros(resized(piece, dim, self.size * piece[dim]))

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        return x.new_zeros(x.shape)

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x.new_zeros((self.size, *x.shape))

    def _reduce_scatter(self, pieces: Tensor, op: str, dim: int) -> Tensor:
        return pieces.new_zeros(pieces.shape[1:])

    def _all_to_all(self, pieces: Tensor, dims: tuple[int, int]) -> Tensor:
        return pieces.new_zeros(pieces.shape)

    def _start_all_reduce(self, x: Tensor) -> Landing:
        return lambda: WAITS(x)  # the sum takes the place of its terms

    def _start_all_gather(self, x: Tensor) -> Landing:
        stacked = self._all_gather(x, 0)
        return lambda: WAITS(stacked)

    def _start_reduce_scatter(self, pieces: Tensor) -> Landing:
        return _receive([pieces], self._reduce_scatter(pieces, "sum", 0))

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
        sent = x.new_zeros(x.numel())
        received = sent.new_zeros(sum(counts.received(self.index)))
        return received.new_zeros(resized(shape, concat_dim, sum(concat_sizes)))


class _GlooGroup(_DryGroup):
    """Where a reduce-scatter receives a term of its piece from every rank, and sums them."""

    def _reduce_scatter(self, pieces: Tensor, op: str, dim: int) -> Tensor:
        return self._start_reduce_scatter(pieces)()

    def _start_reduce_scatter(self, pieces: Tensor) -> Landing:
        land = _receive([pieces], pieces.new_zeros(pieces.shape))

        def fold() -> Tensor:
            received = land()
            return received.new_zeros(received.shape[1:])

        return fold


def _receive(sent: list[Tensor], received: Tensor) -> Landing:
    """Waits for what is received; what was sent is held until then."""

    def land() -> Tensor:
        WAITS(sent.pop())
        return WAITS(received)

    return land
