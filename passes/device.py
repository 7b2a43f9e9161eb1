"""The hardware a plan is priced for: one device, and the links between devices.

Units throughout: seconds, bytes, bytes per second, floating point operations per second.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from autopar.ir.errors import PlanError
from autopar.ir.mesh import Mesh

#: The collectives a link is described for.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

#: What moves the data. Over gloo a reduce-scatter is an exchange of pieces and a local sum
#: (`runtime/transport.py`): a rank receives as much as it sends, where NCCL writes one piece.
BACKENDS = ("nccl", "gloo")

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
    special_rate:
        special functions (exponentials, logarithms …) per second
    memory_curve:
        pairs of bytes and bytes per second: at what pace an operator that reads and writes so
        many bytes in all, its result in fresh memory, goes through them. Small tensors stay in
        caches, large ones may have to be mapped anew. Sorted by bytes; between two entries the
        time is interpolated, outside the pace stays. Empty: always `memory_bandwidth`.
    unhidden:
        what share of the shorter of an operator's computing and memory times is not hidden
        behind the longer one: 0 for a roofline, 1 where the two add up, so that products with
        few operations per byte attain less of the flop rate than large ones
    overlap:
        seconds of communication that run beside one second of backward computing without
        delaying it; 0 where nothing overlaps
    skew:
        seconds that a collective after computing takes longer than one right after another: ranks
        do not come to it together, and it waits for the last of them
    backend:
        one of `BACKENDS`
    precision:
        by what share a measurement differs when it is taken again. Plans whose predicted times
        are closer than that are not told apart: of them the simplest is taken. 0 where constants
        are taken as they are
    separate_memory:
        whether its memory is apart from the host's. A CPU's is not: what is kept on the host
        takes of the same
    """

    name: str
    flop_rates: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch: float
    devices_per_host: int
    links: tuple[Link, ...]
    axis_links: tuple[tuple[str, str], ...] = ()
    special_rate: float = math.inf
    memory_curve: tuple[tuple[float, float], ...] = ()
    unhidden: float = 0.0
    overlap: float = 0.0
    skew: float = 0.0
    backend: str = "nccl"
    precision: float = 0.0
    separate_memory: bool = True

    def __post_init__(self) -> None:
        known = [link.name for link in self.links]
        for needed in (INTRA, INTER, *(name for _, name in self.axis_links)):
            if needed not in known:
                raise PlanError(
                    f"device {self.name!r}: unknown link {needed!r}: the links are {known}"
                )
        if "float32" not in dict(self.flop_rates):
            raise PlanError(f"device {self.name!r}: flop_rates needs at least 'float32'")
        if self.backend not in BACKENDS:
            raise PlanError(
                f"device {self.name!r}: backend must be one of {BACKENDS}, got {self.backend!r}"
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Refuse constants that cannot be."""
        rates = {f"flop_rates of {dtype}": rate for dtype, rate in self.flop_rates}
        rates |= {"memory_bandwidth": self.memory_bandwidth, "special_rate": self.special_rate}
        rates |= {f"memory_curve at {size:g} B": pace for size, pace in self.memory_curve}
        for what, rate in rates.items():
            if not rate > 0:
                raise PlanError(f"device {self.name!r}: {what} must be above 0, got {rate!r}")
        for what, seconds in (("launch", self.launch), ("skew", self.skew)):
            if not 0 <= seconds < math.inf:
                raise PlanError(f"device {self.name!r}: {what} must be 0 s or more, got {seconds}")
        for what in ("unhidden", "overlap", "precision"):
            share = getattr(self, what)
            if not 0 <= share <= 1:
                raise PlanError(f"device {self.name!r}: {what} must be from 0 to 1, got {share!r}")
        if self.devices_per_host < 1:
            raise PlanError(
                f"device {self.name!r}: devices_per_host must be at least 1, "
                f"got {self.devices_per_host!r}"
            )
        sizes = [size for size, _ in self.memory_curve]
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] <= 0):
            raise PlanError(
                f"device {self.name!r}: memory_curve must be at growing sizes, got {sizes}"
            )

    def flop_rate(self, dtype: torch.dtype) -> float:
        """Operations per second in a dtype; one that is not listed counts as float32."""
        rates = dict(self.flop_rates)
        return rates.get(str(dtype).removeprefix("torch."), rates["float32"])

    def memory_seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """How long an operator takes to read and write so many bytes in all."""
        if not self.memory_curve:
            return nbytes / self.memory_bandwidth
        sizes, seconds = self._memory_times
        inside = np.interp(nbytes, sizes, seconds)
        smaller = nbytes * (seconds[0] / sizes[0])
        larger = nbytes * (seconds[-1] / sizes[-1])
        return np.where(nbytes < sizes[0], smaller, np.where(nbytes > sizes[-1], larger, inside))

    @cached_property
    def _memory_times(self) -> tuple[np.ndarray, np.ndarray]:
        sizes, paces = np.array(self.memory_curve).T
        return sizes, sizes / paces

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
        `device_file.save_device` (ending in ``.json``), or a `Device`
    links:
        mesh axis -> link name, for axes that do not follow from the number of devices per host

    Raises PlanError for an unknown preset, axis or link.
    """
    if isinstance(spec, Device):
        device = spec
    elif str(spec).endswith(".json"):
        from autopar.passes.device_file import load_device

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
