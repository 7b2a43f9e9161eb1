"""Devices that need no measuring: ``h100``, ``h200``, ``a100``, ``cpu``.

Vendor data sheets give peaks; what a kernel attains is taken as `ATTAINABLE` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.errors import PlanError
from autopar.passes.device import COLLECTIVES, INTER, INTRA, Device, Link, Measure, bytes_moved

#: Share of the data sheet's peak that matrix products and memory-bound kernels reach.
#: Source: the constants of a public H100 cluster planner.
ATTAINABLE = 0.7

GB = 1e9
TERA = 1e12
MICROSECOND = 1e-6

#: Seconds to launch one operator. Source: the same planner.
_GPU_LAUNCH = 7 * MICROSECOND

#: Exponentials per second of an H100, at its peak. Source: the FlashAttention-3 paper. It is 16 per
#: multiprocessor and clock cycle, as on an A100.
_H100_SPECIAL = 3.9 * TERA
_A100_SPECIAL = 16 * 108 * 1.41e9

#: Multiprocessors that a collective takes while it runs, one for each of NCCL's channels. The
#: others go on computing, and their share is the overlap. An assumption: how many channels NCCL
#: opens depends on the machine, and what else the two share (memory, power) is left out.
#: `calibrate` measures the overlap.
_CHANNELS = 32
_H100_PROCESSORS, _A100_PROCESSORS = 132, 108

# NVSwitch within an H100 host: collective -> (ranks, latency in µs, GB/s of the whole tensor).
# Source: fitted NCCL tables of a public H100 cluster planner.
_H100_NVSWITCH = {
    "all_reduce": ((2, 10, 324), (4, 15, 236), (8, 31, 267)),
    "all_gather": ((2, 8, 537), (4, 17, 434), (8, 30, 394)),
    "reduce_scatter": ((2, 8, 537), (4, 17, 434), (8, 30, 394)),
}
#: All-to-all within the host, latency in µs and GB/s of one rank's piece. Same source.
_H100_ALL_TO_ALL = (50, 380)

# Latency between hosts grows with the depth of the ring or tree (ranks, µs). Source: the order of
# magnitude NCCL's tests show over InfiniBand, one network round per doubling.
_INTER_LATENCY = ((2, 25), (8, 50), (64, 100), (512, 200))

# gloo over loopback, two processes: collective -> (latency in ms, ms for 8 MB).
# Source: measured with torch 2.13 on a two-core machine. A reduce-scatter runs as an all-to-all
# and a local sum, which reads 8 MB and writes 4 (`runtime/transport.py`); gloo's own takes 14.8 ms.
_GLOO = {
    "all_reduce": (0.3, 6.3),
    "all_gather": (0.4, 8.6),
    "reduce_scatter": (0.25, 3.8),
    "all_to_all": (0.2, 2.6),
}
_GLOO_BYTES = 8e6


def preset(name: str) -> Device:
    """A device by name. Raises PlanError for an unknown one."""
    makers = {"h100": _h100, "h200": _h200, "a100": _a100, "cpu": _cpu}
    if name not in makers:
        raise PlanError(
            f"device {name!r}: unknown; expected {', '.join(makers)}, the path of a .json file or "
            "a Device"
        )
    return makers[name]()


def _h100() -> Device:
    """H100 SXM: 989 TFLOPS bf16, 3.35 TB/s HBM3; NVSwitch, and 400 Gb/s of network per device."""
    return _hopper("h100", 3.35e12)


def _h200() -> Device:
    """H200 SXM: an H100 with 4.8 TB/s of HBM3e (vendor data sheet)."""
    return _hopper("h200", 4.8e12)


def _hopper(name: str, memory: float) -> Device:
    return Device(
        name,
        _HOPPER_RATES,
        ATTAINABLE * memory,
        _GPU_LAUNCH,
        8,
        (_nvswitch(), _network(50)),
        special_rate=ATTAINABLE * _H100_SPECIAL,
        overlap=1 - _CHANNELS / _H100_PROCESSORS,
    )


def _a100() -> Device:
    """A100 80 GB SXM: 312 TFLOPS bf16, 2.04 TB/s HBM2e; 200 Gb/s of network per device.

    NVLink carries 300 GB/s each way against the H100's 450 (data sheets), and its switches do not
    reduce: all-reduce is the ring that reduce-scatter and all-gather are.
    """
    ring = [
        (group, latency, 300 / 450 * bandwidth * bytes_moved("all_gather", group))
        for group, latency, bandwidth in _H100_NVSWITCH["all_gather"]
    ]
    latency, bandwidth = _H100_ALL_TO_ALL
    scatter = (8, latency, 300 / 450 * bandwidth)
    table: dict[str, Sequence[tuple[int, float, float]]] = {
        "all_reduce": [(group, 2 * latency, bandwidth) for group, latency, bandwidth in ring],
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_to_all": [scatter],
    }
    intra = _link(INTRA, table)
    rates = _rates({"bfloat16": 312, "float16": 312, "float32": 19.5, "float64": 19.5})
    return Device(
        "a100",
        rates,
        ATTAINABLE * 2.04e12,
        _GPU_LAUNCH,
        8,
        (intra, _network(25)),
        special_rate=ATTAINABLE * _A100_SPECIAL,
        overlap=1 - _CHANNELS / _A100_PROCESSORS,
    )


def _cpu() -> Device:
    """Processes of one small machine over gloo.

    Two cores train a decoder at about 70 GFLOPS in float32, and one takes 1.2 ns for an exponential
    (measured); the other constants are rounded. Communication needs the cores that compute, so
    nothing overlaps, and computing does not hide memory. `calibrate` measures the machine at hand.
    """
    link = {
        kind: [
            (
                2,
                milliseconds * 1e3,
                bytes_moved(kind, 2) * _whole_bytes(kind) / (whole * 1e-3) / GB,
            )
        ]
        for kind, (milliseconds, whole) in _GLOO.items()
    }
    return Device(
        "cpu",
        (("float32", 70e9), ("float64", 35e9), ("bfloat16", 35e9), ("float16", 10e9)),
        memory_bandwidth=10 * GB,
        launch=5 * MICROSECOND,
        devices_per_host=64,
        links=(_link(INTRA, link), _link(INTER, link)),
        special_rate=0.8e9,
        unhidden=1.0,
        backend="gloo",
        separate_memory=False,
    )


def _whole_bytes(kind: str) -> float:
    """The bytes `bytes_moved` is a fraction of; an all-to-all was timed by one rank's piece."""
    return 2 * _GLOO_BYTES if kind == "all_to_all" else _GLOO_BYTES


