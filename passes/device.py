"""The hardware a plan is priced for: one device, and the links between devices.

Units throughout: seconds, bytes, bytes per second, floating point operations per second.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.ir.errors import PlanError
from autopar.ir.mesh import Mesh

#: The collectives a link is described for.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

INTRA = "intra"
INTER = "inter"


def bytes_moved(kind: str, group: int) -> float:
    """What one rank sends in a collective, as a fraction of the tensor the group works on.

    That tensor is the one a rank would hold if the group's axes split nothing: the reduced
    tensor, the gathered result, the whole input of a reduce-scatter; for an all-to-all the
    concatenation of all ranks' pieces.
    """
    if kind == "all_reduce":
        return 2 * (group - 1) / group
    if kind == "all_to_all":
        return (group - 1) / group**2
    return (group - 1) / group


@dataclass(frozen=True)
class Measure:
    """One collective at one group size: ``latency + bytes sent by a rank / bandwidth``.

    group:
        ranks in the group
    latency:
        seconds that do not depend on the size (alpha)
    bandwidth:
        bytes per second out of each rank (the "bus bandwidth" of NCCL's own tests)
    """

    group: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """How fast ranks talk over one kind of connection.

    collectives:
        pairs of a collective's name and its measures, sorted by group size. Between two group
        sizes both constants are interpolated over the logarithm of the size; outside they stay.
    """

    name: str
    collectives: tuple[tuple[str, tuple[Measure, ...]], ...]

    def __post_init__(self) -> None:
        missing = set(COLLECTIVES) - {kind for kind, _ in self.collectives}
        if missing:
            raise PlanError(f"link {self.name!r}: no measures of {', '.join(sorted(missing))}")
        for kind, measures in self.collectives:
            groups = [m.group for m in measures]
            if not groups or groups != sorted(set(groups)) or groups[0] < 2:
                raise PlanError(
                    f"link {self.name!r}: group sizes of {kind} must grow from 2 on, got {groups}"
                )
            if any(m.latency < 0 or m.bandwidth <= 0 for m in measures):
                raise PlanError(
                    f"link {self.name!r}: {kind} needs a latency of at least 0 s and a bandwidth "
                    "above 0 B/s"
                )

    def at(self, kind: str, group: int) -> Measure:
        """The constants of one collective at any group size."""
        measures = dict(self.collectives)[kind]
        upper = bisect.bisect_left([m.group for m in measures], group)
        if upper == 0:
            return replace(measures[0], group=group)
        if upper == len(measures):
            return replace(measures[-1], group=group)
        low, high = measures[upper - 1], measures[upper]
        share = math.log(group / low.group) / math.log(high.group / low.group)
        return Measure(
            group,
            low.latency + share * (high.latency - low.latency),
            low.bandwidth + share * (high.bandwidth - low.bandwidth),
        )


@dataclass(frozen=True)
class Device:
    """One device, the hosts it stands in, and the links between devices.

    flop_rates:
        dtype name (``"bfloat16"``) -> attainable floating point operations per second
    memory_bandwidth:
        attainable bytes per second between the device and its own memory
    launch:
        seconds to start one operator
    devices_per_host:
        consecutive ranks that share a host, and so the link `intra`; others use `inter`
    links:
        every known link; `intra` and `inter` must be among them
    axis_links:
        mesh axis -> link name, where the user says so
    """

    name: str
    flop_rates: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch: float
    devices_per_host: int
    links: tuple[Link, ...]
    axis_links: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        known = [link.name for link in self.links]
        for needed in (INTRA, INTER, *(name for _, name in self.axis_links)):
            if needed not in known:
                raise PlanError(
                    f"device {self.name!r}: unknown link {needed!r}: the links are {known}"
                )
        if "float32" not in dict(self.flop_rates):
            raise PlanError(f"device {self.name!r}: flop_rates needs at least 'float32'")

    def flop_rate(self, dtype: torch.dtype) -> float:
        """Operations per second in a dtype; one that is not listed counts as float32."""
        rates = dict(self.flop_rates)
        return rates.get(str(dtype).removeprefix("torch."), rates["float32"])

    def link_of(self, axis: str, mesh: Mesh) -> Link:
        """The link that ranks along one mesh axis talk over.

        Ranks are consecutive along the last axes, so an axis stays within a host when the axis
        and all later ones together fit a host evenly.
        """
        links = {link.name: link for link in self.links}
        chosen = dict(self.axis_links)
        if axis in chosen:
            return links[chosen[axis]]
        span = mesh.axis_size(*mesh.names[mesh.names.index(axis) :])
        fits = span <= self.devices_per_host and self.devices_per_host % span == 0
        return links[INTRA if fits or mesh.size <= self.devices_per_host else INTER]


def device_for(
    spec: str | os.PathLike[str] | Device, mesh: Mesh, links: Mapping[str, str] | None = None
) -> Device:
    """The device a plan is made for.

    spec:
        a preset (``"h100"``, ``"h200"``, ``"a100"``, ``"cpu"``), the path of a file written by
        `save_device` (ending in ``.json``), or a `Device`
    links:
        mesh axis -> link name, for axes that do not follow from the number of devices per host

    Raises PlanError for an unknown preset, axis or link.
    """
    if isinstance(spec, Device):
        device = spec
    elif str(spec).endswith(".json"):
        device = load_device(spec)
    else:
        from autopar.passes.device_presets import preset

        device = preset(str(spec))
    for axis in links or {}:
        if axis not in mesh.names:
            raise PlanError(f"links: unknown mesh axis {axis!r}: the mesh is {mesh}")
    if not links:
        return device
    return replace(device, axis_links=tuple({**dict(device.axis_links), **links}.items()))


def save_device(device: Device, path: str | os.PathLike[str]) -> None:
    """Write a device as JSON. The file appears whole or not at all."""
    target = Path(path)
    text = json.dumps(device_to_json(device), indent=2) + "\n"
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_device(path: str | os.PathLike[str]) -> Device:
    """Read a device that `save_device` wrote. Raises PlanError where it is not one."""
    try:
        return device_from_json(json.loads(Path(path).read_text()))
    except OSError as error:
        raise PlanError(f"device file {os.fspath(path)!r}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        problem = f"not a device description ({type(error).__name__}: {error})"
    except PlanError as error:
        problem = str(error)
    raise PlanError(f"device file {os.fspath(path)!r}: {problem}; write one with save_device")


def device_to_json(device: Device) -> dict[str, Any]:
    """A device as plain data."""
    return {
        "name": device.name,
        "flop_rates": dict(device.flop_rates),
        "memory_bandwidth": device.memory_bandwidth,
        "launch": device.launch,
        "devices_per_host": device.devices_per_host,
        "links": {
            link.name: {
                kind: [[m.group, m.latency, m.bandwidth] for m in measures]
                for kind, measures in link.collectives
            }
            for link in device.links
        },
        "axis_links": dict(device.axis_links),
    }


def device_from_json(data: Any) -> Device:
    """The inverse of `device_to_json`. Raises PlanError where it is not a device."""
    try:
        return Device(
            name=data["name"],
            flop_rates=tuple(data["flop_rates"].items()),
            memory_bandwidth=data["memory_bandwidth"],
            launch=data["launch"],
            devices_per_host=data["devices_per_host"],
            links=tuple(_link(name, entry) for name, entry in data["links"].items()),
            axis_links=tuple(data.get("axis_links", {}).items()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"not a device description ({type(error).__name__}: {error})") from error


def _link(name: str, collectives: Mapping[str, Any]) -> Link:
    return Link(
        name,
        tuple((kind, tuple(Measure(*m) for m in ms)) for kind, ms in collectives.items()),
    )
