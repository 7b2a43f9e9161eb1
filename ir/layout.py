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

The names and the duality of R and P are those of typed SPMD in PyTorch and JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """

    dims: tuple[tuple[str, ...], ...]
    replicate: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    @staticmethod
    def whole(rank: int) -> Layout:
        """Invariant along every axis."""
        return Layout(((),) * rank)

    @staticmethod
    def make(
        dims: Iterable[Iterable[str]], replicate: Iterable[str] = (), partial: Iterable[str] = ()
    ) -> Layout:
        """A layout with its axes in canonical order, refused if an axis is used twice."""
        layout = Layout(
            tuple(tuple(d) for d in dims), tuple(sorted(replicate)), tuple(sorted(partial))
        )
        used = layout.mentioned
        if len(set(used)) != len(used):
            raise LayoutError(f"layout {layout}: a mesh axis may be used once")
        return layout

    def __hash__(self) -> int:
        # Layouts key every cost table of the planner: the hash is worked out once.
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", hash((self.dims, self.replicate, self.partial)))
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
        return Layout.make(dims, replicate, partial)

    def without_gradient(self) -> Layout:
        """The same value layout for a tensor that carries no gradient: R is then I."""
        return Layout(self.dims, (), self.partial) if self.replicate else self

    def counts(self, mesh: Mesh) -> tuple[int, ...]:
        """Into how many pieces each dimension is split (MindSpore's strategy of a tensor)."""
        return tuple(mesh.axis_size(*axes) for axes in self.dims)

    def divides(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether every split dimension divides evenly."""
        return all(size % n == 0 for size, n in zip(shape, self.counts(mesh), strict=True))

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's piece; every split dimension must divide evenly."""
        if len(shape) != self.rank:
            raise LayoutError(
                f"layout {self}: it has {self.rank} dimensions, the tensor {tuple(shape)} "
                f"has {len(shape)}"
            )
        for d, (size, n) in enumerate(zip(shape, self.counts(mesh), strict=True)):
            if size % n:
                raise LayoutError(
                    f"layout {self}: dimension {d} of size {size} does not divide into {n} pieces"
                )
        return tuple(s // n for s, n in zip(shape, self.counts(mesh), strict=True))

    def __str__(self) -> str:
        dims = ", ".join("@" + "+".join(d) if d else "-" for d in self.dims)
        extra = f" rep({','.join(self.replicate)})" if self.replicate else ""
        extra += f" sum({','.join(self.partial)})" if self.partial else ""
        return f"[{dims}]{extra}"
