"""`calibrate`: measure this machine, so that plans are priced for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from autopar.ir.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.measuring import (
    Stopwatch,
    arrival_skew,
    collective_sample,
    flop_rates,
    launch_seconds,
    memory_bandwidth,
    memory_curve,
    overlap_share,
    special_rate,
    unhidden_share,
)
from autopar.passes.communication import format_bytes
from autopar.passes.device import (
    COLLECTIVES,
    INTER,
    INTRA,
    Device,
    Link,
    Measure,
    bytes_moved,
)
from autopar.passes.device_file import save_device
from autopar.passes.device_presets import preset
from autopar.runtime.groups import Group, RankContext

_log = logging.getLogger("autopar")

#: Bytes of the tensor that each collective is timed on.
SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)


#: Device type -> the preset whose links stand for those that one rank alone cannot measure.
_UNMEASURED = {"cpu": "cpu", "cuda": "h100"}


@dataclass(frozen=True)
class Fit:
    """How well a line of latency and bandwidth describes one collective at one group size.

    samples:
        pairs of bytes and measured seconds
    residual:
        root mean square of (predicted - measured) / measured
    """

    link: str
    kind: str
    measure: Measure
    samples: tuple[tuple[int, float], ...]
    residual: float

    def __str__(self) -> str:
        m = self.measure
        return (
            f"{self.link} {self.kind} over {m.group}: {m.latency * 1e6:.0f} us + "
            f"{m.bandwidth / 1e9:.3g} GB/s, residual {100 * self.residual:.0f} %"
        )


@dataclass(frozen=True)
class Calibration:
    """What was measured: the device, and how well the lines of its links fit.

    links_from:
        the preset whose links the device has, where one rank alone could measure none
    """

    device: Device
    fits: tuple[Fit, ...]
    links_from: str = ""

    def __str__(self) -> str:
        d = self.device
        rates = ", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in d.flop_rates)
        lines = [
            f"device {d.name!r}, {d.devices_per_host} per host",
            f"products: {rates} GFLOPS",
            f"memory: {d.memory_bandwidth / 1e9:.3g} GB/s; launch: {d.launch * 1e6:.1f} us",
            "operators: "
            + ", ".join(
                f"{pace / 1e9:.3g} GB/s at {format_bytes(size)}" for size, pace in d.memory_curve
            ),
            f"special functions: {d.special_rate / 1e9:.3g} G/s; of computing and memory time "
            f"{d.unhidden:.0%} of the shorter shows; overlap: {d.overlap:.0%}, "
            f"skew: {d.skew * 1e6:.0f} us; measured to {d.precision:.1%}",
            *map(str, self.fits),
        ]
        if self.links_from:
            lines.append(f"one rank: links are those of the preset {self.links_from!r}")
        return "\n".join(lines)


def calibrate(
    *, path: str | os.PathLike[str] | None = None, sizes: Sequence[int] = SIZES
) -> Device:
    """Measure this machine: run it on every rank under torchrun, or alone.

    Every rank gets the same device. `autoparallelize(…, device=…)` takes it, or its file.

    path:
        where rank 0 writes the device as JSON (must end in ``.json``)
    sizes:
        bytes of the tensors that collectives are timed on, at least two different ones

    Alone, links cannot be measured and are those of a preset. `measure_device` also tells how
    well the fitted lines describe the measurements; here that is logged.

    Raises PlanError for a path or sizes that cannot be used.
    """
    if path is not None and not os.fspath(path).endswith(".json"):
        raise PlanError(f"path: a device file must end in .json, got {os.fspath(path)!r}")
    calibration = measure_device(sizes=sizes)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.info("%s", calibration)
        if path is not None:
            save_device(calibration.device, path)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()  # the file is there when this returns, on every rank
    return calibration.device


def measure_device(*, sizes: Sequence[int] = SIZES) -> Calibration:
    """`calibrate` without a file, and with the fits. All ranks call it together."""
    distinct = sorted(set(sizes))
    if len(distinct) < 2 or distinct[0] < 1:
        raise PlanError(f"sizes: expected at least two different numbers of bytes, got {sizes!r}")
    mesh = _host_mesh()
    kind = _device_type()
    if kind == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    context = RankContext.from_process_group(mesh, device_type=kind)
    context.prepare([mesh.names])
    watch = Stopwatch(context.group(mesh.names), torch.device(kind))
    known = preset(_UNMEASURED[kind])
    launch = launch_seconds(watch)
    device = replace(
        known,
        name="calibrated",
        flop_rates=flop_rates(watch),
        memory_bandwidth=memory_bandwidth(watch),
        launch=launch,
        special_rate=special_rate(watch),
        memory_curve=memory_curve(watch, launch),
    )
    rate = device.flop_rate(torch.float32)
    device = replace(device, unhidden=unhidden_share(watch, rate, device.memory_seconds, launch))
    fits = _fits(context, watch, distinct)
    if fits:
        device = replace(
            device,
            devices_per_host=mesh.axis_size(*_inner(mesh)),
            links=(_link(INTRA, fits), _link(INTER, fits)),
            overlap=overlap_share(watch, context.group(mesh.names)),
            skew=arrival_skew(watch, context.group(mesh.names)),
        )
    device = replace(device, precision=watch.precision)
    return Calibration(device, tuple(fits), "" if fits else known.name)


def _device_type() -> str:
    """The devices to measure: those that a process group there already is for, else the best."""
    if dist.is_initialized() and "nccl" not in dist.get_backend():
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- who runs where ------------------------------------------------------------------------------


def _host_mesh() -> Mesh:
    """All ranks, with one axis per prime factor: those of the hosts first (``h…``), then ``d…``."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:
        raise PlanError(f"calibrate: hosts differ: {world} ranks, {local} of them on this host")
    axes = [(f"h{k}", p) for k, p in enumerate(_primes(world // local))]
    axes += [(f"d{k}", p) for k, p in enumerate(_primes(local))]
    return Mesh(tuple(axes) or (("d0", 1),))


def _primes(number: int) -> list[int]:
    """Prime factors, the largest first, so that the smallest groups are the innermost."""
    found = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found[::-1]


def _inner(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in mesh.names if name.startswith("d"))


# --- collectives ---------------------------------------------------------------------------------


def _fits(context: RankContext, watch: Stopwatch, sizes: Sequence[int]) -> list[Fit]:
    """Every collective within the host over 2, …, all its ranks, then between the hosts."""
    mesh, inner = context.mesh, _inner(context.mesh)
    outer = tuple(name for name in mesh.names if name not in inner)
    runs = [(INTRA, inner[k:]) for k in reversed(range(len(inner)))]
    runs += [(INTER, outer[k:]) for k in reversed(range(len(outer)))]
    runs = [(link, axes) for link, axes in runs if mesh.axis_size(*axes) > 1]
    context.prepare(axes for _, axes in runs)
    return [
        _fit(link, kind, context.group(axes), watch, sizes)
        for link, axes in runs
        for kind in COLLECTIVES
    ]


def _fit(link: str, kind: str, group: Group, watch: Stopwatch, sizes: Sequence[int]) -> Fit:
    samples = [collective_sample(watch, group, kind, size) for size in sizes]
    nbytes = np.array([b for b, _ in samples], dtype=float)
    seconds = np.array([s for _, s in samples])
    latency, per_byte = fit_line(nbytes, seconds)
    residual = np.sqrt(np.mean(((latency + per_byte * nbytes) / seconds - 1) ** 2))
    bandwidth = bytes_moved(kind, group.size) / per_byte
    measure = Measure(group.size, latency, bandwidth)
    return Fit(link, kind, measure, tuple(samples), float(residual))


def fit_line(nbytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Latency and seconds per byte that fit best, in relative terms: short times count as much.

    Neither is negative: where the best line has a negative latency it is the best one through
    the origin, where it falls it is nearly flat (a measurement without a trend).
    """
    weights = 1 / seconds
    columns = np.stack([weights, nbytes * weights], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
    if latency < 0:
        slope = nbytes * weights
        latency, per_byte = 0.0, float(slope.sum() / (slope**2).sum())
    if per_byte <= 0:
        # Of the largest size a thousandth of the time counts as transfer.
        latency, per_byte = float(1 / weights.mean()), 1e-3 / float((nbytes * weights).max())
    return float(latency), float(per_byte)


def _link(name: str, fits: Sequence[Fit]) -> Link:
    """A link from its fits; where all ranks share a host, or none do, the other link's."""
    mine = [fit for fit in fits if fit.link == name] or fits
    return Link(
        name,
        tuple(
            (kind, tuple(fit.measure for fit in mine if fit.kind == kind)) for kind in COLLECTIVES
        ),
    )