def _rates(tera: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple((dtype, ATTAINABLE * rate * TERA) for dtype, rate in tera.items())


#: Dense peaks in TFLOPS, from the vendor's data sheet (float32 without TF32, PyTorch's default).
_HOPPER_RATES = _rates(
    {
        "float8_e4m3fn": 1979,
        "float8_e5m2": 1979,
        "bfloat16": 989,
        "float16": 989,
        "float32": 67,
        "float64": 67,
    }
)


def _nvswitch() -> Link:
    """The link within an H100 host; the source's bandwidths are of the whole tensor."""
    table: dict[str, Sequence[tuple[int, float, float]]] = {
        kind: [(n, latency, whole * bytes_moved(kind, n)) for n, latency, whole in measures]
        for kind, measures in _H100_NVSWITCH.items()
    }
    latency, bandwidth = _H100_ALL_TO_ALL
    table["all_to_all"] = [(8, latency, bandwidth)]
    return _link(INTRA, table)


def _network(bandwidth: float) -> Link:
    """The link between hosts: `bandwidth` in GB/s per device for every collective."""
    measures = [(group, latency, bandwidth) for group, latency in _INTER_LATENCY]
    return _link(INTER, dict.fromkeys(COLLECTIVES, measures))


def _link(name: str, table: Mapping[str, Sequence[tuple[int, float, float]]]) -> Link:
    """A link from collective -> (ranks, latency in µs, GB/s sent by a rank)."""
    return Link(
        name,
        tuple(
            (kind, tuple(Measure(n, a * MICROSECOND, b * GB) for n, a, b in measures))
            for kind, measures in table.items()
        ),
    )
