"""Layouts: what one rank holds of one tensor, and of its gradient.

Along each mesh axis a tensor is in one of four states (docs/design.md, "The four states"):

========== ============================== =============================================
state      the value on each rank         its gradient on each rank
========== ============================== =============================================
``d``      a block of dimension ``d``     the same block of the gradient
``"I"``    the whole value                the whole gradient, the same everywhere
``"R"``    the whole value                a term: the gradient is the sum over ranks
``"P"``    a term: the sum is the value   the whole gradient, the same everywhere
========== ============================== =============================================

The names and the duality of R and P are those of typed SPMD in PyTorch and JAX. Where a dimension
does not divide, its blocks are uneven (`autopar.ir.cut`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.ir.cut import Span, is_even, largest, simplest_unit, span
from autopar.ir.errors import LayoutError
from autopar.ir.mesh import Mesh

INVARIANT = "I"
REPLICATE = "R"
PARTIAL = "P"

State = int | str


@dataclass(frozen=True)
class Layout:
    """One state per mesh axis; axes that are not mentioned are Invariant.

    dims:
        for each dimension the axes that split it, the major one first
    replicate, partial:
        the axes in state R and P, sorted by name
    units:
        for each dimension how many elements stay together where it is cut (`autopar.ir.cut`);
        empty where that is one everywhere. Layouts that give the same pieces of a tensor are
        equal once they are `simplified`
    """

    dims: tuple[tuple[str, ...], ...]
    replicate: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    units: tuple[int, ...] = ()

    @staticmethod
    def whole(rank: int) -> Layout:
        """Invariant along every axis."""
        return _made(((),) * rank, (), (), ())

    @staticmethod
    def make(
        dims: Iterable[Iterable[str]],
        replicate: Iterable[str] = (),
        partial: Iterable[str] = (),
        units: Iterable[int] = (),
    ) -> Layout:
        """A layout with its axes in canonical order, refused if an axis is used twice."""
        split = tuple(tuple(d) for d in dims)
        return _made(split, tuple(sorted(replicate)), tuple(sorted(partial)), _plain(split, units))

    def __hash__(self) -> int:
        # Layouts key every cost table of the planner: the hash is worked out once.
        if "_hash" not in self.__dict__:
            key = (self.dims, self.replicate, self.partial, self.units)
            object.__setattr__(self, "_hash", hash(key))
        return self.__dict__["_hash"]

    def __getstate__(self) -> dict[str, object]:
        # Hashes of strings differ between processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def mentioned(self) -> tuple[str, ...]:
        """Every axis that is not Invariant."""
        return tuple(a for d in self.dims for a in d) + self.replicate + self.partial

    @property
    def split_axes(self) -> tuple[str, ...]:
        return tuple(a for d in self.dims for a in d)

    def state(self, axis: str) -> State:
        """The state along one axis: a dimension, "I", "R" or "P"."""
        for d, axes in enumerate(self.dims):
            if axis in axes:
                return d
        if axis in self.replicate:
            return REPLICATE
        return PARTIAL if axis in self.partial else INVARIANT

    def with_state(self, axis: str, state: State) -> Layout:
        """The layout with one axis changed; a new split becomes the minor-most of its dimension."""
        dims = [tuple(a for a in d if a != axis) for d in self.dims]
        replicate = [a for a in self.replicate if a != axis]
        partial = [a for a in self.partial if a != axis]
        if isinstance(state, int):
            dims[state] = (*dims[state], axis)
        elif state == REPLICATE:
            replicate.append(axis)
        elif state == PARTIAL:
            partial.append(axis)
        return Layout.make(dims, replicate, partial, self.units)

    def without_gradient(self) -> Layout:
        """The same value layout for a tensor that carries no gradient: R is then I."""
        return _made(self.dims, (), self.partial, self.units) if self.replicate else self

    def unit(self, dim: int) -> int:
        """How many elements of a dimension stay together where it is cut."""
        return self.units[dim] if self.units else 1

    def with_unit(self, dim: int, unit: int) -> Layout:
        """The layout with another unit in one dimension."""
        units = [unit if d == dim else self.unit(d) for d in range(self.rank)]
        return Layout(self.dims, self.replicate, self.partial, _plain(self.dims, units))

    def simplified(self, shape: Sequence[int], mesh: Mesh) -> Layout:
        """The same pieces of a tensor of some shape, in the smallest units that give them."""
        if not self.units:
            return self
        units = [
            simplest_unit(size, mesh.sizes_of(axes), unit)
            for size, axes, unit in zip(shape, self.dims, self.units, strict=True)
        ]
        return Layout(self.dims, self.replicate, self.partial, _plain(self.dims, units))

    def counts(self, mesh: Mesh) -> tuple[int, ...]:
        """Into how many pieces each dimension is split (MindSpore's strategy of a tensor)."""
        return tuple(mesh.axis_size(*axes) for axes in self.dims)

    def pieces(self, shape: Sequence[int], mesh: Mesh, dims: Iterable[int] | None = None) -> float:
        """How often the largest piece goes into the whole, in some dimensions (default: in all).

        The number of pieces where they are even, less where they are not.
        """
        number = 1.0
        for d in range(self.rank) if dims is None else dims:
            if self.dims[d]:
                counts = mesh.sizes_of(self.dims[d])
                most = largest(shape[d], counts, self.unit(d))
                number *= shape[d] / most if most else math.prod(counts)
        return number

    def divides(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether all ranks hold pieces of one shape."""
        return all(
            is_even(size, mesh.sizes_of(axes), self.unit(d))
            for d, (size, axes) in enumerate(zip(shape, self.dims, strict=True))
        )

    def span(self, dim: int, size: int, mesh: Mesh, coordinates: Mapping[str, int]) -> Span:
        """From where to where the piece of the rank at `coordinates` reaches in a dimension."""
        axes = self.dims[dim]
        at = [coordinates[axis] for axis in axes]
        return span(size, mesh.sizes_of(axes), at, self.unit(dim))

    def local_shape(
        self, shape: Sequence[int], mesh: Mesh, coordinates: Mapping[str, int] | None = None
    ) -> tuple[int, ...]:
        """The shape of the piece of the rank at `coordinates`; without them, of the largest.

        No rank's piece is larger in any dimension than that of the first rank.
        """
        if not coordinates:
            return _largest_piece(self, tuple(shape), mesh)
        self.check(shape)
        spans = (self.span(d, size, mesh, coordinates) for d, size in enumerate(shape))
        return tuple(stop - start for start, stop in spans)

    def check(self, shape: Sequence[int]) -> None:
        """Raise LayoutError unless the layout is one of tensors of this shape."""
        if len(shape) != self.rank:
            raise LayoutError(
                f"layout {self}: it has {self.rank} dimensions, the tensor {tuple(shape)} "
                f"has {len(shape)}"
            )
        if not self.units:
            return
        for d, (size, unit) in enumerate(zip(shape, self.units, strict=True)):
            if unit < 1 or size % unit:
                raise LayoutError(
                    f"layout {self}: dimension {d} of size {size} has no units of {unit}"
                )

    @property
    def cuts(self) -> tuple[str, ...]:
        """How each dimension is cut, as text: ``""``, ``"@dp+tp"``, ``"@tp/64"``."""
        units = self.units or (1,) * self.rank
        return tuple(
            f"@{'+'.join(axes)}{f'/{unit}' if unit > 1 else ''}" if axes else ""
            for axes, unit in zip(self.dims, units, strict=True)
        )

    def __str__(self) -> str:
        dims = ", ".join(cut or "-" for cut in self.cuts)
        extra = f" rep({','.join(self.replicate)})" if self.replicate else ""
        extra += f" sum({','.join(self.partial)})" if self.partial else ""
        return f"[{dims}]{extra}"


@lru_cache(maxsize=1 << 16)
def _made(
    dims: tuple[tuple[str, ...], ...],
    replicate: tuple[str, ...],
    partial: tuple[str, ...],
    units: tuple[int, ...],
) -> Layout:
    """The layout of canonical parts. Equal ones are one object, which keeps look-ups short."""
    layout = Layout(dims, replicate, partial, units)
    used = layout.mentioned
    if len(set(used)) != len(used):
        raise LayoutError(f"layout {layout}: a mesh axis may be used once")
    return layout


@lru_cache(maxsize=1 << 14)
def _largest_piece(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    layout.check(shape)
    return tuple(
        largest(size, mesh.sizes_of(axes), layout.unit(d)) if axes else size
        for d, (size, axes) in enumerate(zip(shape, layout.dims, strict=True))
    )


def _plain(dims: Sequence[Sequence[str]], units: Iterable[int]) -> tuple[int, ...]:
    """Units in canonical form: 1 where nothing is cut, nothing at all where all are 1."""
    given = tuple(units)
    if not given:
        return ()
    if len(given) != len(dims):
        raise LayoutError(f"units {given}: expected one for each of {len(dims)} dimensions")
    found = tuple(unit if axes else 1 for unit, axes in zip(given, dims, strict=True))
    return found if any(unit != 1 for unit in found) else ()
