"""Mixed precision and `torch.compile` among real processes: see `mixed_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import run_ranks

WORKER = Path(__file__).with_name("mixed_worker.py")


def test_two_ranks_scale_losses_alike_and_send_what_is_planned() -> None:
    run_ranks(WORKER, 2, "overflow", "beside_plain_parameters", "terms", "training", limit_s=480.0)


@pytest.mark.slow
def test_two_ranks_in_torch_compile() -> None:
    run_ranks(WORKER, 2, "compiled", limit_s=480.0)
