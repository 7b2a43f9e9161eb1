"""Meshes: ranks, coordinates and groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.ir.errors import MeshError
from autopar.ir.mesh import Mesh

MESH = Mesh((("dp", 2), ("tp", 3), ("pp", 4)))


def test_of_takes_a_count_a_dict_or_a_mesh() -> None:
    assert Mesh.of(4) == Mesh((("dp", 4),))
    assert Mesh.of({"dp": 2, "tp": 4}) == Mesh((("dp", 2), ("tp", 4)))
    assert Mesh.of(MESH) is MESH


def test_sizes() -> None:
    assert MESH.names == ("dp", "tp", "pp")
    assert MESH.sizes == (2, 3, 4)
    assert MESH.size == 24
    assert (MESH.axis_size(), MESH.axis_size("tp"), MESH.axis_size("dp", "pp")) == (1, 3, 8)
    assert Mesh(()).size == 1
    assert str(MESH) == "{dp=2, tp=3, pp=4}"


def test_ranks_are_in_row_major_order() -> None:
    for rank in range(MESH.size):
        there = MESH.coordinates(rank)
        assert tuple(there.values()) == tuple(map(int, np.unravel_index(rank, MESH.sizes)))
        assert MESH.index(there, MESH.names) == rank


def test_index_takes_the_major_axis_first() -> None:
    there = {"dp": 1, "tp": 2, "pp": 3}
    assert MESH.index(there, ("dp", "tp")) == 1 * 3 + 2
    assert MESH.index(there, ("tp", "dp")) == 2 * 2 + 1
    assert MESH.index(there, ()) == 0


@pytest.mark.parametrize("axes", [("tp",), ("dp", "pp"), ("pp", "dp"), ("dp", "tp", "pp"), ()])
def test_a_group_holds_each_position_once_in_order(axes: tuple[str, ...]) -> None:
    for rank in range(MESH.size):
        group = MESH.group(rank, axes)
        here = MESH.coordinates(rank)
        assert [MESH.index(MESH.coordinates(r), axes) for r in group] == list(range(len(group)))
        assert group[MESH.index(here, axes)] == rank
        for member in group:
            there = MESH.coordinates(member)
            assert all(there[a] == here[a] for a in MESH.names if a not in axes)


def test_group_by_hand() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 2})
    assert mesh.group(1, ("tp",)) == (0, 1)
    assert mesh.group(1, ("dp",)) == (1, 3)
    assert mesh.group(0, ("dp", "tp")) == (0, 1, 2, 3)
    assert mesh.group(0, ("tp", "dp")) == (0, 2, 1, 3)


def test_trivial_axes() -> None:
    mesh = Mesh.of({"dp": 1, "tp": 4, "pp": 1})
    assert mesh.without_trivial_axes() == Mesh.of({"tp": 4})
    assert mesh.size == mesh.without_trivial_axes().size


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("dp", "mesh: expected a count, a dict of axis sizes or a Mesh, got str"),
        (True, "mesh: expected a count, a dict of axis sizes or a Mesh, got bool"),
        (0, "mesh axis 'dp': size must be a positive int, got 0"),
        ({"dp": 2.0}, "mesh axis 'dp': size must be a positive int, got 2.0"),
        ({"dp": True}, "mesh axis 'dp': size must be a positive int, got True"),
        ({"d p": 2}, "mesh axis 'd p': the name must be a Python identifier"),
        ({3: 2}, "mesh axis 3: the name must be a Python identifier"),
    ],
)
def test_malformed_meshes(spec: Any, problem: str) -> None:
    with pytest.raises(MeshError) as error:
        Mesh.of(spec)
    assert str(error.value) == problem


def test_other_refusals() -> None:
    with pytest.raises(MeshError, match="axis names must differ"):
        Mesh((("dp", 2), ("dp", 2)))
    with pytest.raises(MeshError, match="unknown mesh axis 'ep': the mesh is"):
        MESH.axis_size("ep")
    for rank in (-1, 24):
        with pytest.raises(MeshError, match=f"rank {rank} is not in the mesh"):
            MESH.coordinates(rank)
