"""What `calibrate` measures: products, memory, special functions, launches, collectives and skew.

Everything is measured on all ranks at once, because that is how a step runs: where ranks share
cores, caches or memory, the rates that each of them gets are in the figures. A measurement lasts
until the slowest rank is done with it, as a step does, and the median of some counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from autopar.passes.device import COLLECTIVES
from autopar.runtime.groups import Group

#: How often a thing is timed, and how long it is repeated each time.
_REPEATS = 5
_LONG_ENOUGH = 0.02

#: Compute dtypes that are measured, by device type.
_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}
#: Square products grow from the first size to the last, until one takes `_LONG_PRODUCT` seconds.
_PRODUCT_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_LONG_PRODUCT = 0.02
#: Products ``[m, k] @ [k, n]`` with few operations per byte, thin along each of their dimensions.
_THIN = {
    "cpu": ((1024, 32, 1024), (1024, 1024, 32), (32, 1024, 1024), (2048, 32, 2048)),
    "cuda": ((8192, 128, 8192), (8192, 8192, 128), (128, 8192, 8192), (16384, 64, 16384)),
}

#: Bytes copied to measure the memory: more than caches hold.
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
#: Bytes that an operator reads and writes, for the curve of paces.
_MOVED_BYTES = {
    "cpu": tuple(1 << k for k in (16, 18, 20, 22, 23, 24, 25, 26, 27)),
    "cuda": tuple(1 << k for k in (20, 22, 24, 26, 28, 30)),
}
#: Bytes of results that are kept while new ones are made, as a forward pass keeps its activations:
#: more than caches hold, and less than the C library gives back to the system at once.
_FOOTPRINT = {"cpu": 48 << 20, "cuda": 1 << 31}
#: A block that is freed first: the C library keeps what is freed from then on, blocks up to this
#: size and not only up to 128 KiB, as it does once a training step has freed a large tensor.
_FREED_FIRST = 31 << 20

#: Numbers whose exponentials are taken: few enough to stay in a cache.
_SPECIAL_COUNT = {"cpu": 1 << 16, "cuda": 1 << 22}
#: Below this share of an exponential's time the function itself is not seen behind the memory.
_VISIBLE = 0.1

#: Small operators started one after the other to measure the launch of one.
_LAUNCHES = 200

#: Collectives are timed on float32.
_ITEMSIZE = 4

#: Messages of a size of gradient buckets that are under way at once while ranks compute.
_BUCKETS, _BUCKET_BYTES = 4, 1 << 22
#: Computing beside communication: its time without, as a share of the communication's.
_BESIDE = 0.7
#: The order of the square product that is computed meanwhile.
_PRODUCT_BESIDE = {"cpu": 256, "cuda": 2048}
#: Seconds of computing between two collectives, what each of them moves, and how many follow.
_BETWEEN, _SKEW_BYTES, _OFTEN = 5e-3, 1 << 18, 8


class Stopwatch:
    """Times things on all ranks at once; what it tells is the same on all of them.

    everyone:
        the group of all ranks, each of which makes the same calls
    """

    def __init__(self, everyone: Group, device: torch.device) -> None:
        self.everyone, self.device = everyone, device
        self._deviations: list[float] = []

    @property
    def precision(self) -> float:
        """By what share one measurement differs from the others of the same thing, typically."""
        return min(statistics.median(self._deviations), 1.0) if self._deviations else 0.0

    def seconds(self, run: Callable[[], object], repeats: int = _REPEATS) -> float:
        """How long one call takes: the median of some measurements, each until the last rank is
        done, each of as many calls as take a while."""
        run()
        count = max(1, math.ceil(_LONG_ENOUGH / max(self.once(run), 1e-9)))

        def many() -> None:
            for _ in range(count):
                run()

        times = [self.once(many) for _ in range(repeats)]
        middle = statistics.median(times)
        self._deviations.append(statistics.median(abs(t - middle) for t in times) / middle)
        return middle / count

    def once(self, run: Callable[[], object]) -> float:
        """How long the slowest rank takes for one call that all begin together."""
        self.slowest(0.0)
        self._finish()
        start = time.perf_counter()
        run()
        self._finish()
        return self.slowest(time.perf_counter() - start)

    def slowest(self, number: float) -> float:
        """The largest of all ranks' numbers; every rank waits for the others."""
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        return float(self.everyone.all_reduce(tensor, "max").item())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def product(self, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
        """Seconds of ``[m, k] @ [k, n]``."""
        m, k, n = shape
        a, b = (torch.randn(s, device=self.device).to(dtype) for s in ((m, k), (k, n)))
        return self.seconds(lambda: a @ b)


def flop_rates(watch: Stopwatch) -> tuple[tuple[str, float], ...]:
    """Dtype name -> operations per second of a large square product."""
    found = []
    for dtype in _DTYPES[watch.device.type]:
        rate = 0.0
        for n in _PRODUCT_SIZES:
            seconds = watch.product((n, n, n), dtype)
            rate = 2 * n**3 / seconds
            if seconds > _LONG_PRODUCT:
                break
        found.append((str(dtype).removeprefix("torch."), rate))
    return tuple(found)


def memory_bandwidth(watch: Stopwatch) -> float:
    """Bytes read and written per second by a copy from one place to another, both in use."""
    count = _COPY_BYTES[watch.device.type]
    source = torch.ones(count, dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    return 2 * count / watch.seconds(lambda: target.copy_(source))


def memory_curve(watch: Stopwatch, launch: float) -> tuple[tuple[float, float], ...]:
    """Bytes moved -> bytes per second of an operator whose result is kept, without its launch.

    As in a forward pass, each operator reads what the one before has made, and its result comes
    to lie in memory that is not in use.
    """
    torch.ones(_FREED_FIRST, dtype=torch.uint8)
    found = []
    for moved in _MOVED_BYTES[watch.device.type]:
        start = torch.ones(moved // 2 // _ITEMSIZE, device=watch.device)
        count = max(2, _FOOTPRINT[watch.device.type] // (moved // 2))

        def chain(start: Tensor = start, count: int = count) -> None:
            kept = [start]
            for _ in range(count):
                kept.append(kept[-1] * 1.0)

        seconds = watch.seconds(chain) / count
        # Of a small tensor's time at least a tenth is taken to be memory.
        found.append((float(moved), moved / max(seconds - launch, 0.1 * seconds)))
    return tuple(found)


def special_rate(watch: Stopwatch) -> float:
    """Exponentials per second beyond the time of the memory; infinite where they do not show."""
    x = torch.linspace(-1, 1, _SPECIAL_COUNT[watch.device.type], device=watch.device)
    whole, memory = watch.seconds(x.exp), watch.seconds(x.neg)
    extra = whole - memory
    return x.numel() / extra if extra > _VISIBLE * whole else math.inf


def unhidden_share(
    watch: Stopwatch, rate: float, memory: Callable[[np.ndarray], np.ndarray], launch: float
) -> float:
    """How much of the shorter of computing and memory time shows in the time of thin products.

    rate:
        operations per second of large float32 products
    memory:
        bytes -> seconds, as `Device.memory_seconds`
    """
    shares = []
    for m, k, n in _THIN[watch.device.type]:
        measured = watch.product((m, k, n), torch.float32) - launch
        nbytes = _ITEMSIZE * (m * k + k * n + m * n)
        times = 2 * m * k * n / rate, float(memory(np.array([nbytes]))[0])
        shares.append((measured - max(times)) / min(times))
    return min(max(statistics.median(shares), 0.0), 1.0)


def launch_seconds(watch: Stopwatch) -> float:
    """Seconds for one small operator that autograd records, forward or backward, in a row."""
    start = torch.ones(8, device=watch.device, requires_grad=True)

    def run() -> None:
        x = start
        for _ in range(_LAUNCHES):
            x = x * 2.0
        x.sum().backward()
        start.grad = None

    return watch.seconds(run) / (2 * _LAUNCHES)


def collective_sample(watch: Stopwatch, group: Group, kind: str, nbytes: int) -> tuple[int, float]:
    """The size of a whole tensor near `nbytes` that divides, and the seconds of a collective.

    The size is that of `autopar.passes.device.bytes_moved`. All groups of the kind run at once.
    Results are kept for a while, so that new ones do not come to lie where the last ones were.
    """
    size, call = _collective(watch, group, kind, nbytes)
    kept: deque[Tensor] = deque(maxlen=max(1, (1 << 25) // size))
    return size, watch.seconds(lambda: kept.append(call()))


def _collective(
    watch: Stopwatch, group: Group, kind: str, nbytes: int
) -> tuple[int, Callable[[], Tensor]]:
    """The size of a whole tensor near `nbytes` that divides, and a collective on it."""
    unit = group.size**2
    count = max(1, round(nbytes / _ITEMSIZE / unit)) * unit
    pieces = group.size if kind in ("all_gather", "all_to_all") else 1
    x = torch.zeros(count // pieces, device=watch.device)
    calls = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_gather": lambda: group.all_gather(x, 0),
        "reduce_scatter": lambda: group.reduce_scatter(x, 0),
        "all_to_all": lambda: group.all_to_all(x, 0, 0),
    }
    return _ITEMSIZE * count, calls[kind]


def _computing(watch: Stopwatch, seconds: float) -> Callable[[], None]:
    """Products that take about so long, to run between or beside collectives."""
    n = _PRODUCT_BESIDE[watch.device.type]
    a = torch.randn(n, n, device=watch.device)
    count = max(1, round(seconds / watch.product((n, n, n), torch.float32)))

    def compute() -> None:
        for _ in range(count):
            a @ a

    return compute


def arrival_skew(watch: Stopwatch, group: Group) -> float:
    """Seconds that a collective takes longer after computing than right after another one."""
    compute = _computing(watch, _BETWEEN)
    extra = []
    for kind in COLLECTIVES:
        _, call = _collective(watch, group, kind, _SKEW_BYTES)
        call()
        for _ in range(_REPEATS):
            computing, sending, both = (
                watch.once(lambda runs=runs: _often(*runs))  # type: ignore[misc]
                for runs in ((compute,), (call,), (compute, call))
            )
            extra.append((both - computing - sending) / _OFTEN)
    return max(statistics.median(extra), 0.0)


def _often(*runs: Callable[[], object]) -> None:
    for _ in range(_OFTEN):
        for run in runs:
            run()


def overlap_share(watch: Stopwatch, group: Group) -> float:
    """Seconds of all-reduces that are gained by one second of products beside them.

    All-reduces are started, products computed, and the all-reduces waited for; what that takes
    less than the two one after the other is what one hides of the other.
    """
    buckets = [
        torch.zeros(_BUCKET_BYTES // _ITEMSIZE, device=watch.device) for _ in range(_BUCKETS)
    ]

    def communicate(meanwhile: Callable[[], object]) -> None:
        landings = [group.start_all_reduce(bucket) for bucket in buckets]
        meanwhile()
        for land in landings:
            land()

    communicate(lambda: None)
    alone = watch.seconds(lambda: communicate(lambda: None), 3)
    compute = _computing(watch, _BESIDE * alone)
    shares = []
    for _ in range(_REPEATS):
        # Taken in turns, so that all three see the machine as it is at the time.
        computing = watch.once(compute)
        sending = watch.once(lambda: communicate(lambda: None))
        together = watch.once(lambda: communicate(compute))
        shares.append((computing + sending - together) / min(computing, sending))
    return min(max(statistics.median(shares), 0.0), 1.0)
