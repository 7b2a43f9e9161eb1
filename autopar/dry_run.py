"""Operators as one rank runs them, for tensors without data: collectives that move nothing.

The planner observes what an operator keeps in memory. The compiler's own operators communicate,
so they run here among groups whose collectives return empty tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.groups import Group, RankContext
from autopar.runtime.operators import resolve


def dry_operators(mesh: Mesh) -> Callable[[str], Callable[..., Any]]:
    """Operator name -> a callable that does on one rank of the mesh all but communicate.

    The rank is the last one, which holds the most: where a value is masked to all ranks but the
    first, this one makes the zeros.
    """
    context = RankContext(mesh, mesh.size - 1, _DryTransport(mesh))

    def dry(op: str) -> Callable[..., Any]:
        operator = resolve(op)

        def run(*args: Any, **kwargs: Any) -> Any:
            with context.active():
                return operator(*args, **kwargs)

        return run

    return dry


class _DryTransport:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def prepare(self, axes_list: Sequence[tuple[str, ...]]) -> None:
        pass

    def connect(self, axes: tuple[str, ...]) -> Group:
        size = self.mesh.axis_size(*axes)
        return _DryGroup(axes, size, size - 1)


class _DryGroup(Group):
    """Collectives that allocate what real ones would, and send nothing."""

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        return x.new_empty(x.shape)

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x.new_empty((self.size, *x.shape))

    def _reduce_scatter(self, pieces: Tensor, op: str, dim: int) -> Tensor:
        return pieces.new_empty(pieces.shape[1:])

    def _all_to_all(self, pieces: Tensor, dims: tuple[int, int]) -> Tensor:
        return pieces.new_empty(pieces.shape)
