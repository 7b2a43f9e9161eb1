"""Layouts: states per axis, local shapes, and what is refused."""

from __future__ import annotations

import pytest

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


def test_what_does_not_divide_is_refused() -> None:
    assert LAYOUT.divides((8, 5), MESH)
    assert not LAYOUT.divides((7, 5), MESH)
    with pytest.raises(
        LayoutError, match=r"layout \[@dp, -\].*: dimension 0 of size 7 does not divide into 2"
    ):
        LAYOUT.local_shape((7, 5), MESH)


def test_other_refusals() -> None:
    with pytest.raises(LayoutError, match=r"it has 2 dimensions, the tensor \(8,\) has 1"):
        LAYOUT.local_shape((8,), MESH)
    with pytest.raises(MeshError, match="unknown mesh axis 'ep'"):
        Layout.make([("ep",)]).counts(MESH)
