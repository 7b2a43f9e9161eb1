"""Real processes send what the plan says and train as one device: see `communication_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import run_ranks

WORKER = Path(__file__).with_name("communication_worker.py")


@pytest.mark.slow
def test_two_ranks_send_what_is_planned_and_accumulate() -> None:
    run_ranks(WORKER, 2, "known_figures", "uneven_parameters", "accumulation", limit_s=480.0)


@pytest.mark.slow
def test_two_ranks_in_every_way_to_differentiate() -> None:
    """`autograd.grad`, kept graphs, hooks, frozen parameters, terms that are read early."""
    checks = (
        "terms_are_right_to_read",
        "ways_to_differentiate",
        "frozen_parameters",
        "complex_parameters",
    )
    run_ranks(WORKER, 2, *checks, limit_s=480.0)


@pytest.mark.slow
def test_two_ranks_under_every_scheme() -> None:
    run_ranks(WORKER, 2, "schemes", "many_small_parameters", limit_s=480.0)


@pytest.mark.slow
def test_four_ranks_under_every_scheme() -> None:
    """Grids of two axes, hybrid sharding among them."""
    checks = ("schemes", "uneven_parameters", "accumulation")
    run_ranks(WORKER, 4, *checks, limit_s=900.0)
