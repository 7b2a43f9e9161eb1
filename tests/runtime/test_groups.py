"""What groups and contexts refuse, and how groups number their ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from autopar.ir.errors import LayoutError, MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.exchange import Blocks, Overlaps
from autopar.runtime.groups import RankContext, current
from autopar.runtime.lockstep import run_lockstep

MESH = Mesh((("a", 2), ("b", 3), ("one", 1)))


def test_no_context() -> None:
    with pytest.raises(MeshError, match="no rank is active"):
        current()


def test_mesh_of_one_rank_needs_no_processes() -> None:
    context = RankContext.from_process_group(Mesh((("a", 1), ("b", 1))), groups=[("a", "b")])
    assert context.device_mesh is None and context.rank == 0
    x = torch.arange(4.0).view(2, 2).t()
    group = context.group(("b", "a"))
    for y in (
        group.all_reduce(x),
        group.all_gather(x, 1),
        group.reduce_scatter(x, 0),
        group.all_to_all(x, 0, 1),
    ):
        assert torch.equal(x, y)


def test_mesh_without_a_world_says_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(MeshError, match=r"it needs 2 processes .* torchrun"):
        RankContext.from_process_group(Mesh((("a", 2),)))


@pytest.mark.parametrize(
    ("axes", "words"), [(("nope",), "unknown mesh axis 'nope'"), (("a", "a"), "named once")]
)
def test_bad_axes(axes: tuple[str, ...], words: str) -> None:
    with pytest.raises(MeshError, match=words):
        run_lockstep(MESH, lambda rank: current().group(axes))


def test_index_runs_along_the_axes_as_named() -> None:
    def on_rank(rank: int) -> None:
        context = current()
        a, b = context.coordinates["a"], context.coordinates["b"]
        assert context.group(("a", "b")).index == a * 3 + b
        assert context.group(("b", "one", "a")).index == b * 2 + a
        assert context.group(("one",)).size == 1
        order = context.group(("b", "a")).all_gather(torch.tensor([rank]), 0).tolist()
        assert order == [0, 3, 1, 4, 2, 5]
        assert context.group(("b",)) is context.group(("b",))

    run_lockstep(MESH, on_rank)


def test_contexts_nest() -> None:
    outer = RankContext.from_process_group(Mesh((("x", 1),)))
    with outer.active():
        inner = RankContext.from_process_group(Mesh((("y", 1),)))
        with inner.active():
            assert current() is inner
        assert current() is outer


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.reduce_scatter(torch.ones(2, 5), 1),
        lambda g: g.all_to_all(torch.ones(2, 5), 1, 0),
        lambda g: g.block(torch.ones(2, 5), 1),
    ],
    ids=["reduce_scatter", "all_to_all", "slice"],
)
def test_uneven_blocks_are_refused(call) -> None:
    with pytest.raises(LayoutError, match=r"dimension 1 of \(2, 5\) does not divide into 2"):
        run_lockstep(Mesh((("a", 2),)), lambda rank: call(current().group(("a",))))


def test_unknown_reduction() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'avg'"):
        run_lockstep(
            Mesh((("a", 2),)), lambda rank: current().group(("a",)).all_reduce(torch.ones(1), "avg")
        )


def test_results_carry_no_gradient_and_arguments_stay() -> None:
    def on_rank(rank: int) -> None:
        group = current().group(("a",))
        x = torch.full((2, 2), float(rank + 1), requires_grad=True)
        for y in (
            group.all_reduce(x),
            group.all_gather(x, -1),
            group.reduce_scatter(x, -1),
            group.all_to_all(x, 0, 1),
        ):
            assert not y.requires_grad and y.is_contiguous()
        assert torch.equal(x, torch.full((2, 2), float(rank + 1)))

    run_lockstep(Mesh((("a", 2),)), on_rank)


def test_reductions() -> None:
    def on_rank(rank: int) -> None:
        group = current().group(("a",))
        x = torch.tensor([rank, -rank])
        assert group.all_reduce(x).tolist() == [3, -3]
        assert group.all_reduce(x, "max").tolist() == [2, 0]
        assert group.all_reduce(x, "min").tolist() == [0, -2]
        flags = torch.tensor([rank == 0, True, False])
        assert group.all_reduce(flags).tolist() == [True, True, False]
        assert group.all_reduce(flags, "min").tolist() == [False, True, False]
        assert group.all_reduce(torch.tensor(2.5)).item() == 7.5

    run_lockstep(Mesh((("a", 3),)), on_rank)


def test_what_ranks_send_is_what_the_others_receive() -> None:
    """An exchange for one rank at a time agrees with the table of all."""

    def columns(table: list[list[int]]) -> list[list[int]]:
        return [list(column) for column in zip(*table, strict=True)]

    def owners(sizes: tuple[int, ...]) -> list[int]:
        return [rank for rank, size in enumerate(sizes) for _ in range(size)]

    rng = random.Random(0)
    for _ in range(50):
        ranks = rng.randint(2, 6)
        before, after = (tuple(rng.choices(range(5), k=ranks)) for _ in range(2))
        blocks = Blocks(before, after, 3)
        table = [[3 * a * b for b in after] for a in before]
        assert [blocks.sent(rank) for rank in range(ranks)] == table
        assert [blocks.received(rank) for rank in range(ranks)] == columns(table)

        # Who holds each index before, and who after: ranks in the order of their blocks.
        total = min(sum(before), sum(after))
        pairs = Counter(zip(owners(before)[:total], owners(after)[:total], strict=True))
        table = [[2 * pairs[i, j] for j in range(ranks)] for i in range(ranks)]
        overlaps = Overlaps(before, after, 2)
        assert [overlaps.sent(rank) for rank in range(ranks)] == table
        assert [overlaps.received(rank) for rank in range(ranks)] == columns(table)
