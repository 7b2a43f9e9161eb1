"""`calibrate`: over two gloo processes, alone, and the fit of its lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autopar.calibration import calibrate, fit_line, measure_device
from autopar.ir.errors import PlanError
from autopar.passes.device_presets import preset
from ranks import run_ranks

WORKER = Path(__file__).with_name("calibration_worker.py")


@pytest.mark.slow
def test_two_processes_measure_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALIBRATION_FILE", str(tmp_path / "device.json"))
    run_ranks(WORKER, 2, "calibration", limit_s=240)


def test_alone_the_links_are_those_of_the_preset() -> None:
    torch.set_num_threads(1)
    report = measure_device()
    assert not report.fits and "one rank" in str(report)
    if not torch.cuda.is_available():
        known = preset("cpu")
        assert report.device.links == known.links and report.device.overlap == known.overlap


@pytest.mark.parametrize("sizes", [(), (4096,), (4096, 4096), (0, 4096)])
def test_a_line_needs_two_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="at least two different numbers of bytes"):
        measure_device(sizes=sizes)


def test_a_device_file_ends_in_json(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"must end in \.json"):
        calibrate(path=tmp_path / "device.txt")


NBYTES = np.array([1e3, 1e5, 1e7])


def test_an_exact_line_is_found() -> None:
    latency, per_byte = fit_line(NBYTES, 1e-4 + NBYTES * 1e-9)
    assert latency == pytest.approx(1e-4) and per_byte == pytest.approx(1e-9)


def test_relative_errors_count_so_noise_of_large_sizes_leaves_the_latency() -> None:
    seconds = (1e-4 + NBYTES * 1e-9) * np.array([1.0, 1.0, 1.2])
    latency, per_byte = fit_line(NBYTES, seconds)
    assert latency == pytest.approx(1e-4, rel=0.05)
    assert per_byte == pytest.approx(1.2e-9, rel=0.05)


@pytest.mark.parametrize("seconds", [[1e-6, 2e-4, 3e-2], [3e-3, 2e-3, 1e-3]])
def test_neither_constant_is_ever_negative(seconds: list[float]) -> None:
    latency, per_byte = fit_line(NBYTES, np.array(seconds))
    assert latency >= 0 and per_byte > 0
