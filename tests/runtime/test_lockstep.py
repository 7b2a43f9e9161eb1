"""The lockstep simulation: results in order, disagreement named, nothing hangs."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
from torch import Tensor

from autopar.ir.errors import DesyncError
from autopar.ir.mesh import Mesh
from autopar.runtime import collectives as c
from autopar.runtime.groups import current
from autopar.runtime.lockstep import run_lockstep

PAIR = Mesh((("a", 2),))
SQUARE = Mesh((("a", 2), ("b", 2)))


def sum_over(*axes: str) -> Tensor:
    return current().group(axes).all_reduce(torch.ones(2))


def test_results_are_in_the_order_of_ranks() -> None:
    def on_rank(rank: int) -> tuple[int, dict[str, int]]:
        assert current().rank == rank
        return rank, current().coordinates

    assert run_lockstep(SQUARE, on_rank) == [(r, SQUARE.coordinates(r)) for r in range(4)]


def test_mesh_of_one_rank() -> None:
    assert run_lockstep(Mesh((("a", 1),)), lambda rank: sum_over("a").tolist()) == [[1.0, 1.0]]


def test_caller_settings_reach_the_ranks() -> None:
    threads = torch.get_num_threads()
    with torch.no_grad():
        assert run_lockstep(PAIR, lambda rank: torch.is_grad_enabled()) == [False, False]
    assert run_lockstep(PAIR, lambda rank: torch.is_grad_enabled()) == [True, True]
    assert run_lockstep(PAIR, lambda rank: torch.get_num_threads()) == [1, 1]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_gather(torch.ones(2), 0),
            ["all_reduce[a](float32[2], sum)", "all_gather[a](float32[2], 0)"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_reduce(torch.ones(3)),
            ["all_reduce[a](float32[2], sum)", "all_reduce[a](float32[3], sum)"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_reduce(torch.ones(2, dtype=torch.float64)),
            ["all_reduce[a](float32[2], sum)", "all_reduce[a](float64[2], sum)"],
        ),
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_reduce(torch.ones(2), "max"),
            ["float32[2], sum)", "float32[2], max)"],
        ),
        (
            lambda g: g.all_gather(torch.ones(2, 2), 0),
            lambda g: g.all_gather(torch.ones(2, 2), 1),
            ["all_gather[a](float32[2, 2], 0)", "all_gather[a](float32[2, 2], 1)"],
        ),
    ],
    ids=["kind", "shape", "dtype", "reduction", "dimension"],
)
def test_different_calls_are_named(ours, theirs, words) -> None:
    def on_rank(rank: int) -> Tensor:
        return (theirs if rank else ours)(current().group(("a",)))

    with pytest.raises(DesyncError, match="ranks disagree: rank") as caught:
        run_lockstep(PAIR, on_rank)
    for part in ("rank 0 calls", "rank 1 calls", *words):
        assert part in str(caught.value)


def test_different_axis_orders_are_named() -> None:
    def on_rank(rank: int) -> Tensor:
        return sum_over(*(("a", "b") if rank else ("b", "a")))

    with pytest.raises(DesyncError, match="disagree") as caught:
        run_lockstep(SQUARE, on_rank)
    assert "all_reduce[a, b]" in str(caught.value) and "all_reduce[b, a]" in str(caught.value)


def test_ranks_that_wait_in_different_groups_are_named() -> None:
    """Rank 0 waits for its row, its row for their columns: nobody can go on."""

    def on_rank(rank: int) -> Tensor:
        return sum_over("b" if rank in (0, 3) else "a")

    start = time.monotonic()
    with pytest.raises(DesyncError, match="in vain") as caught:
        run_lockstep(SQUARE, on_rank)
    assert time.monotonic() - start < 10
    assert "rank 0 waits in all_reduce[b](float32[2], sum)" in str(caught.value)
    assert "rank 1 waits in all_reduce[a](float32[2], sum)" in str(caught.value)


def test_rank_that_leaves_early_is_named() -> None:
    with pytest.raises(DesyncError, match=r"rank 0 has finished; rank 1 waits in all_reduce"):
        run_lockstep(PAIR, lambda rank: sum_over("a") if rank else None)


def test_extra_collective_in_backward_is_found() -> None:
    def on_rank(rank: int) -> None:
        x = torch.ones(2, requires_grad=True)
        (c.to_replicate(x, ("a",)) if rank else x * 1).sum().backward()

    with pytest.raises(DesyncError, match=r"rank 0 has finished; rank 1 waits in all_reduce"):
        run_lockstep(PAIR, on_rank)


def test_failing_rank_stops_all_and_its_error_comes_out() -> None:
    before = threading.active_count()

    def on_rank(rank: int) -> None:
        for step in range(3):
            if rank == 3 and step == 2:
                raise ZeroDivisionError("here")
            sum_over("a", "b")

    with pytest.raises(ZeroDivisionError, match="here"):
        run_lockstep(SQUARE, on_rank)
    assert threading.active_count() == before


def test_ranks_cannot_swallow_the_stop() -> None:
    """A model with a broad `except` still stops when another rank fails."""
    went_on = []

    def on_rank(rank: int) -> None:
        if rank == 1:
            raise KeyError("first")
        with contextlib.suppress(Exception):
            sum_over("a")
        went_on.append(rank)

    with pytest.raises(KeyError, match="first"):
        run_lockstep(PAIR, on_rank)
    assert went_on == []


def test_failure_in_backward_stops_all() -> None:
    def on_rank(rank: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = c.to_replicate(x, ("a",))
        if rank:
            y.register_hook(lambda grad: 1 / 0)
        y.sum().backward()

    with pytest.raises(ZeroDivisionError):
        run_lockstep(PAIR, on_rank)


def test_rank_stuck_outside_collectives_is_a_timeout() -> None:
    release = threading.Event()

    def on_rank(rank: int) -> None:
        if rank == 0:
            release.wait(20)
        else:
            sum_over("a")

    threading.Timer(1.5, release.set).start()
    with pytest.raises(DesyncError, match=r"no rank made progress for 0\.5 s") as caught:
        run_lockstep(PAIR, on_rank, timeout=0.5)
    assert "rank 0 is outside any collective; rank 1 waits in all_reduce" in str(caught.value)


def test_progress_renews_the_timeout() -> None:
    def on_rank(rank: int) -> int:
        for _ in range(6):
            time.sleep(0.2)
            sum_over("a")
        return rank

    assert run_lockstep(PAIR, on_rank, timeout=0.8) == [0, 1]


def test_groups_of_one_call_run_apart() -> None:
    """The rows of a mesh need not keep step with each other."""

    def on_rank(rank: int) -> list[float]:
        rounds = 3 if current().coordinates["a"] else 1
        return [sum_over("b")[0].item() for _ in range(rounds)]

    assert run_lockstep(SQUARE, on_rank) == [[2.0], [2.0], [2.0] * 3, [2.0] * 3]
