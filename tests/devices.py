"""A device for which splitting always pays, so that plans of tiny models communicate."""

from __future__ import annotations

from dataclasses import replace

from autopar.passes.device import COLLECTIVES, Device, Link, Measure
from autopar.passes.device_presets import preset


def slow_device() -> Device:
    """Slow at computing, fast at communicating, nothing costs a fixed time."""
    measures = tuple((kind, (Measure(2, 0.0, 1e9),)) for kind in COLLECTIVES)
    return replace(
        preset("cpu"),
        name="slow",
        flop_rates=(("float32", 1e8),),
        memory_bandwidth=1e8,
        launch=0.0,
        links=(Link("intra", measures), Link("inter", measures)),
    )
