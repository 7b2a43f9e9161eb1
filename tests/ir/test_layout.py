"""Layouts: states per axis, local shapes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from autopar.ir.errors import LayoutError, MeshError
from autopar.ir.layout import INVARIANT, PARTIAL, REPLICATE, Layout
from autopar.ir.mesh import Mesh

MESH = Mesh.of({"dp": 2, "tp": 4, "pp": 3})
LAYOUT = Layout.make([("dp",), ()], ["tp"], ["pp"])


def test_one_state_per_axis() -> None:
    assert LAYOUT.state("dp") == 0
    assert LAYOUT.state("tp") == REPLICATE
    assert LAYOUT.state("pp") == PARTIAL
    assert LAYOUT.state("ep") == INVARIANT
    assert LAYOUT.mentioned == ("dp", "tp", "pp")
    assert LAYOUT.split_axes == ("dp",)
    assert str(LAYOUT) == "[@dp, -] rep(tp) sum(pp)"


def test_make_sorts_what_has_no_order_and_keeps_what_has() -> None:
    layout = Layout.make([("tp", "dp"), ()], ["z", "a"], ["y", "b"])
    assert layout == Layout((("tp", "dp"), ()), ("a", "z"), ("b", "y"))
    assert str(layout) == "[@tp+dp, -] rep(a,z) sum(b,y)"


@pytest.mark.parametrize(
    ("dims", "replicate", "partial"),
    [
        ([("dp",), ("dp",)], [], []),
        ([("dp", "dp")], [], []),
        ([("dp",)], ["dp"], []),
        ([()], ["dp"], ["dp"]),
        ([()], [], ["dp", "dp"]),
    ],
)
def test_an_axis_is_used_once(dims: list, replicate: list, partial: list) -> None:
    with pytest.raises(LayoutError, match="a mesh axis may be used once"):
        Layout.make(dims, replicate, partial)


def test_with_state_reaches_every_state_from_every_state() -> None:
    states = (0, 1, INVARIANT, REPLICATE, PARTIAL)
    for first in states:
        for second in states:
            layout = Layout.whole(2).with_state("dp", first).with_state("dp", second)
            assert layout == Layout.whole(2).with_state("dp", second)
            assert layout.state("dp") == second


def test_a_new_split_is_the_minor_most() -> None:
    layout = Layout.make([("dp",), ()]).with_state("tp", 0)
    assert layout.dims == (("dp", "tp"), ())
    assert layout.with_state("dp", 0).dims == (("tp", "dp"), ())


def test_without_gradient_replicate_is_invariant() -> None:
    assert LAYOUT.without_gradient() == Layout.make([("dp",), ()], [], ["pp"])
    assert Layout.whole(2).without_gradient() == Layout.whole(2)


def test_local_shapes() -> None:
    assert LAYOUT.counts(MESH) == (2, 1)
    assert LAYOUT.local_shape((8, 6), MESH) == (4, 6)
    nested = Layout.make([("dp", "tp"), ("pp",)])
    assert nested.counts(MESH) == (8, 3)
    assert nested.local_shape((16, 6), MESH) == (2, 2)
    assert nested.local_shape((0, 3), MESH) == (0, 1)
    assert Layout.whole(0).local_shape((), MESH) == ()


def test_what_does_not_divide_is_uneven() -> None:
    assert LAYOUT.divides((8, 5), MESH)
    assert not LAYOUT.divides((7, 5), MESH)
    assert LAYOUT.local_shape((7, 5), MESH) == (4, 5)
    assert LAYOUT.local_shape((7, 5), MESH, MESH.coordinates(0)) == (4, 5)
    assert LAYOUT.local_shape((7, 5), MESH, MESH.coordinates(MESH.size - 1)) == (3, 5)
    assert LAYOUT.pieces((7, 5), MESH) == 7 / 4


@pytest.mark.parametrize("shape", [(7,), (25,), (5,), (0,), (24,)])
@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"), ("pp", "dp")])
def test_pieces_are_those_of_a_dtensor(shape: tuple[int], axes: tuple[str, ...]) -> None:
    layout = Layout.make([axes])
    parts = [torch.arange(shape[0])]
    for axis in axes:
        parts = [p for part in parts for p in _chunk(part, MESH.axis_size(axis))]
    for rank in range(MESH.size):
        here = MESH.coordinates(rank)
        want = parts[MESH.index(here, axes)]
        start, stop = layout.span(0, shape[0], MESH, here)
        assert torch.equal(torch.arange(shape[0])[start:stop], want)
        assert layout.local_shape(shape, MESH, here) == tuple(want.shape)
        assert stop - start <= layout.local_shape(shape, MESH)[0]


def _chunk(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    found, _ = Shard(0)._split_tensor(x, count, with_padding=False)
    return found


def test_units_stay_together() -> None:
    heads = Layout.make([("dp",), ()], units=[64, 1])
    assert str(heads) == "[@dp/64, -]"
    assert heads.local_shape((1600, 8), MESH) == (13 * 64, 8)
    assert heads.local_shape((1600, 8), MESH, {"dp": 1}) == (12 * 64, 8)
    assert heads != Layout.make([("dp",), ()]) and hash(heads) != hash(Layout.make([("dp",), ()]))
    with pytest.raises(LayoutError, match="dimension 0 of size 1601 has no units of 64"):
        heads.check((1601, 8))


def test_equal_cuts_are_written_alike() -> None:
    even = Layout.make([("dp",), ()])
    assert Layout.make([("dp",), ()], units=[64, 1]).simplified((1536, 8), MESH) == even
    assert Layout.make([("dp",), ()], units=[64, 1]).simplified((1600, 8), MESH) != even
    assert Layout.make([(), ()], units=[64, 1]) == Layout.whole(2)
    # 18 elements over four ranks: pieces of 6, 6, 6 and none in units of 2 and in units of 3.
    two, three = (Layout.make([("tp",)], units=[u]).simplified((18,), MESH) for u in (2, 3))
    assert two == three == Layout.make([("tp",)], units=[2])


def test_other_refusals() -> None:
    with pytest.raises(LayoutError, match=r"it has 2 dimensions, the tensor \(8,\) has 1"):
        LAYOUT.local_shape((8,), MESH)
    with pytest.raises(MeshError, match="unknown mesh axis 'ep'"):
        Layout.make([("ep",)]).counts(MESH)
