"""What `calibrate` measures: products, memory, launches and collectives, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from autopar.runtime.groups import Group

#: How often a collective of one size is timed; the median counts.
_REPEATS = 7

#: Compute dtypes that are measured, by device type.
_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}
#: Square products grow from the first size to the last, until one takes `_LONG_ENOUGH` seconds.
_PRODUCT_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH = 0.01

#: Bytes copied to measure the memory: more than caches hold.
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}

#: Small operators started one after the other to measure the launch of one.
_LAUNCHES = 500

#: Collectives are timed on float32.
_ITEMSIZE = 4


class Stopwatch:
    """Times things on all ranks at once; what rank 0 measured holds for all."""

    def __init__(self, everyone: Group, device: torch.device) -> None:
        self.everyone, self.device = everyone, device

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The median of some runs, after one that does not count."""
        times = []
        for _ in range(repeats + 1):
            self.everyone.all_reduce(torch.zeros(1, device=self.device))
            self._finish()
            start = time.perf_counter()
            run()
            self._finish()
            times.append(time.perf_counter() - start)
        return self.of_first(statistics.median(times[1:]))

    def of_first(self, number: float) -> float:
        """The number that rank 0 has."""
        mine = number if self.everyone.index == 0 else 0.0
        tensor = torch.tensor([mine], dtype=torch.float64, device=self.device)
        return float(self.everyone.all_reduce(tensor).item())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def flop_rates(watch: Stopwatch) -> tuple[tuple[str, float], ...]:
    """Dtype name -> operations per second of the best of some square products."""
    found = []
    for dtype in _DTYPES[watch.device.type]:
        rate = 0.0
        for n in _PRODUCT_SIZES:
            a, b = (torch.randn(n, n, device=watch.device).to(dtype) for _ in range(2))
            seconds = watch.seconds(lambda a=a, b=b: a @ b, 3)  # type: ignore[misc]
            rate = max(rate, 2 * n**3 / seconds)
            if seconds > _LONG_ENOUGH:
                break
        found.append((str(dtype).removeprefix("torch."), rate))
    return tuple(found)


def memory_bandwidth(watch: Stopwatch) -> float:
    """Bytes read and written per second by a copy."""
    count = _COPY_BYTES[watch.device.type]
    source = torch.ones(count, dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    return 2 * count / watch.seconds(lambda: target.copy_(source), 3)


def launch_seconds(watch: Stopwatch) -> float:
    """Seconds for one small operator that autograd records, in a row of them."""
    start = torch.ones(8, device=watch.device, requires_grad=True)

    def run() -> Tensor:
        x = start
        for _ in range(_LAUNCHES):
            x = x + 1.0
        return x

    return watch.seconds(run, 3) / _LAUNCHES


def collective_sample(watch: Stopwatch, group: Group, kind: str, nbytes: int) -> tuple[int, float]:
    """The size of a whole tensor near `nbytes` that divides, and the seconds of a collective.

    The size is that of `autopar.passes.device.bytes_moved`. All groups of the kind run at once.
    """
    unit = group.size**2
    count = max(1, round(nbytes / _ITEMSIZE / unit)) * unit
    x = torch.zeros(count // _pieces(kind, group.size), device=watch.device)
    return _ITEMSIZE * count, watch.seconds(_call(kind, group, x), _REPEATS)


def _pieces(kind: str, group: int) -> int:
    """Into how many pieces the whole tensor is cut before the collective."""
    return group if kind in ("all_gather", "all_to_all") else 1


def _call(kind: str, group: Group, x: Tensor) -> Callable[[], Tensor]:
    return {
        "all_reduce": lambda: group.all_reduce(x),
        "all_gather": lambda: group.all_gather(x, 0),
        "reduce_scatter": lambda: group.reduce_scatter(x, 0),
        "all_to_all": lambda: group.all_to_all(x, 0, 0),
    }[kind]
