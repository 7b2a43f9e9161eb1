"""What one rank calls where pieces are uneven."""

from __future__ import annotations

from autopar.ir.local import is_empty, is_uniform, rank_call
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.text import format_call, print_graph

TEXT = """\
mesh a=2 b=2
%x : f32[7@a+b, 12]     = input "x"
%y : f32[7@a+b, 3, 4]   = aten.view.default(%x, [2, 3, 4]) {local=((1, 0),)}
%z : f32[7@a, 3, 4]     = autopar.all_gather(%y, ("b",), 0, "I")
%u : f32[7, 3, 4]       = autopar.all_gather(%z, ("a",), 0, "I")
%v : f32[7, 12]         = aten.view.default(%u, [7, 12])
%w : f32[7, 12@a/4]     = autopar.slice(%v, ("a",), 1, "I", 4)
%s : f32[7, 12@a]       = autopar.recut(%w, ("a",), 1)
%t : f32[7@a, 12]       = autopar.all_to_all(%w, ("a",), 1, 0)
return %t
"""


def calls(rank: int) -> dict[str, str]:
    graph = parse_graph(TEXT)
    assert graph.mesh is not None
    here = graph.mesh.coordinates(rank)
    return {n.name: format_call(rank_call(n, graph.mesh, here)) for n in graph.calls}


def test_sizes_are_those_of_the_rank() -> None:
    assert [calls(rank)["y"] for rank in (0, 3)] == [
        "aten.view.default(%x, [2, 3, 4])",
        "aten.view.default(%x, [1, 3, 4])",
    ]
    assert calls(3)["v"] == "aten.view.default(%u, [7, 12])"


def test_a_step_is_told_the_pieces_of_its_group() -> None:
    # The ranks of the first group hold two rows each, those of the second two and one.
    assert calls(1)["z"] == 'autopar.all_gather(%y, ("b",), 0, "I")'
    assert calls(2)["z"] == 'autopar.all_gather(%y, ("b",), 0, "I", sizes=(2, 1))'
    assert calls(0)["u"] == 'autopar.all_gather(%z, ("a",), 0, "I", sizes=(4, 3))'


def test_units_become_sizes() -> None:
    assert calls(0)["w"] == 'autopar.slice(%v, ("a",), 1, "I", sizes=(8, 4))'
    assert calls(0)["s"] == 'autopar.recut(%w, ("a",), 1, before=(8, 4), after=(6, 6))'
    assert calls(0)["t"] == (
        'autopar.all_to_all(%w, ("a",), 1, 0, src_sizes=(8, 4), dst_sizes=(4, 3))'
    )


def test_units_round_trip_as_text() -> None:
    assert print_graph(parse_graph(print_graph(parse_graph(TEXT)))) == print_graph(
        parse_graph(TEXT)
    )
    assert "12@a/4" in print_graph(parse_graph(TEXT))


def test_only_uneven_graphs_depend_on_the_rank() -> None:
    assert not is_uniform(parse_graph(TEXT))
    even = TEXT.replace("7", "8").replace("12@a/4", "12@a")
    assert is_uniform(parse_graph(even))


def test_a_call_of_nothing_is_empty() -> None:
    graph = parse_graph(
        'mesh a=4\n%x : f32[5@a, 2] = input "x"\n%y : f32[5@a, 2] = aten.relu.default(%x)\n'
        "%z : f32[2] sum(a) = aten.sum.dim_IntList(%x, [0])\nreturn %y\n"
    )
    mesh: Mesh = Mesh.of({"a": 4})
    relu, total = graph.calls
    found = [is_empty(relu, mesh, mesh.coordinates(rank)) for rank in range(4)]
    assert found == [False, False, False, True]
    # A sum of nothing is a term of the sum all the same.
    assert not is_empty(total, mesh, mesh.coordinates(3))
