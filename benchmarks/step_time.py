"""The time of a training step beside PyTorch's own ways to split a model, and plans by hand.

    python benchmarks/step_time.py [--quick] [--size tiny small large] [--rounds N] [--launches N]

Two gloo processes of this machine, one thread each; the comparison with the model as it is runs in
one. autopar plans for this machine as its ranks measured it (`autopar.calibrate`). Two ways at a
time train the same decoder from the same weights, their first losses are compared, and they take
turns step by step, so that whatever else the machine does meets both. They do so in several groups
of processes, in which they are built in turn: where the memory of each comes to lie, and what was
measured to plan with, makes more of a difference than is looked for. There are more groups, up to
a largest number, as long as it is open on which side of its limit a ratio is. Printed are the
median step in milliseconds, and medians over the rounds of all groups of the ratio of autopar's
step to that of the other way in the same round: below 1 autopar is the faster one. Behind each is
where the median lies in 95 of 100 cases. The exit status is 1 where a ratio is above what it is
held to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

WORKER = Path(__file__).with_name("step_time_worker.py")
#: Seconds that one group of processes may take.
LIMIT_S = 600
#: Rounds per size in a group of processes, more where steps are short. The ratio of single steps
#: has a standard deviation of 0.04, the median of a few groups one of half a hundredth.
ROUNDS = {"tiny": 50, "small": 16, "large": 6}
QUICK_ROUNDS = {"tiny": 50, "small": 3}
#: The fewest and the most groups of processes, one after the other: an even number, so that each
#: way is as often the first.
LAUNCHES, QUICK_LAUNCHES = (2, 6), (1, 1)
#: Memory that was freed stays with a process (glibc's malloc). Otherwise what one way frees last is
#: given back to the system in its step, and the other way has to fetch and clear it anew in its
#: own, which happens to neither where it has a process to itself.
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """Milliseconds of every step of each way, and the peak memory of a process in bytes."""

    times: Times
    peak: int


@dataclass(frozen=True)
class Held:
    """What one of autopar's ways is held to: its time over that of another, by size."""

    ours: str
    other: str
    limits: Mapping[str, float]


@dataclass(frozen=True)
class Set:
    """Ways that take turns in one group of processes, in which all of them have to fit."""

    name: str
    world: int
    ways: tuple[str, ...]
    held: tuple[Held, ...]


def _two(ours: str, other: str, limit: float, world: int = 2, tiny: float | None = None) -> Set:
    """One of autopar's ways and another; `tiny`: the limit for the tiny model, if there is one."""
    limits = {"small": limit, "large": limit}
    if tiny is not None:
        limits["tiny"] = tiny
    ranks = "one rank" if world == 1 else "two ranks"
    return Set(f"{ours} and {other}, {ranks}", world, (ours, other), (Held(ours, other, limits),))


#: Two ways at a time, as a trainer has one model in a process: what more of them leave behind in
#: the heap slows those down whose memory comes and goes with every step.
SETS = (
    _two("autopar", "eager", 1.02, world=1),
    _two("autopar data", "data by hand", 1.02),
    _two("autopar data", "DDP", 1.0),
    _two("autopar sharded", "FSDP2", 1.0),
    _two("autopar tensor", "tensor by hand", 1.02),
    _two("autopar tensor", "DTensor", 1.0, tiny=0.4),
    _two("autopar", "DDP", 1.0, tiny=1.0),
    _two("autopar", "FSDP2", 1.0, tiny=1.0),
    _two("autopar", "DTensor", 1.0, tiny=1.0),
)


def ratio(times: Times, ours: str, other: str) -> float:
    """The median over the rounds of one step's time over another's."""
    return statistics.median(_ratios(times, ours, other))


def _ratios(times: Times, ours: str, other: str) -> list[float]:
    return [a / b for a, b in zip(times[ours], times[other], strict=True)]


def interval(times: Times, ours: str, other: str) -> tuple[float, float]:
    """Where the median of the ratios lies in 95 of 100 cases, whatever their distribution.

    Its ends are two of the ratios, by the normal approximation of how many of them are below the
    median.
    """
    found = sorted(_ratios(times, ours, other))
    outside = max(0, math.floor((len(found) - 1.96 * math.sqrt(len(found))) / 2))
    return found[outside], found[len(found) - 1 - outside]


