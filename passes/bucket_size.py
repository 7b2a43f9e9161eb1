"""Which parameters share a collective, by what the device's links and memory cost.

One collective for many tensors pays latency once, and copies each of them into and out of memory
that was not in use. So a bucket is closed when it is large enough for latency to matter little,
and a tensor of which the copies take longer than two latencies travels alone: one that it would
not share, and as much for a call of its own.

The bucket used first is also the last one of the backward pass, beside which nothing is left to
compute, and the first one to be waited for where parameters are gathered. It is the smallest, and
those behind it grow: each is twice as large as the one before, until they are full.
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

#: Bounds of a bucket in bytes. Below, the overhead of a call outweighs any latency; above, so
#: much of a backward pass goes by before it starts that less hides it, and gathered copies grow.
SMALLEST, LARGEST = 1 << 20, 32 << 20


#: Bytes that no cache holds, and that the system takes back when they are freed. The rate at which
#: so many are copied is the one for memory that was not in use, whatever the size.
FRESH = 64 << 20


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

    def enough(self, before: int) -> float:
        """Bytes from which a bucket is closed that has so many in front of it."""
        return min(self.full, float(SMALLEST << before))


@cache
def bucket_size(device: Device, mesh: Mesh, kind: str, axes: tuple[str, ...]) -> BucketSize:
    """How tensors travel through a collective (a kind of `collective_line`) over some axes."""
    line = collective_line(device, mesh, kind, axes)
    waits = line.latency + device.launch
    full = float(LARGEST)
    if line.per_byte > 0:
        enough = line.latency / line.per_byte * (1 / LATENCY_SHARE - 1)
        full = min(max(enough, SMALLEST), LARGEST)
    copying = float(device.memory_seconds(np.array(2.0 * FRESH))) / FRESH
    alone = min(max(2 * waits / copying, SMALLEST), full)
    return BucketSize(line, waits, full, alone, copying)
