"""The device mesh: ranks laid out along named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.errors import MeshError


@dataclass(frozen=True)
class Mesh:
    """Ranks in row-major order along named axes, e.g. `Mesh((("dp", 2), ("tp", 4)))`.

    Rank ``r`` has the coordinates that ``numpy.unravel_index(r, sizes)`` gives: the last axis
    varies fastest, as in `torch.distributed.DeviceMesh`.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names):
            raise MeshError(f"mesh {self}: axis names must differ")
        for name, size in self.axes:
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"mesh axis {name!r}: the name must be a Python identifier")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r}: size must be a positive int, got {size!r}")

    @staticmethod
    def of(spec: Mesh | Mapping[str, int] | int) -> Mesh:
        """A mesh from a count of ranks (one axis ``"dp"``), a dict of sizes, or a mesh."""
        if isinstance(spec, Mesh):
            return spec
        if isinstance(spec, bool) or not isinstance(spec, (int, Mapping)):
            raise MeshError(
                f"mesh: expected a count, a dict of axis sizes or a Mesh, got {type(spec).__name__}"
            )
        if isinstance(spec, int):
            return Mesh((("dp", spec),))
        return Mesh(tuple(spec.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def axis_size(self, *names: str) -> int:
        """The product of the sizes of the named axes (1 for none)."""
        return math.prod(self.sizes_of(names))

    def sizes_of(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes of the named axes, in the order given."""
        try:
            return tuple(map(self._size_of.__getitem__, names))
        except KeyError as error:
            raise MeshError(f"unknown mesh axis {error}: the mesh is {self}") from None

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank along each axis."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not in the mesh {self} of {self.size} ranks")
        position: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.names}

    def index(self, coordinates: Mapping[str, int], axes: tuple[str, ...]) -> int:
        """The position along several axes taken as one, major axis first."""
        position = 0
        for name in axes:
            position = position * self.axis_size(name) + coordinates[name]
        return position

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, major axis first."""
        here = self.coordinates(rank)
        members: list[int] = []
        for step in range(self.axis_size(*axes)):
            there = dict(here)
            for name in reversed(axes):
                step, there[name] = divmod(step, self.axis_size(name))
            members.append(self.index(there, self.names))
        return tuple(members)

    def without_trivial_axes(self) -> Mesh:
        """The same ranks without the axes of size 1, along which nothing is ever split."""
        return Mesh(tuple((name, size) for name, size in self.axes if size > 1))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}={size}" for name, size in self.axes) + "}"
