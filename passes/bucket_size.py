"""Which parameters share a collective, by what the device's links and memory cost.

One collective for many tensors pays latency once, and copies each of them into and out of memory
that was not in use. So a bucket is closed when it is large enough for latency to matter little,
and a tensor of which the copies take longer than one more latency travels alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.passes.collective_cost import Line, collective_line
from autopar.passes.device import Device

#: The share of a collective's time that may be latency.
LATENCY_SHARE = 0.05

#: Bounds of a bucket in bytes. Below, the overhead of a call outweighs any latency; above, the
#: last bucket of a backward pass, which nothing hides, grows, and so do gathered copies.
SMALLEST, LARGEST = 1 << 20, 32 << 20


@dataclass(frozen=True)
class BucketSize:
    """How tensors travel through one collective.

    line:
        the time of the collective
    waits:
        seconds of it, and of its launch, that do not depend on the size
    full:
        bytes from which a bucket is closed: latency is `LATENCY_SHARE` of its time, within bounds
    alone:
        bytes from which a tensor travels alone
    copying:
        seconds to copy a byte into or out of a bucket
    """

    line: Line
    waits: float
    full: float
    alone: float
    copying: float


@cache
def bucket_size(device: Device, mesh: Mesh, kind: str, axes: tuple[str, ...]) -> BucketSize:
    """How tensors travel through a collective (a kind of `collective_line`) over some axes."""
    line = collective_line(device, mesh, kind, axes)
    waits = line.latency + device.launch
    full = float(LARGEST)
    if line.per_byte > 0:
        enough = line.latency / line.per_byte * (1 / LATENCY_SHARE - 1)
        full = min(max(enough, SMALLEST), LARGEST)
    copying = float(device.memory_seconds(np.array(2 * full))) / full
    alone = min(max(waits / copying, SMALLEST), full)
    return BucketSize(line, waits, full, alone, copying)
