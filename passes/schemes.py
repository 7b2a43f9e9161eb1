"""The ways in which people split a model by hand, and their mixtures over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Scheme:
    """Which axes do what; every axis of the mesh is in exactly one of the first three.

    sequence:
        whether the tensor axes also split the regions between the pairs
    """

    data: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    sequence: bool = False

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return self.data + self.fsdp

    def parts(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What is done, with the axes that do it."""
        tensor = "tensor + sequence parallel" if self.sequence else "tensor parallel"
        named = (("data parallel", self.data), ("FSDP", self.fsdp), (tensor, self.tensor))
        return ((name, axes) for name, axes in named if axes)

    def __str__(self) -> str:
        parts = list(self.parts())
        if len(parts) == 1:
            return parts[0][0]
        return ", ".join(f"{name} on {'+'.join(axes)}" for name, axes in parts)


def schemes(mesh: Mesh) -> tuple[Scheme, ...]:
    """Every scheme on a mesh without trivial axes.

    One scheme over all axes; tensor parallel on one axis with data parallel or FSDP on the rest;
    FSDP on one axis with data parallel on the rest (known as hybrid sharding).
    """
    every = mesh.names
    found = [
        Scheme(data=every),
        Scheme(fsdp=every),
        Scheme(tensor=every),
        Scheme(tensor=every, sequence=True),
    ]
    if len(every) > 1:
        for axis in reversed(every):
            rest = tuple(a for a in every if a != axis)
            for sequence in (False, True):
                found.append(Scheme(data=rest, tensor=(axis,), sequence=sequence))
                found.append(Scheme(fsdp=rest, tensor=(axis,), sequence=sequence))
            found.append(Scheme(data=rest, fsdp=(axis,)))
    return tuple(found)
