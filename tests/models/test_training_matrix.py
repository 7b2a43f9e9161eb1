"""Models, optimizers, precisions, ZeRO levels, accumulation and memory policies put together.

Every two settings of different kinds meet in some row (`matrix_worker.pairwise`). One row in six is
run always, all of them with `--thorough`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import run_ranks

WORKER = Path(__file__).with_name("matrix_worker.py")
PARTS = 6


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    thorough = metafunc.config.getoption("--thorough")
    metafunc.parametrize("part", range(PARTS if thorough else 1))


@pytest.mark.slow
def test_training_equals_one_device(part: int) -> None:
    output = run_ranks(WORKER, 4, f"rows:{PARTS}/{part}", limit_s=900.0)
    print(output)
