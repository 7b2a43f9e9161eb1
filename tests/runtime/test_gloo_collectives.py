"""The same steps over real processes and gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gloo_worker.py")
TESTS = Path(__file__).parents[1]
LIMIT_S = 300.0


def run_ranks(world: int, *checks: str) -> None:
    """Run checks of the worker on every rank, one after the other; no rank outlives this call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(world), port, *checks],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + LIMIT_S
    try:
        outputs = [
            process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
            for process in ranks
        ]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = {r: out for r, (p, out) in enumerate(zip(ranks, outputs, strict=True)) if p.returncode}
    assert not failed, "\n".join(f"rank {r}:\n{out[-3000:]}" for r, out in failed.items())


def test_two_ranks() -> None:
    run_ranks(2, "steps", "reductions", "sizes", "buckets")


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, "steps", "groups", "part_of_the_world", "sizes", "buckets")


@pytest.mark.slow
def test_missing_rank() -> None:
    run_ranks(4, "missing_rank")
