"""Whether predictions can be trusted: predicted against measured step time and peak memory.

    python benchmarks/prediction.py [--quick] [--ranks 2,4] [--models gpt2,mlp] [--operators]

Real gloo processes with one thread each calibrate themselves (`autopar.calibrate`), then train
several plans of each model: the baselines, the searched plan, and some that are bad on purpose.
A step is forward, backward and an update by fused Adam, on both sides. Plans take turns, so that a
busy machine slows all of them alike; a step lasts until the last rank is done, and the median
counts. Memory is the largest number of bytes of live tensors on any rank.

Two plans are tied where their times, measured or predicted, differ by at most 10 %. The ranking
holds where every pair that is not tied is predicted in the order in which it was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("prediction_worker.py")
#: Times closer than this are tied; memory must be predicted as closely.
TIE = 0.1
#: Seconds that one number of ranks may take.
LIMIT_S = 900


@dataclass(frozen=True)
class Row:
    """One plan on one mesh: seconds of a step and peak bytes of a rank, predicted and measured."""

    plan: str
    mesh: str
    predicted: float
    measured: float
    spread: float
    memory: int
    live: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    @property
    def memory_error(self) -> float:
        return self.memory / self.live - 1


def misordered(rows: Sequence[Row], tie: float = TIE) -> list[tuple[Row, Row]]:
    """The pairs that are not tied and were predicted in another order than measured."""

    def clearly(a: float, b: float) -> bool:
        return max(a, b) > (1 + tie) * min(a, b)

    return [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if clearly(a.predicted, b.predicted)
        and clearly(a.measured, b.measured)
        and (a.predicted < b.predicted) != (a.measured < b.measured)
    ]


def spearman(rows: Sequence[Row]) -> float:
    """Rank correlation of predicted and measured times."""

    def ranks(values: Sequence[float]) -> list[int]:
        return [sorted(values).index(v) for v in values]

    pairs = zip(ranks([r.predicted for r in rows]), ranks([r.measured for r in rows]), strict=True)
    n = len(rows)
    return 1 - 6 * sum((a - b) ** 2 for a, b in pairs) / (n * (n * n - 1))


def kendall(rows: Sequence[Row]) -> float:
    """Agreeing minus disagreeing pairs, over all pairs."""
    pairs = list(itertools.combinations(rows, 2))
    signs = [
        math.copysign(1, (a.predicted - b.predicted) * (a.measured - b.measured)) for a, b in pairs
    ]
    return sum(signs) / len(pairs)


def report(title: str, rows: Sequence[Row]) -> bool:
    """Print one table; whether both requirements hold."""
    rows = sorted(rows, key=lambda row: row.measured)
    width = max(len(row.plan) for row in rows)
    print(f"\n{title}")
    print(
        f"{'plan':{width}}  {'mesh':>12}  {'predicted':>10}  {'measured':>10}  {'spread':>6}  "
        f"{'ratio':>5}  {'predicted':>10}  {'live':>10}  {'error':>6}"
    )
    for row in rows:
        print(
            f"{row.plan:{width}}  {row.mesh:>12}  {row.predicted * 1e3:7.1f} ms  "
            f"{row.measured * 1e3:7.1f} ms  {row.spread:6.0%}  {row.ratio:5.2f}  "
            f"{row.memory / 2**20:6.1f} MiB  {row.live / 2**20:6.1f} MiB  {row.memory_error:+6.1%}"
        )
    wrong = misordered(rows)
    for a, b in wrong:
        print(f"misordered: {a.plan} ({a.mesh}) and {b.plan} ({b.mesh})")
    off = [row for row in rows if abs(row.memory_error) > TIE]
    holds = "holds" if not wrong else f"FAILS in {len(wrong)} pairs"
    exact = "holds" if not off else f"FAILS for {', '.join(row.plan for row in off)}"
    print(
        f"Spearman {spearman(rows):.3f}, Kendall {kendall(rows):.3f}; ranking up to ties of "
        f"{TIE:.0%}: {holds}; memory within {TIE:.0%}: {exact}",
        flush=True,
    )
    return not wrong and not off


def run_ranks(world: int, arguments: Sequence[str]) -> dict[str, list[Row]]:
    """Start the ranks of one world and collect what rank 0 writes; no process is left behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world),
            "--master-addr", "127.0.0.1", "--master-port", str(port),
            str(WORKER), str(output), *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            sys.exit(f"the ranks failed with exit status {code}")
        found = json.loads(output.read_text())
    return {title: [Row(**row) for row in rows] for title, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models, few repetitions")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, e.g. 2,4")
    parser.add_argument("--models", default="gpt2,mlp")
    parser.add_argument("--repeats", type=int, default=0, help="steps of each plan that count")
    parser.add_argument(
        "--operators", action="store_true", help="compare single operators of every plan, too"
    )
    options = parser.parse_args()
    arguments = ["--models", options.models]
    arguments += ["--quick"] * options.quick + ["--operators"] * options.operators
    if options.repeats:
        arguments += ["--repeats", str(options.repeats)]
    good = True
    for world in map(int, options.ranks.split(",")):
        for title, rows in run_ranks(world, arguments).items():
            good &= report(title, rows)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
