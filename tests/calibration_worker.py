"""What every rank checks of `calibrate`; see `test_calibration.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import autopar
from autopar.calibration import Calibration, calibrate, measure_device
from autopar.passes.device import COLLECTIVES
from autopar.passes.device_file import load_device
from ranks import main
from zoo import build

#: Small, so that the check is quick on a busy machine.
SIZES = (1 << 10, 1 << 14, 1 << 18)


def check_calibration(rank: int, world: int) -> None:
    """All ranks get the same device, it is what the file holds, and plans are priced with it."""
    path = Path(os.environ["CALIBRATION_FILE"])
    measured: list[Calibration] = []

    def keep(**options: Any) -> Calibration:
        measured.append(measure_device(**options))
        return measured[0]

    with mock.patch("autopar.calibration.measure_device", keep):
        device = calibrate(path=path, sizes=SIZES)
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, device)
    assert all(other == device for other in gathered), gathered
    assert load_device(path) == device
    assert device.devices_per_host == world
    assert device.memory_bandwidth > 1e7 and 0 < device.launch < 1
    assert len(device.memory_curve) > 3 and all(pace > 1e6 for _, pace in device.memory_curve)
    assert device.special_rate > 1e6 and 0 <= device.unhidden <= 1 and 0 <= device.overlap <= 1
    assert 0 <= device.skew < 10 and 0 < device.precision < 1
    assert {name for name, _ in device.flop_rates} >= {"float32", "bfloat16"}
    assert all(rate > 1e6 for _, rate in device.flop_rates)
    for link in device.links:
        for kind in COLLECTIVES:
            measure = link.at(kind, world)
            assert 0 <= measure.latency < 10 and measure.bandwidth > 1e3, (link.name, measure)
    check_fits(measured[0], world)
    model, call = build("mlp")
    plan = autopar.plan(model, (), call, mesh={"dp": world}, device=str(path))
    assert plan.device == device and plan.seconds > 0, str(plan)


def check_fits(calibration: Calibration, world: int) -> None:
    """Every collective is measured at every group size, with its residual."""
    assert [(f.kind, f.measure.group) for f in calibration.fits] == [
        (kind, world) for kind in COLLECTIVES
    ]
    for fit in calibration.fits:
        assert len(fit.samples) == len(SIZES) and all(s > 0 for _, s in fit.samples)
        assert fit.residual >= 0 and str(fit) in str(calibration)
    assert "overlap" in str(calibration) and "GB/s at" in str(calibration)


CHECKS = {"calibration": check_calibration}

if __name__ == "__main__":
    main(CHECKS)