def is_settled(size: str, what: Set, times: Times) -> bool:
    """Whether every ratio is on one side of what it is held to as far as can be told."""
    for held in what.held:
        low, high = interval(times, held.ours, held.other)
        if size in held.limits and low <= held.limits[size] <= high:
            return False
    return True


def report(size: str, what: Set, measured: Measured) -> bool:
    """Print the times of one set and its ratios; whether all limits hold."""
    times = measured.times
    rounds, peak = len(next(iter(times.values()))), measured.peak / 2**30
    print(f"\n{size}: {what.name}, {rounds} rounds, a process held up to {peak:.2f} GiB")
    for way in what.ways:
        low, middle, high = min(times[way]), statistics.median(times[way]), max(times[way])
        print(f"  {way:16} {middle:10.2f} ms  ({low:.2f} to {high:.2f})")
    good = True
    for held in what.held:
        found = ratio(times, held.ours, held.other)
        low, high = interval(times, held.ours, held.other)
        limit, verdict = held.limits.get(size), ""
        if limit is not None:
            verdict = f"at most {limit:.2f}: {'holds' if found <= limit else 'FAILS'}"
            good = good and found <= limit
        said = f"{found:6.3f}  ({low:.3f} to {high:.3f})  {verdict}"
        print(f"  {f'{held.ours} / {held.other}':34} {said}")
    sys.stdout.flush()
    return good


def measure(
    size: str, what: Set, rounds: int, launches: tuple[int, int], limit_s: float
) -> Measured:
    """The times of a set's ways from several groups of processes, which end with this call.

    launches:
        the fewest groups, and the most, where fewer do not settle the ratios
    limit_s:
        seconds for one group

    Raises RuntimeError with their output where one fails or the time is up.
    """
    fewest, most = launches
    times: Times = {way: [] for way in what.ways}
    peak = 0
    for k in range(most):
        if k >= fewest and k % 2 == 0 and is_settled(size, what, times):
            break
        ways = what.ways if k % 2 == 0 else what.ways[::-1]
        found = _launch(size, replace(what, ways=ways), rounds, limit_s)
        for way, each in found.times.items():
            times[way] += each
        peak = max(peak, found.peak)
    return Measured(times, peak)


def _launch(size: str, what: Set, rounds: int, limit_s: float) -> Measured:
    """The same from one group."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        output, log = Path(folder, "times.json"), Path(folder, "log")
        common = {**os.environ, **KEEP_MEMORY}
        common |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(what.world)}
        command = [sys.executable, str(WORKER), str(output), size, str(rounds), *what.ways]
        with log.open("w") as written:
            ranks = [
                subprocess.Popen(
                    command,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
                for rank in range(what.world)
            ]
            try:
                failed = _wait(ranks, time.monotonic() + limit_s)
            finally:
                for process in ranks:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if failed:
            raise RuntimeError(f"{size}: {what.name}: {failed}\n{log.read_text()[-4000:]}")
        return Measured(**json.loads(output.read_text()))


def _wait(ranks: list[subprocess.Popen[bytes]], until: float) -> str:
    """Wait for all processes; what went wrong, as soon as one fails or the time is up."""
    while time.monotonic() < until:
        codes = [process.poll() for process in ranks]
        if any(codes):
            return f"a process ended with {next(filter(None, codes))}"
        if all(code == 0 for code in codes):
            return ""
        time.sleep(0.1)
    return "the time is up"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="rounds of every size and group of processes")
    parser.add_argument("--launches", type=int, help="the most groups of processes for a set")
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing large")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for one group of processes"
    )
    options = parser.parse_args()
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    fewest, most = QUICK_LAUNCHES if options.quick else LAUNCHES
    most = options.launches or most
    launches = min(fewest, most), most
    sizes = [size for size in options.size if size in rounds]
    good = True
    for size in sizes:
        for what in SETS:
            if what.world == 1 and size == "large":
                continue  # 2 × 9 s a round, and what is compared is the same as in a small model
            try:
                measured = measure(
                    size, what, options.rounds or rounds[size], launches, options.limit
                )
            except RuntimeError as error:
                print(f"\n{error}", flush=True)
                good = False
            else:
                good = report(size, what, measured) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
