"""``python -m autopar.passes.solver FILE [--seconds N]``: solves a contest file."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from . import InfeasibleError, ProblemError, Progress, solve
from .iopddl import load

# Seconds between lines that only report a better bound.
_BOUND_SECONDS = 2.0


def main(arguments: list[str] | None = None) -> int:
    """Prints progress, then the assignment as the last line.

    Returns the exit status: 0, 1 where no assignment was found, 2 where the input is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m autopar.passes.solver",
        description="Solve an assignment problem in the iopddl contest format.",
    )
    parser.add_argument("file", help="the problem, .json or .json.gz")
    parser.add_argument("--seconds", type=float, default=None, help="time limit (default: none)")
    parser.add_argument("--method", choices=("auto", "ilp", "reduce"), default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of local improvement (default: 0)")
    options = parser.parse_args(arguments)
    if options.seconds is not None and not options.seconds >= 0:
        parser.error(f"--seconds: got {options.seconds}, expected a number >= 0")
    show = _Show()
    try:
        problem = load(options.file)
        solution = solve(
            problem,
            seconds=options.seconds,
            method=options.method,
            seed=options.seed,
            progress=show,
        )
    except (ProblemError, InfeasibleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, InfeasibleError) else 2
    for stage in solution.stages:
        print(f"{stage.seconds:9.2f} s  {stage.name}: {stage.detail}")
    limit = "none" if problem.usage_limit is None else f"{problem.usage_limit:.12g}"
    print(
        f"{solution.status}: cost {solution.cost:.12g}, bound {solution.bound:.12g}, "
        f"gap {solution.gap:.4%}, peak {solution.peak:.12g}, limit {limit}"
    )
    print(list(solution.choice))
    return 0


class _Show:
    """Prints better assignments at once, and better bounds from time to time."""

    def __init__(self) -> None:
        self._best = np.inf
        self._printed = -np.inf

    def __call__(self, progress: Progress) -> None:
        if progress.best == self._best and progress.seconds < self._printed + _BOUND_SECONDS:
            return
        self._best, self._printed = progress.best, progress.seconds
        gap = "-"
        if np.isfinite(progress.best) and np.isfinite(progress.bound):
            gap = f"{(progress.best - progress.bound) / max(abs(progress.best), 1e-300):.4%}"
        print(
            f"{progress.seconds:9.2f} s  {progress.stage}: best {progress.best:.12g}, "
            f"bound {progress.bound:.12g}, gap {gap}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
