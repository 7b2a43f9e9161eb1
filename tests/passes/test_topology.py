"""Which meshes fit some hosts, and which link each of their axes gets."""

from __future__ import annotations

import itertools
import math

import pytest

from autopar.ir.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.passes.device import COLLECTIVES, INTER, INTRA, Link, Measure
from autopar.passes.device_presets import preset
from autopar.passes.topology import Topology, candidate_meshes, factorisations


def test_eight_devices_have_every_ordered_factorisation() -> None:
    meshes = candidate_meshes(Topology(1, 8))
    assert [mesh.sizes for mesh in meshes] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert meshes[-1].names == ("x", "y", "z")


@pytest.mark.parametrize("number", [2, 7, 12, 30, 64])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_factorisations_are_those_of_a_blunt_search(number: int, count: int) -> None:
    tuples = itertools.product(range(2, number + 1), repeat=count)
    assert list(factorisations(number, count)) == [f for f in tuples if math.prod(f) == number]


def test_one_device_has_one_mesh() -> None:
    assert candidate_meshes(Topology(1, 1)) == (Mesh((("x", 1),)),)


def test_axes_can_be_named_and_limited() -> None:
    meshes = candidate_meshes(Topology(2, 4), max_axes=2, names=("dp", "tp"))
    assert [dict(mesh.axes) for mesh in meshes] == [
        {"dp": 8},
        {"dp": 2, "tp": 4},
        {"dp": 4, "tp": 2},
    ]
    for wrong in (0, 3):
        with pytest.raises(MeshError, match="max_axes: expected 1 to 2"):
            candidate_meshes(Topology(2, 4), max_axes=wrong, names=("dp", "tp"))


def test_an_axis_that_leaves_the_host_has_the_slow_link() -> None:
    device = Topology(2, 4).place(preset("h100"))
    links = {
        mesh.sizes: tuple(device.link_of(axis, mesh).name for axis in mesh.names)
        for mesh in candidate_meshes(Topology(2, 4))
    }
    assert links == {
        (8,): (INTER,),
        (2, 4): (INTER, INTRA),
        (4, 2): (INTER, INTRA),
        (2, 2, 2): (INTER, INTRA, INTRA),
    }


def test_links_of_the_topology_replace_those_of_the_device() -> None:
    slow = Link("ethernet", tuple((kind, (Measure(2, 1e-3, 1e9),)) for kind in COLLECTIVES))
    device = Topology(2, 4, inter=slow).place(preset("h100"))
    mesh = Mesh.of({"x": 2, "y": 4})
    assert device.link_of("x", mesh).at("all_reduce", 2).bandwidth == 1e9
    assert device.link_of("y", mesh) == preset("h100").link_of("y", mesh)


def test_a_count_fills_hosts_of_the_device() -> None:
    h100 = preset("h100")
    assert Topology.of(4, h100) == Topology(1, 4)
    assert Topology.of(16, h100) == Topology(2, 8)
    assert str(Topology.of(16, h100)) == "2 hosts of 8 devices"
    with pytest.raises(MeshError, match=r"12 devices do not fill hosts of 8 .* give 8 or 16"):
        Topology.of(12, h100)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
def test_counts_that_are_none_are_refused(wrong: object) -> None:
    with pytest.raises(MeshError, match="hosts must be a positive int"):
        Topology(wrong, 8)  # type: ignore[arg-type]
    with pytest.raises(MeshError, match=r"positive int|expected a count"):
        Topology.of(wrong, preset("h100"))  # type: ignore[arg-type]
