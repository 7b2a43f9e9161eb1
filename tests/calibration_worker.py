"""What every rank checks of `calibrate`; see `test_calibration.py`."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

import autopar
from autopar.calibration import calibrate, measure_device
from autopar.passes.device import COLLECTIVES, load_device
from ranks import main
from zoo import build

#: Small, so that the check is quick on a busy machine.
SIZES = (1 << 10, 1 << 14, 1 << 18)


def check_device(rank: int, world: int) -> None:
    """All ranks get the same device, it is what the file holds, and plans are priced with it."""
    path = Path(os.environ["CALIBRATION_FILE"])
    device = calibrate(path=path, sizes=SIZES)
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, device)
    assert all(other == device for other in gathered), gathered
    assert load_device(path) == device
    assert device.devices_per_host == world
    assert device.memory_bandwidth > 1e7 and 0 < device.launch < 1
    assert {name for name, _ in device.flop_rates} >= {"float32", "bfloat16"}
    assert all(rate > 1e6 for _, rate in device.flop_rates)
    for link in device.links:
        for kind in COLLECTIVES:
            measure = link.at(kind, world)
            assert 0 <= measure.latency < 10 and measure.bandwidth > 1e3, (link.name, measure)
    model, call = build("mlp")
    plan = autopar.plan(model, (), call, mesh={"dp": world}, device=str(path))
    assert plan.device == device and plan.seconds > 0, str(plan)


def check_report(rank: int, world: int) -> None:
    """Every collective is measured at every group size, with its residual."""
    calibration = measure_device(sizes=SIZES)
    assert [(f.kind, f.measure.group) for f in calibration.fits] == [
        (kind, world) for kind in COLLECTIVES
    ]
    for fit in calibration.fits:
        assert len(fit.samples) == len(SIZES) and all(s > 0 for _, s in fit.samples)
        assert fit.residual >= 0 and str(fit) in str(calibration)


CHECKS = {"device": check_device, "report": check_report}

if __name__ == "__main__":
    main(CHECKS)
