"""Where devices stand, and the meshes that can be laid over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.passes.device import INTER, INTRA, Device, Link

#: What the axes of a candidate mesh are called, the outermost (slowest) first.
AXIS_NAMES = ("x", "y", "z")


@dataclass(frozen=True)
class Topology:
    """Hosts that each hold the same number of devices; ranks are consecutive within a host.

    intra, inter:
        the link within a host and between hosts, where they are not the device's own

    Raises MeshError for counts that are no positive integers.
    """

    hosts: int
    devices_per_host: int
    intra: Link | None = None
    inter: Link | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise MeshError(f"topology: {name} must be a positive int, got {count!r}")

    @staticmethod
    def of(spec: Topology | int, device: Device) -> Topology:
        """A topology from a number of devices: full hosts of that kind of device, or one host.

        Raises MeshError where the number fills no whole number of hosts.
        """
        if isinstance(spec, Topology):
            return spec
        if isinstance(spec, bool) or not isinstance(spec, int):
            raise MeshError(
                f"devices: expected a count or a Topology, got {type(spec).__name__} {spec!r}"
            )
        full = device.devices_per_host
        if spec <= full:
            return Topology(1, spec)
        hosts, rest = divmod(spec, full)
        if rest:
            raise MeshError(
                f"devices: {spec} devices do not fill hosts of {full} ({device.name!r}); "
                f"give {hosts * full} or {(hosts + 1) * full}, or a Topology(hosts, "
                "devices_per_host)"
            )
        return Topology(hosts, full)

    @property
    def size(self) -> int:
        """The number of devices, one rank each."""
        return self.hosts * self.devices_per_host

    def place(self, device: Device) -> Device:
        """The device as it stands here: its hosts and links are those of the topology."""
        named = {INTRA: self.intra, INTER: self.inter}
        links = tuple(
            replace(named.get(link.name) or link, name=link.name) for link in device.links
        )
        return replace(device, devices_per_host=self.devices_per_host, links=links)

    def __str__(self) -> str:
        if self.hosts == 1:
            return f"1 host of {self.devices_per_host} devices"
        return f"{self.hosts} hosts of {self.devices_per_host} devices"


def candidate_meshes(
    topology: Topology, *, max_axes: int = 3, names: Sequence[str] = AXIS_NAMES
) -> tuple[Mesh, ...]:
    """Every mesh of all devices with at most `max_axes` axes of at least 2 ranks.

    Axes are ordered: ranks are consecutive along the last one, so the last axes stay within a
    host and the first ones leave it. Those with fewer axes come first; a single device has one
    candidate, of size 1.

    Raises MeshError where there are fewer names than axes.
    """
    if max_axes < 1 or max_axes > len(names):
        raise MeshError(
            f"max_axes: expected 1 to {len(names)} (one name of {tuple(names)} per axis), "
            f"got {max_axes}"
        )
    found = (
        sizes for count in range(1, max_axes + 1) for sizes in factorisations(topology.size, count)
    )
    return tuple(Mesh(tuple(zip(names, sizes, strict=False))) for sizes in found) or (
        Mesh(((names[0], 1),)),
    )


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `count` factors of at least 2."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in factorisations(number // first, count - 1):
                yield (first, *rest)
