"""Measures the assignment solver on the public contest instances.

    python benchmarks/solver.py FOLDER [--only GB] [--scale 0.5]

FOLDER holds ``A.json.gz`` ... ``V.json.gz`` of the ASPLOS / EuroSys 2025 contest on
intra-operator parallelism (google/iopddl).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from autopar.passes.solver import InfeasibleError, evaluate, solve
from autopar.passes.solver.iopddl import load

# Per instance: the contest's time limit in seconds, the best cost of its 20 teams, and a lower
# bound published later from long off-line runs.
KNOWN = {
    "A": (60, 6_548_641_531, 6.51e9),
    "B": (60, 532_843, 5.33e5),
    "G": (120, 217_039, 2.17e5),
    "M": (180, 49_928_460_991, 4.94e10),
    "S": (240, 1_534_613_444, 1.51e9),
    "V": (300, 1_632_051, 1.62e6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the .json.gz files are")
    parser.add_argument("--only", default="".join(KNOWN), help="instances to run, e.g. GB")
    parser.add_argument("--scale", type=float, default=1.0, help="times the contest's limits")
    options = parser.parse_args()
    print(
        f"{'':2} {'cost':>15} {'/ best':>8} {'bound':>15} {'/ known':>8} {'gap':>8} "
        f"{'load s':>7} {'solve s':>8}  status"
    )
    for name in options.only:
        limit, best, known_bound = KNOWN[name]
        began = time.monotonic()
        problem = load(options.folder / f"{name}.json.gz")
        loaded = time.monotonic()
        try:
            # Reading the file counts, as in the contest.
            allowed = limit * options.scale - (loaded - began)
            solution = solve(problem, seconds=max(allowed, 0.0))
        except InfeasibleError as error:
            print(f"{name:2} {error} ({time.monotonic() - loaded:.1f} s)", flush=True)
            continue
        seconds = time.monotonic() - loaded
        cost, peak = evaluate(problem, solution.choice)
        over = problem.usage_limit is not None and peak > problem.usage_limit
        status = "OVER THE LIMIT" if over else solution.status
        print(
            f"{name:2} {cost:15.0f} {cost / best:8.4f} {solution.bound:15.0f} "
            f"{solution.bound / known_bound:8.4f} {solution.gap:8.3%} "
            f"{loaded - began:7.1f} {seconds:8.1f}  {status}"
            f"{'' if loaded - began + seconds <= limit * options.scale else ', TOO LATE'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
