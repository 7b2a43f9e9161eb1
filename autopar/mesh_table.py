"""The meshes that were considered for a plan, and what each would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.errors import AutoparError, PlanError
from autopar.ir.mesh import Mesh
from autopar.passes.device import Device


@dataclass(frozen=True)
class MeshOption:
    """One mesh that was tried.

    links:
        for each of its axes, the link that ranks along it talk over
    seconds:
        predicted time of a step of the best plan on it, None where there is none
    reason:
        why there is none
    """

    mesh: Mesh
    links: tuple[str, ...]
    seconds: float | None
    reason: str = ""

    @staticmethod
    def of(mesh: Mesh, device: Device, seconds: float | None, reason: str = "") -> MeshOption:
        """An option on devices as they stand in their hosts."""
        links = tuple(device.link_of(axis, mesh).name for axis in mesh.names)
        return MeshOption(mesh, links, seconds, reason)

    def to_json(self) -> dict[str, Any]:
        """The option as plain data."""
        return {
            "mesh": dict(self.mesh.axes),
            "links": list(self.links),
            "seconds": self.seconds,
            "reason": self.reason,
        }

    @staticmethod
    def from_json(data: Any) -> MeshOption:
        """The inverse of `to_json`. Raises PlanError where a field is missing or malformed."""
        malformed = PlanError(f"the field 'meshes' has a malformed entry: got {data!r}"[:200])
        if not isinstance(data, dict) or set(data) != {"mesh", "links", "seconds", "reason"}:
            raise malformed
        links, seconds = data["links"], data["seconds"]
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not isinstance(links, list) or not all(isinstance(link, str) for link in links):
            raise malformed
        if not isinstance(data["mesh"], dict) or not isinstance(data["reason"], str):
            raise malformed
        if seconds is not None and not number:
            raise malformed
        try:
            mesh = Mesh.of(data["mesh"])
        except AutoparError:
            raise malformed from None
        return MeshOption(mesh, tuple(links), seconds, data["reason"])


def format_meshes(options: Sequence[MeshOption]) -> str:
    """The options as a table: axes with their links, and the time or why there is none."""
    names = [
        " ".join(
            f"{axis}={size} ({link})"
            for (axis, size), link in zip(option.mesh.axes, option.links, strict=True)
        )
        for option in options
    ]
    width = max(map(len, names), default=0)
    return "\n".join(
        f"{name.ljust(width)}  "
        + (option.reason if option.seconds is None else f"{option.seconds * 1e3:10.3f} ms per step")
        for name, option in zip(names, options, strict=True)
    )
