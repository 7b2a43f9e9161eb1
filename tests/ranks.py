"""Real gloo processes for tests: one launcher imports everything once, then forks the ranks.

A test calls `run_ranks(worker, world, "check", …)`. The worker is a script that ends in
``main(CHECKS)``, where CHECKS maps a name to a function of ``(rank, world)`` that fails by raising.
Ranks find the environment that torchrun gives them; nobody has made a process group yet.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

TESTS = Path(__file__).parent
Check = Callable[[int, int], None]


def run_ranks(worker: Path, world: int, *checks: str, limit_s: float = 240.0) -> str:
    """Run checks on every rank, one after the other; no process outlives this call.

    Returns what the ranks printed. Fails with that where a check fails or the time is up.
    """
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(worker), str(world), *checks],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        code = None
        output = ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    assert code is not None, f"not done after {limit_s:g} s:\n{output[-6000:]}"
    assert code == 0, output[-6000:]
    return output


def main(checks: Mapping[str, Check]) -> None:
    """The launcher: fork the ranks, and stop all of them where one fails."""
    world, names = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(
            target=_rank,
            args=(rank, world, port, [checks[name] for name in names]),
            daemon=True,
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    sys.exit(_first_failure(ranks))


def _first_failure(ranks: list[BaseProcess]) -> int:
    """Wait for all ranks, or for one to fail."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.kill()
                    other.join()
                return 1
    return 0


def _rank(rank: int, world: int, port: int, checks: list[Check]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    code = 1
    try:
        for check in checks:
            check(rank, world)
        code = 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
    if torch.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)  # a rank is a fork: it must not run the launcher's own exit handlers
