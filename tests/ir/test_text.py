"""The text form: exact lines, what the parser refuses, and the round trip of random graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.ir.errors import GraphError
from autopar.ir.graph import SOURCES, Graph, Node, Origin, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.text import DTYPE_NAMES, TORCH_NAMES, format_literal, has_text, print_graph

PARTITIONED = """\
mesh dp=2 tp=4
%ids : i64[8@dp, 128]                   = input "input_ids"
%w   : f32[50304@tp, 768] grad          = param "wte.weight"
%m   : f32[768]                         = buffer "bn.running_mean"
%e   : f32[8@dp, 128, 768] grad sum(tp) = aten.embedding.default(%w, %ids)
%e1  : f32[8@dp, 128, 768] grad         = autopar.all_reduce(%e, ("tp",), "I")
return %e1, None
update "bn.running_mean" = %m
"""


def graph_of(*nodes: Node, outputs: tuple[Any, ...] = (), mesh: Mesh | None = None) -> Graph:
    return Graph(nodes, outputs, (), mesh)


def test_the_documented_example_is_read_and_printed_again() -> None:
    graph = parse_graph(PARTITIONED)
    assert print_graph(graph) == PARTITIONED
    assert str(graph) == PARTITIONED
    assert graph.mesh == Mesh((("dp", 2), ("tp", 4)))
    e = graph.value("e")
    assert e == Value(
        "e", (8, 128, 768), torch.float32, True, Layout((("dp",), (), ()), (), ("tp",))
    )
    assert graph.nodes[3].args == (graph.value("w"), graph.value("ids"))
    assert graph.nodes[4].args == (e, ("tp",), "I")
    assert graph.outputs == (graph.value("e1"), None)
    assert graph.updates == (("bn.running_mean", graph.value("m")),)


def test_without_a_mesh_values_have_no_layout() -> None:
    graph = parse_graph('%x : bool[] = input "x"\nreturn\n')
    assert graph == Graph((Node("input", (), {}, (Value("x", (), torch.bool),), "x"),))


def test_marks_tell_no_layout_from_invariant() -> None:
    text = 'mesh dp=2\n%x : f32[2] unlaid = input "x"\nreturn\n'
    assert parse_graph(text).value("x").layout is None
    assert print_graph(parse_graph(text)) == text
    text = '%x : f32[2] whole = input "x"\nreturn\n'
    assert parse_graph(text).value("x").layout == Layout.whole(1)
    assert print_graph(parse_graph(text)) == text


def test_several_results_no_result_and_attributes() -> None:
    text = (
        '%x : f32[4] = input "x" {rename="y"}\n'
        "%a : f32[2], %b : f32[2] = aten.split.Tensor(%x, 2, dim=-1) {autocast=bf16, depth=2}\n"
        "aten._assert_async.default(%a)\n"
        "return\n"
    )
    graph = parse_graph(text)
    assert print_graph(graph) == text
    assert [v.name for v in graph.nodes[1].results] == ["a", "b"]
    assert graph.nodes[1].kwargs == {"dim": -1}
    assert graph.nodes[1].attrs == {"autocast": torch.bfloat16, "depth": 2}
    assert graph.nodes[2].results == ()


def test_axes_of_one_dimension_keep_their_order() -> None:
    text = 'mesh dp=2 tp=2\n%x : f32[8@tp+dp] = input "x"\nreturn\n'
    assert parse_graph(text).value("x").layout == Layout((("tp", "dp"),))
    assert print_graph(parse_graph(text)) == text


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (1, "1"),
        (-1, "-1"),
        (True, "True"),
        (0.1, "0.1"),
        (1e-05, "1e-05"),
        (-0.0, "-0.0"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ('a "b"\n#', '"a \\"b\\"\\n#"'),
        ((), "()"),
        ((1,), "(1,)"),
        ([1, [2.5, None]], "[1, [2.5, None]]"),
        ({"a": (1, 2), 3: "b"}, '{"a": (1, 2), 3: "b"}'),
        (slice(1, None, 2), "slice(1, None, 2)"),
        (..., "..."),
        (2 - 1j, "complex(2.0, -1.0)"),
        (torch.float16, "f16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.device("cuda", 1), 'device("cuda:1")'),
        (torch.channels_last, "torch.channels_last"),
        (torch.strided, "torch.strided"),
    ],
)
def test_arguments(item: Any, text: str) -> None:
    assert format_literal(item) == text
    graph = parse_graph(f"a.b({text}, k={text})\nreturn {text}\n")
    for read in (graph.nodes[0].args[0], graph.nodes[0].kwargs["k"], graph.outputs[0]):
        assert read == item and type(read) is type(item)
        assert repr(read) == repr(item)


def test_nan_is_read_as_nan() -> None:
    assert math.isnan(parse_graph("a.b(nan)\nreturn").nodes[0].args[0])


def test_origins_are_comments() -> None:
    at = Origin("h.0.mlp", "Linear", "model.py", 12, "return self.fc(x)")
    x = Value("x", (2,), torch.float32)
    y, z = Value("y", (2,), torch.float32), Value("z", (2,), torch.float32)
    graph = graph_of(
        Node("input", (), {}, (x,), "x"),
        Node("aten.relu.default", (x,), {}, (y,), origin=at),
        Node("aten.relu.default", (y,), {}, (z,), origin=Origin(file="model.py", line=3)),
    )
    text = print_graph(graph, origins=True)
    assert text.splitlines()[1].endswith("aten.relu.default(%x)  # h.0.mlp (model.py:12)")
    assert all(n.origin == Origin() for n in parse_graph(text).nodes)
    read = parse_graph(text, origins=True)
    assert [n.origin for n in read.nodes] == [
        Origin(),
        Origin("h.0.mlp", "", "model.py", 12),
        Origin(file="model.py", line=3),
    ]
    assert print_graph(read, origins=True) == text
    assert print_graph(graph) == print_graph(read)


def test_what_has_no_text_form_is_printed_and_refused() -> None:
    graph = graph_of(Node("a.b", ([object],)))
    assert not has_text([object]) and has_text([1, ("x", slice(None))])
    assert "!<class 'object'>" in print_graph(graph)
    with pytest.raises(GraphError, match='line 1, column 6: cannot read "!<class'):
        parse_graph(print_graph(graph))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: the text ends without a 'return' line"),
        ("return\n\nreturn", "line 3, column 1: only 'update' lines may follow 'return'"),
        ('%x : f32[2] = input "x"\nmesh dp=2', "line 2, column 1: the mesh is named once"),
        ("mesh dp=0", "line 1, column 1: mesh axis 'dp': size must be a positive int, got 0"),
        ("mesh dp", "line 1, column 8: expected '=', got the end of the line"),
        ("%x : f31[2] = a.b()", "line 1, column 6: unknown dtype 'f31'"),
        ("%x : f32[-2] = a.b()", "line 1, column 10: expected a whole number, got '-2'"),
        ("%x : f32[2@a, 2@a] = a.b()", "line 1, column 1: layout [@a, @a]: a mesh axis may be"),
        ("mesh a=2\n%x : f32[2@c] = a.b()", "line 2, column 12: unknown mesh axis 'c'"),
        ("%x : f32[2@a] unlaid = a.b()", "line 1, column 1: %x is marked 'unlaid' and has"),
        ("%x : f32[2] = a.b(%y)", "line 1, column 19: %y is used before it is defined"),
        ("%x : f32[2] = a.b(%x)", "line 1, column 19: %x is used before it is defined"),
        ("%x : f32[], %x : f32[] = a.b()", "line 1, column 13: %x is defined twice"),
        ("%x : f32[2] = relu(1)", "line 1, column 15: 'relu' is no operator"),
        ("%x : f32[2] = input x", "line 1, column 21: expected a string, got 'x'"),
        ("a.b(k=1, 2)", "line 1, column 10: a positional argument follows a keyword"),
        ("a.b(k=1, k=2)", "line 1, column 10: the keyword 'k' is given twice"),
        ("a.b(1 2)", "line 1, column 7: expected ',', got '2'"),
        ("a.b((1))", "line 1, column 6: a tuple of one item is written with a comma"),
        ("a.b(one)", "line 1, column 5: expected a value, got 'one'"),
        ('a.b("\\q")', 'line 1, column 5: string "\\q": Invalid \\escape'),
        ("a.b({[1]: 2})", "line 1, column 5: dict: "),
        ('a.b(device("moon"))', "line 1, column 5: device: "),
        ("a.b() 3", "line 1, column 7: expected the end of the line, got '3'"),
        ("a.b(?)", "line 1, column 5: cannot read '?)'"),
        ("return 1 2", "line 1, column 10: expected ',', got '2'"),
        ('return\nupdate "m" = 3', "line 2, column 14: expected a value, got '3'"),
    ],
)
def test_the_parser_says_where_it_stopped(text: str, problem: str) -> None:
    with pytest.raises(GraphError) as error:
        parse_graph(text)
    assert str(error.value).startswith(problem)


def test_the_parser_points_at_the_column() -> None:
    with pytest.raises(GraphError) as error:
        parse_graph("  a.b(%y)\nreturn")
    assert str(error.value).splitlines()[1:] == ["      a.b(%y)", "          ^"]


# Random graphs ---------------------------------------------------------------------------------

# No name ends in an underscore, which the names of several results do.
NAMES = st.from_regex(r"[a-z]([a-z0-9_.]{0,5}[a-z0-9.])?", fullmatch=True)
KEYS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
DTYPES = st.sampled_from(sorted(DTYPE_NAMES, key=str))
INDEXES = st.none() | st.integers(-9, 9)


@dataclass(frozen=True)
class Pick:
    """Stands for the index-th of the values known so far."""

    index: int


LITERALS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        DTYPES,
        st.sampled_from(sorted(TORCH_NAMES.values(), key=str)),
        st.sampled_from([torch.device("cpu"), torch.device("meta"), torch.device("cuda", 3)]),
        st.builds(slice, INDEXES, INDEXES, INDEXES),
        st.complex_numbers(),
        st.just(...),
        st.builds(Pick, st.integers(0, 9)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=2),
    ),
    max_leaves=4,
)
LISTS = st.lists(LITERALS, max_size=3)
NAMED = st.dictionaries(KEYS, LITERALS, max_size=2)


def picked(tree: Any, known: list[Value]) -> Any:
    """The literals with a known value in place of every `Pick` (None where there is none)."""
    if isinstance(tree, Pick):
        return known[tree.index % len(known)] if known else None
    if isinstance(tree, (list, tuple)):
        return type(tree)(picked(item, known) for item in tree)
    if isinstance(tree, dict):
        return {key: picked(item, known) for key, item in tree.items()}
    return tree


@st.composite
def values(draw: st.DrawFn, name: str, axes: list[str]) -> Value:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    layout = None
    if draw(st.booleans()):
        placed: list[list[str]] = [[] for _ in range(len(shape) + 3)]
        for axis in draw(st.permutations(axes)):
            placed[draw(st.integers(0, len(placed) - 1))].append(axis)
        layout = Layout.make(placed[3:], placed[1], placed[2])
    return Value(name, shape, draw(DTYPES), draw(st.booleans()), layout)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    axes = draw(st.lists(KEYS, max_size=3, unique=True))
    sizes = st.integers(1, 9)
    mesh = Mesh(tuple((a, draw(sizes)) for a in axes)) if draw(st.booleans()) else None
    nodes: list[Node] = []
    known: list[Value] = []
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        attrs = picked(draw(NAMED), known)
        if draw(st.booleans()):
            made = (draw(values(name, axes)),)
            node = Node(draw(st.sampled_from(SOURCES)), (), {}, made, draw(st.text()), attrs=attrs)
        else:
            count = draw(st.integers(0, 3))
            made = tuple(draw(values(f"{name}_{k}_", axes)) for k in range(count))
            args, kwargs = picked((tuple(draw(LISTS)), draw(NAMED)), known)
            op = draw(st.sampled_from(["aten.add.Tensor", "autopar.slice", "a.b"]))
            node = Node(op, args, kwargs, made, attrs=attrs)
        nodes.append(node)
        known.extend(node.results)
    outputs = picked(tuple(draw(LISTS)), known)
    update = st.tuples(st.text(max_size=5), st.sampled_from(known)) if known else st.nothing()
    updates = tuple(draw(st.lists(update, max_size=2))) if known else ()
    return Graph(tuple(nodes), outputs, updates, mesh)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_graphs_round_trip(graph: Graph) -> None:
    text = print_graph(graph)
    read = parse_graph(text)
    # repr tells everything apart and, unlike ==, takes one nan for another and 1 for not True.
    assert repr(read) == repr(graph)
    assert print_graph(read) == text
