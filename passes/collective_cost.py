"""The time of one collective: latency plus bytes over bandwidth (alpha-beta)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from autopar.ir.mesh import Mesh
from autopar.passes.device import Device, Link, bytes_moved


class Line(NamedTuple):
    """A time that is linear in the size of a tensor: `latency` + `per_byte` * bytes (seconds)."""

    latency: float
    per_byte: float

    def at(self, nbytes: float) -> float:
        return self.latency + self.per_byte * nbytes


NOTHING = Line(0.0, 0.0)


@cache
def collective_line(device: Device, mesh: Mesh, kind: str, axes: tuple[str, ...]) -> Line:
    """The time of a collective over the ranks along `axes`, as a line over `nbytes`.

    kind:
        "all_reduce", "all_gather", "reduce_scatter" or "all_to_all"

    nbytes is the size of the tensor that one rank would hold if `axes` split nothing (other axes
    may): the reduced tensor, the gathered result, the whole input of a reduce-scatter, all ranks'
    pieces of an all-to-all together.

    Several axes form one group. Over several links its bytes pass at the pace of the slowest
    one, and it waits for each link in turn: within the hosts, then between them.
    """
    group = mesh.axis_size(*axes)
    if group == 1:
        return NOTHING
    sizes: dict[Link, int] = {}
    for axis in axes:
        if mesh.axis_size(axis) > 1:
            link = device.link_of(axis, mesh)
            sizes[link] = sizes.get(link, 1) * mesh.axis_size(axis)
    latency = sum(link.at(kind, size).latency for link, size in sizes.items())
    bandwidth = min(link.at(kind, group).bandwidth for link in sizes)
    return Line(latency, bytes_moved(kind, group) / bandwidth)


def blocking_line(device: Device, mesh: Mesh, kind: str, axes: tuple[str, ...]) -> Line:
    """`collective_line` of a collective in the midst of computing, which waits for it."""
    line = collective_line(device, mesh, kind, axes)
    return line if line == NOTHING else Line(line.latency + device.skew, line.per_byte)


def collective_time(
    device: Device, mesh: Mesh, kind: str, axes: tuple[str, ...], nbytes: float
) -> float:
    """Seconds of one collective that computing waits for; `nbytes` as in `collective_line`."""
    return blocking_line(device, mesh, kind, axes).at(nbytes)
