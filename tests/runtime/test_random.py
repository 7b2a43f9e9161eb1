"""Random numbers: different on blocks, the same on copies, reproducible."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.assisted_attention import scaled_dot_product_attention
from autopar.runtime.assisted_dropout import dropout, feature_dropout
from autopar.runtime.assisted_random import randn, randperm
from autopar.runtime.groups import current
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.random import Side, agree_on_seed, block_of, replayed, snapshot

MESH = Mesh.of({"a": 2, "b": 2})
CPU = torch.device("cpu")


def on_ranks(fn: Callable[[], Tensor]) -> list[Tensor]:
    """What each rank draws, ranks as (a, b) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    return run_lockstep(MESH, lambda _: fn())


def test_blocks_get_different_masks_and_copies_the_same() -> None:
    ones, split = torch.ones(8, 32), (("b0", ("a",), 64),)
    masks = on_ranks(lambda: dropout(ones, 0.5, True, split=split))
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])


def test_blocks_along_two_axes_all_differ() -> None:
    ones, split = torch.ones(8, 32), (("b1", ("b",), 16), ("b0", ("a",), 64))
    masks = on_ranks(lambda: dropout(ones, 0.5, True, split=split))
    for i in range(4):
        for j in range(i):
            assert not torch.equal(masks[i], masks[j])


def test_an_unsplit_tensor_gets_one_mask_on_all_ranks() -> None:
    masks = on_ranks(lambda: dropout(torch.ones(8, 32), 0.5, True, split=()))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_features_split_over_space_share_their_mask() -> None:
    ones = torch.ones(4, 64, 3)
    masks = on_ranks(lambda: feature_dropout(ones, 0.5, True, split=(("b0", ("a",), 6),)))
    assert torch.equal(masks[0], masks[2])
    channels = masks[0].amax(-1)
    assert torch.equal(channels, masks[0].amin(-1)) and 0 < channels.mean() < 2


def test_a_fraction_p_is_dropped_and_the_rest_scaled() -> None:
    (mask, *_) = on_ranks(lambda: dropout(torch.ones(1000, 100), 0.3, True, split=()))
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert abs((mask == 0).float().mean().item() - 0.3) < 0.01


def test_draws_in_a_row_differ() -> None:
    def twice() -> Tensor:
        x = torch.ones(64)
        return torch.stack([dropout(x, 0.5, True, split=()) for _ in range(2)])

    first, second = on_ranks(twice)[0]
    assert not torch.equal(first, second)


def test_ranks_that_were_seeded_apart_agree_on_a_seed() -> None:
    def draw() -> Tensor:
        # Every rank takes another number, as ranks that were seeded differently would.
        agree_on_seed(current(), CPU)
        return randperm(50, split=())

    drawn = on_ranks(draw)
    assert all(torch.equal(d, drawn[0]) for d in drawn)


def test_manual_seed_makes_steps_reproducible() -> None:
    def step() -> Tensor:
        agree_on_seed(current(), CPU)
        return randn([6, 8], split=(("b0", ("a", "b"), 32),))

    torch.manual_seed(7)
    first, second = on_ranks(step), on_ranks(step)
    torch.manual_seed(7)
    again = on_ranks(step)
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_region_is_replayed_from_its_snapshot() -> None:
    for exact in (False, True):

        def run(exact: bool = exact) -> Tensor:
            context = current()
            if exact:
                context.use_exact_rng(3)
            start = snapshot(context)
            first = randn([8], split=())
            after = snapshot(context)
            second = randn([8], split=())
            with replayed(context, start):
                replay = randn([8], split=())
            with replayed(context, after):
                replay_second = randn([8], split=())
            third = randn([8], split=())
            assert torch.equal(first, replay) and torch.equal(second, replay_second)
            assert not torch.equal(third, first) and not torch.equal(third, second)
            return first

        on_ranks(run)


def test_exact_numbers_are_those_of_one_device() -> None:
    def draw() -> Tensor:
        current().use_exact_rng(11)
        return randn([4, 8], split=(("b1", ("b",), 8), ("b0", ("a",), 16)))

    torch.manual_seed(11)
    whole = torch.randn(8, 16)
    for rank, block in enumerate(on_ranks(draw)):
        a, b = divmod(rank, 2)
        assert torch.equal(block, whole[4 * b : 4 * b + 4, 8 * a : 8 * a + 8])


def test_attention_drops_differently_on_blocks_of_heads() -> None:
    q = torch.zeros(2, 4, 16, 8)
    v = torch.eye(16).expand(2, 4, 16, 16)
    kept = on_ranks(
        lambda: scaled_dot_product_attention(q, q, v, None, 0.5, split=(("h", ("a",), 8),))
    )
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])


def test_a_block_knows_its_place() -> None:
    def place() -> Tensor:
        block = block_of(current(), [Side(4, ("b",)), Side(6, ("a",))])
        assert block.whole == (4, 6)
        whole = torch.arange(24).view(4, 6)
        assert torch.equal(block.of(block.put(block.of(whole), -1)), block.of(whole))
        assert (block.put(block.of(whole), -1) == -1).sum() == 18
        return torch.tensor([*block.start, block.number])

    assert [p.tolist() for p in on_ranks(place)] == [[0, 0, 0], [2, 0, 2], [0, 3, 1], [2, 3, 3]]
