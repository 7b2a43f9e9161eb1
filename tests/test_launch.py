"""One script runs alone, under torchrun, and under torch.multiprocessing.spawn."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import TESTS

SCRIPT = Path(__file__).with_name("launch_script.py")
LIMIT_S = 300


def run(*command: str, **environment: str) -> dict[tuple[int, int], str]:
    """(rank, world) -> the losses it printed."""
    known = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in known}
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output[-4000:]
    found = re.findall(r"rank (\d) of (\d): ([-\d. ]+)", output)
    return {(int(rank), int(world)): losses for rank, world, losses in found}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
def test_one_script_for_every_launcher() -> None:
    alone = run(str(SCRIPT))
    assert list(alone) == [(0, 1)]
    torchrun = run(
        "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT),
    )  # fmt: skip
    spawn = run(str(SCRIPT), free_port())
    # What `accelerate launch` sets for a single process: nothing, or a world of one.
    single = run(
        str(SCRIPT), WORLD_SIZE="1", RANK="0", LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(),
    )  # fmt: skip
    assert single == alone
    for several in (torchrun, spawn):
        assert sorted(several) == [(0, 2), (1, 2)]
        for losses in several.values():
            for got, want in zip(losses.split(), alone[0, 1].split(), strict=True):
                assert abs(float(got) - float(want)) < 1e-8
