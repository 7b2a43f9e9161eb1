"""One rank of `test_gloo_collectives.py`: the reshard steps over real processes.

Called as ``gloo_worker.py RANK WORLD_SIZE PORT CHECK...``; fails by raising.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.ir.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime import collectives as c
from autopar.runtime.flat import Cut, start_all_gather, start_reduce_scatter
from autopar.runtime.groups import Group, RankContext
from autopar.runtime.transport import _EXCHANGED, _SMALL
from four_states import CASES, Case, dual, pieces, whole
from live_bytes import LiveBytes

LIMIT = timedelta(seconds=120)


def gathered(x: Tensor, context: RankContext) -> list[Tensor]:
    """The tensor of every rank, moved by means that are not under test."""
    x = x.detach().contiguous()
    everyone = [torch.empty_like(x) for _ in range(context.mesh.size)]
    dist.all_gather(everyone, x)
    return everyone


def meshes(world: int) -> list[tuple[Mesh, list[tuple[str, ...]]]]:
    flat = (Mesh((("a", world),)), [("a",)])
    if world == 2:
        return [flat, (Mesh((("a", 2), ("one", 1))), [("a", "one")])]
    return [flat, (Mesh((("a", 2), ("b", 2))), [("a",), ("b",), ("a", "b"), ("b", "a")])]


def check_steps(world: int) -> None:
    """Forward and backward of every step, over every group, for strided tensors and each dtype."""
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex128)
    for mesh, groups in meshes(world):
        context = RankContext.from_process_group(mesh, groups=groups, timeout=LIMIT)
        for axes in groups:
            for case in CASES:
                for dtype in dtypes if world == 2 else dtypes[:2]:
                    with context.active():
                        check_step(case, context, axes, dtype)


def check_step(case: Case, context: RankContext, axes: tuple[str, ...], dtype: torch.dtype) -> None:
    mesh, rank = context.mesh, context.rank
    count, index = mesh.axis_size(*axes), mesh.index(context.coordinates, axes)
    exact = dtype in (torch.float64, torch.int64, torch.complex128)
    random = torch.Generator().manual_seed(7)
    value, cotangent = (
        torch.randint(-8, 9, (4, 8, 4), generator=random).to(dtype) for _ in range(2)
    )
    members = mesh.group(rank, axes)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if exact else {"rtol": 0.0, "atol": 0.3}

    def together(x: Tensor, state: int | str) -> Tensor:
        everyone = gathered(x, context)
        return whole([everyone[member] for member in members], state)

    x = strided(pieces(value, case.source, count, seed=1)[index])
    if dtype.is_floating_point or dtype.is_complex:
        x.requires_grad_()
    y = case.step(x, axes)
    torch.testing.assert_close(together(y, case.target), value, **tolerance)
    if dtype.is_floating_point or dtype.is_complex:
        y.backward(strided(pieces(cotangent, dual(case.target), count, seed=2)[index]))
        torch.testing.assert_close(together(x.grad, dual(case.source)), cotangent, **tolerance)


def strided(x: Tensor) -> Tensor:
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous()
    return turned


def check_reductions(world: int) -> None:
    """max, min and booleans, against what a plain computation gives."""
    mesh = Mesh((("a", world),))
    context = RankContext.from_process_group(mesh, timeout=LIMIT)
    group, rank = context.group(("a",)), context.rank
    x = torch.tensor([rank, -rank, 5], dtype=torch.float32)
    assert group.all_reduce(x, "max").tolist() == [world - 1, 0, 5]
    assert group.all_reduce(x, "min").tolist() == [0, 1 - world, 5]
    assert x.tolist() == [rank, -rank, 5], "the argument must stay as it was"
    flags = torch.tensor([rank == 0, True, False])
    assert group.all_reduce(flags).tolist() == [True, True, False]
    assert group.all_reduce(flags, "min").tolist() == [False, True, False]
    every = group.all_gather(flags, 0)
    assert every.tolist() == [v for r in range(world) for v in (r == 0, True, False)]
    assert group.all_reduce(torch.tensor(2)).item() == 2 * world


def check_sizes(world: int) -> None:
    """Small tensors and large ones, which travel in other ways, are combined alike."""
    context = RankContext.from_process_group(Mesh((("a", world),)), timeout=LIMIT)
    group = context.group(("a",))
    for dtype in (*sorted(_EXCHANGED, key=str), torch.complex64):
        for count in (3, _SMALL // world // dtype.itemsize, _SMALL // world // dtype.itemsize + 1):
            every = [torch.arange(count).add(rank).remainder(7).to(dtype) for rank in range(world)]
            x, stacked = every[context.rank], torch.stack(every)
            assert torch.equal(group.all_gather(x, 0), torch.cat(every))
            assert torch.equal(torch.stack(group.unstack(group.start_all_gather(x)())), stacked)
            if dtype == torch.bool:
                assert torch.equal(group.all_reduce(x), stacked.any(0))
                continue
            total = stacked.sum(0).to(dtype)
            assert torch.equal(group.all_reduce(x), total)
            assert torch.equal(group.start_all_reduce(x.clone())(), total)
            if not dtype.is_complex:
                assert torch.equal(group.all_reduce(x, "max"), stacked.amax(0))
                assert torch.equal(group.all_reduce(x, "min"), stacked.amin(0))
    assert group.all_reduce(torch.ones(0)).shape == (0,)
    random = torch.randn(1000, generator=torch.Generator().manual_seed(context.rank))
    first, *others = gathered(group.all_reduce(random), context)
    assert all(torch.equal(first, other) for other in others), "ranks must not differ in a bit"


def check_buckets(world: int) -> None:
    """Many tensors at once, over axes in any order, in even pieces and uneven ones."""
    for mesh, axes_list in meshes(world):
        context = RankContext.from_process_group(mesh, groups=axes_list, timeout=LIMIT)
        for axes in axes_list:
            for wide in (1, 2000):
                check_bucket(context.group(axes), context, wide)


def check_bucket(group: Group, context: RankContext, wide: int) -> None:
    cuts = [Cut(0), Cut(1), Cut(0, tuple(range(1, group.size + 1)))]
    rows = sum(range(1, group.size + 1))
    shapes = [(2 * group.size, 3 * wide), (2 * wide, group.size), (rows, wide)]
    wholes = [torch.arange(float(math.prod(s))).view(s) for s in shapes]
    ends = [[1] * group.size if cut.sizes is None else list(cut.sizes) for cut in cuts]
    blocks = [
        w.split([n * w.shape[cut.dim] // sum(end) for n in end], cut.dim)
        for w, cut, end in zip(wholes, cuts, ends, strict=True)
    ]
    mine = [each[group.index].contiguous() for each in blocks]
    for found, expected in zip(start_all_gather(group, mine, cuts)(), wholes, strict=True):
        assert torch.equal(found, expected)
    with LiveBytes(wholes) as live:
        summed = start_reduce_scatter(group, wholes, cuts)()
    for found, block in zip(summed, mine, strict=True):
        assert torch.equal(found, group.size * block)
    # What is sent, what is received and its sum, whatever the order of the axes.
    sent = sum(x.nbytes for x in [*wholes[:2], wholes[2].new_empty(group.size**2, wide)])
    made = live.peak - sum(x.nbytes for x in wholes)
    assert made <= 2 * sent + sent // group.size, (group.axes, made, sent)


def check_groups(world: int) -> None:
    """What the context makes of meshes that fit the world and of ones that do not."""
    mesh = Mesh((("a", 2), ("b", world // 2)))
    context = RankContext.from_process_group(mesh, timeout=LIMIT)
    assert context.device_mesh is not None
    assert context.device_mesh.mesh_dim_names == ("a", "b")
    assert context.group(("a",)).size == 2
    expect_error("was not prepared", lambda: context.group(("a", "b")))
    context.prepare([("b", "a"), ("b",), ()])
    assert context.group(("b", "a")).size == world
    again = RankContext.from_process_group(mesh, device_mesh=context.device_mesh)
    assert again.device_mesh is context.device_mesh
    wrong = Mesh((("a", world), ("b", 1)))
    expect_error(
        "device mesh of axes",
        lambda: RankContext.from_process_group(wrong, device_mesh=context.device_mesh),
    )
    expect_error(
        f"it has {2 * world} ranks",
        lambda: RankContext.from_process_group(Mesh((("a", 2 * world),))),
    )


def check_part_of_the_world(world: int) -> None:
    """A mesh over some of the processes, in an order of its own; the rest stay out."""
    everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    part = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    mesh = Mesh((("a", 2), ("b", 2)))
    context = RankContext.from_process_group(
        mesh, device_mesh=part, groups=[("a", "b"), ("b", "a")], timeout=LIMIT
    )
    me = torch.tensor([everyone.get_rank()])
    expected = {("a",): ([3, 0], [1, 2]), ("b",): ([3, 1], [0, 2])}
    for axes, groups in expected.items():
        members = context.group(axes).all_gather(me, 0).tolist()
        assert members in groups and me.item() in members, (axes, members)
    assert context.group(("a", "b")).all_gather(me, 0).tolist() == [3, 1, 0, 2]
    assert context.group(("b", "a")).all_gather(me, 0).tolist() == [3, 0, 1, 2]
    with context.active():
        block = c.reduce_scatter(torch.arange(4.0), ("a", "b"), 0)
    assert block.item() == 4.0 * context.rank


def expect_error(words: str, action: Callable[[], object]) -> None:
    try:
        action()
    except MeshError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"expected a MeshError with {words!r}")


def check_missing_rank(world: int) -> None:
    """A rank that never comes is an error after the timeout, not a hang."""
    mesh = Mesh((("a", 2), ("b", 2)))
    context = RankContext.from_process_group(mesh, timeout=timedelta(seconds=2))
    if 0 not in mesh.group(context.rank, ("a",)):
        assert context.group(("a",)).all_reduce(torch.ones(2)).tolist() == [2, 2]
    elif context.rank != 0:
        try:
            context.group(("a",)).all_reduce(torch.ones(2))
        except RuntimeError as error:
            assert "imed out" in str(error), error
        else:
            raise AssertionError("a collective went through without one of its ranks")
    dist.barrier()  # of the world, which has not failed: until here nobody has left


def main() -> None:
    rank, world, port, checks = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=LIMIT,
    )
    try:
        for check in checks:
            globals()[f"check_{check}"](world)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
