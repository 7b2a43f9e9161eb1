"""How much memory one rank needs for a training step, and for what."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.dry_run import dry_operators
from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.passes.communication import format_bytes
from autopar.passes.device import Device
from autopar.passes.memory.contributors import Contributor, contributors
from autopar.passes.memory.simulation import memory_timeline
from autopar.passes.memory.timeline import Timeline

#: How many contributors to the peak a report names.
CONTRIBUTORS = 5

#: Unit of a size -> bytes; decimal as vendors count, binary with an "i".
UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", 1)
}


@dataclass(frozen=True)
class MemoryReport:
    """The predicted memory of one training step on one rank; print it to read it.

    optimizer:
        whose state is counted
    timeline:
        everything held, and when; all sizes in bytes
    separate_memory:
        whether the device's memory is apart from the host's
    """

    optimizer: str
    timeline: Timeline
    separate_memory: bool = True

    @property
    def peak(self) -> int:
        """The most bytes in use at one time."""
        return self.timeline.peak

    @property
    def host(self) -> int:
        """The bytes that are kept in the host's memory, among the peak's if it is the device's."""
        return sum(self.timeline.host.values()) + sum(self.timeline.host_state.values())

    @property
    def phase(self) -> str:
        """When that is: "forward", "backward" or "optimizer step"."""
        return self.timeline.phase(self.timeline.peak_position)

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        """What is in use at the peak by module and kind, the largest first."""
        return contributors(self.timeline)

    def __str__(self) -> str:
        lines = [
            f"memory of one training step on one rank, optimizer {self.optimizer}: "
            f"peak {format_bytes(self.peak)} in the {self.phase}",
            f"{'':<12}  {'at the peak':>12}  {'at most':>12}",
        ]
        most = self.timeline.kind_peaks
        lines += [
            f"{kind:<12}  {format_bytes(nbytes):>12}  {format_bytes(most[kind]):>12}"
            for kind, nbytes in self.timeline.kinds_at_peak.items()
            if most[kind]
        ]
        if self.host:
            state = sum(self.timeline.host_state.values())
            of_it = f", {format_bytes(state)} of it optimizer state" if state else ""
            where = "" if self.separate_memory else ", which is the device's"
            lines.append(f"in the host's memory{where}: {format_bytes(self.host)}{of_it}")
        lines.append("largest at the peak:")
        lines += [f"  {contributor}" for contributor in self.contributors[:CONTRIBUTORS]]
        lines += [
            f"note: {op} could not be observed; it is taken to save all it reads and makes"
            for op in self.timeline.assumed
        ]
        return "\n".join(lines)


def memory_report(
    graph: Graph, optimizer: str = "adam", device: Device | None = None
) -> MemoryReport:
    """The report of a partitioned graph, or of a graph on one device.

    optimizer:
        "none", "sgd", "momentum", "adam" or "adamw"
    device:
        whose collectives the ranks use, and whether its memory is apart from the host's; default:
        NCCL's, and it is

    Predicted are the tensors of the step as PyTorch allocates them. Not counted are the memory
    allocator's own overhead, the libraries' workspaces and the communication buffers.

    Raises PlanError for an unknown optimizer.
    """
    backend, apart = ("nccl", True) if device is None else (device.backend, device.separate_memory)
    operators = dry_operators(graph.mesh or Mesh.of({}), backend)
    timeline = memory_timeline(graph, operators, optimizer=optimizer, separate_memory=apart)
    return MemoryReport(optimizer, timeline, apart)


def parse_size(size: int | str) -> int:
    """Bytes of a size such as ``80 * 10**9``, ``"80GB"``, ``"80GiB"`` or ``"512 MB"``.

    Raises PlanError for anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size)
        units = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}
        if found and found[2].lower() in units:
            nbytes = math.floor(float(found[1]) * units[found[2].lower()])
            if nbytes > 0:
                return nbytes
    raise PlanError(
        f"memory size: got {size!r}, expected a positive number of bytes, or a text such as "
        f"'80GB' or '80GiB' (units {', '.join(UNITS)})"
    )
