"""The legality of the IR: one broken graph per rule, and the text of the refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.ir.errors import GraphError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.parse import parse_graph
from autopar.ir.steps import STEPS
from autopar.ir.verify import Stage, verify_graph

X = Value("x", (4, 2), torch.float32)


def source(value: Value = X, op: str = "input", target: str = "x") -> Node:
    return Node(op, (), {}, (value,), target)


def refused(graph: Graph, stage: Stage = "traced") -> str:
    with pytest.raises(GraphError) as error:
        verify_graph(graph, stage=stage)
    return str(error.value)


def broken(node: Node) -> str:
    """Why a node after the input %x is refused, without the neighbours."""
    return refused(Graph((source(), node))).splitlines()[0]


def test_a_legal_graph_of_each_stage_passes() -> None:
    traced = parse_graph(
        '%x : f32[4, 2]      = input "x"\n'
        '%w : f32[2, 2] grad = param "w"\n'
        '%m : f32[2]         = buffer "m"\n'
        "%y : f32[4, 2] grad = aten.mm.default(%x, %w)\n"
        "%n : f32[2]         = aten.add.Tensor(%m, 1)\n"
        'return %y, None, 3\nupdate "m" = %n\n'
    )
    verify_graph(traced, stage="traced")
    partitioned = parse_graph(
        "mesh dp=2 tp=2\n"
        '%x  : f32[4@dp, 2]              = input "x"\n'
        '%w  : f32[2, 2] grad            = param "w"\n'
        '%w1 : f32[2, 2] grad rep(dp)    = autopar.to_replicate(%w, ("dp",))\n'
        '%w2 : f32[2@tp, 2] grad rep(dp) = autopar.slice(%w1, ("tp",), 0, "I")\n'
        '%x1 : f32[4@dp, 2@tp]           = autopar.slice(%x, ("tp",), 1, "I")\n'
        "%y  : f32[4@dp, 2] grad sum(tp) = aten.mm.default(%x1, %w2)\n"
        '%y1 : f32[4@dp, 2] grad         = autopar.all_reduce(%y, ("tp",), "I")\n'
        "return %y1\n"
    )
    verify_graph(partitioned, stage="planned")
    verify_graph(partitioned, stage="partitioned")


def test_the_failing_node_is_shown_between_its_neighbours() -> None:
    graph = parse_graph(
        'mesh dp=2\n%a : f32[3] = input "a"\n%x : f32[3] = input "x"\n'
        "%y : f32[3@dp/2] = aten.relu.default(%x)\n%z : f32[3] = aten.relu.default(%x)\n"
        "return %y\n"
    )
    assert refused(graph, "planned") == (
        "value %y: layout [@dp/2]: dimension 0 of size 3 has no units of 2\n"
        '      %x : f32[3]      = input "x"\n'
        "  --> %y : f32[3@dp/2] = aten.relu.default(%x)\n"
        "      %z : f32[3]      = aten.relu.default(%x)"
    )


def test_the_failing_output_is_shown_after_the_last_node() -> None:
    graph = Graph((source(),), (replace(X, name="y"),))
    assert refused(graph) == (
        'return: %y is used before it is defined\n      %x : f32[4, 2] = input "x"\n  --> return %y'
    )


def test_values_are_defined_once_and_before_use() -> None:
    y = replace(X, name="y")
    assert broken(source(target="z")) == "value %x: it is defined twice"
    assert broken(Node("a.b", (), {}, (y, y))) == "value %y: it is defined twice"
    assert broken(Node("a.b", (y,), {}, (y,))) == "a.b: %y is used before it is defined"
    assert broken(Node("a.b", ([{"k": y}],))) == "a.b: %y is used before it is defined"
    assert broken(Node("a.b", (), {"k": y})) == "a.b: %y is used before it is defined"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shape": (4, 3)}, "shape (4, 3), its producer made (4, 2)"),
        ({"dtype": torch.float64}, "dtype f64, its producer made f32"),
        ({"grad": True}, "grad True, its producer made False"),
        ({"layout": Layout.whole(2)}, "layout [-, -], its producer made None"),
    ],
)
def test_an_operand_is_the_value_its_producer_made(change: dict, problem: str) -> None:
    used = replace(X, **change)
    assert broken(Node("a.b", (used,))) == f"a.b: operand %x has {problem}"
    line = refused(Graph((source(),), (used,))).splitlines()[0]
    assert line == f"return: operand %x has {problem}"


def test_sources() -> None:
    y = replace(X, name="y")
    assert broken(source(y, "param", "")) == (
        "param: a source needs a target, the name of what it brings in"
    )
    assert broken(source(y)) == "input 'x': it is in the graph twice"
    assert broken(replace(source(y, target="y"), args=(1,))) == (
        "input 'y': a source has one result and no arguments, got 1 and 1"
    )
    assert broken(replace(source(y, target="y"), results=())) == (
        "input 'y': a source has one result and no arguments, got 0 and 0"
    )
    verify_graph(Graph((source(), source(y, "param", "x"))), stage="traced")


def test_calls() -> None:
    y = replace(X, name="y")
    assert broken(Node("relu")) == "operator 'relu': its full name has a namespace (aten.…)"
    assert broken(Node("a.b", target="t")) == "a.b: a call has no target, got 't'"
    assert broken(Node("a.b", (), {"not": 1, "a b": 1})) == (
        "a.b: keyword 'a b' is not an identifier"
    )
    assert broken(Node("a.b", attrs={"a-b": 1})) == "a.b: attribute 'a-b' is not an identifier"
    assert broken(Node("a.b", ([int],))) == ("a.b: the argument [<class 'int'>] has no text form")
    assert broken(Node("a.b", (), {}, (replace(y, name="y z"),))) == (
        "value %y z: a name has letters, digits, '_' and '.' only"
    )
    assert broken(Node("a.b", (), {}, (replace(y, shape=(-1,)),))) == (
        "value %y: shape (-1,) must be of sizes >= 0"
    )


def test_gradients() -> None:
    y = replace(X, name="y", grad=True)
    assert broken(Node("a.b", (X,), {}, (y,))) == (
        "value %y: it carries a gradient, no operand of it does"
    )
    whole = replace(y, dtype=torch.int64)
    assert broken(source(whole, target="y")) == "value %y: torch.int64 cannot carry a gradient"


def test_updates() -> None:
    m = Value("m", (2,), torch.float32)
    nodes = (source(), source(m, "buffer", "bn.m"))

    def why(*updates: tuple[str, Value]) -> str:
        return refused(Graph(nodes, (), updates)).splitlines()[0]

    assert why(("x", X)) == "update 'x': the graph has no buffer of this name"
    assert why(("bn.m", X)) == "update 'bn.m': %x has shape (4, 2), the buffer has (2,)"
    assert why(("bn.m", m), ("bn.m", m)) == "update 'bn.m': the buffer is updated twice"
    assert why(("bn.m", replace(m, name="n"))) == ("update 'bn.m': %n is used before it is defined")
    assert '--> update "bn.m" = %x' in refused(Graph(nodes, (), (("bn.m", X),)))


def test_outputs_have_a_text_form() -> None:
    line = refused(Graph((source(),), (X, object))).splitlines()[0]
    assert line == "return: the output <class 'object'> has no text form"


def test_stages_ask_for_layouts() -> None:
    bare = Graph((source(),))
    assert refused(bare, "planned").startswith("input: a planned graph has a mesh")
    meshed = parse_graph('mesh dp=2\n%x : f32[4] unlaid = input "x"\nreturn')
    assert refused(meshed, "planned").startswith("value %x: in a planned graph it needs a layout")
    laid = parse_graph('mesh dp=2\n%x : f32[4] = input "x"\nreturn')
    assert refused(laid).startswith("value %x: in a traced graph it has no layout yet")


def test_layouts_fit_their_value_and_mesh() -> None:
    base = parse_graph('mesh dp=2\n%x : f32[4, 2] = input "x"\nreturn')

    def why(layout: Layout) -> str:
        value = replace(base.value("x"), layout=layout)
        return refused(base.with_nodes((source(value),)), "planned").splitlines()[0]

    assert why(Layout((("pp",), ()))) == (
        "value %x: layout [@pp, -] names the mesh axis 'pp', the mesh is {dp=2}"
    )
    assert why(Layout((("dp",), ("dp",)))) == ("value %x: layout [@dp, @dp] uses a mesh axis twice")
    assert why(Layout(((), ()), ("dp",))) == (
        "value %x: layout [-, -] rep(dp) is Replicate along ('dp',), the value carries no "
        "gradient (Invariant is meant)"
    )
    assert why(Layout(((),))) == (
        "value %x: layout [-]: it has 1 dimensions, the tensor (4, 2) has 2"
    )


def step(before: str, call: str, after: str) -> Graph:
    return parse_graph(
        f'mesh a=2 b=2\n%w : f32[8, 8] grad = param "w"\n'
        f"%x : f32[8{before} = aten.clone.default(%w)\n"
        f"%y : f32[8{after} = autopar.{call}\nreturn\n"
    )


STEP_CASES = [
    (", 8] grad sum(a)", '{}(%x, ("a",), "I")', ", 8] grad", "all_reduce"),
    (", 8] grad sum(a, b)", '{}(%x, ("a", "b"), "R")', ", 8] grad rep(a, b)", "all_reduce"),
    ("@a+b, 8] grad", '{}(%x, ("b",), 0, "R")', "@a, 8] grad rep(b)", "all_gather"),
    ("@a+b, 8] grad", '{}(%x, ("a", "b"), 0, "I")', ", 8] grad", "all_gather"),
    ("@b, 8] grad sum(a)", '{}(%x, ("a",), 0)', "@b+a, 8] grad", "reduce_scatter"),
    ("@a+b, 8] grad", '{}(%x, ("b",), 0, 1)', "@a, 8@b] grad", "all_to_all"),
    (", 8] grad", '{}(%x, ("b", "a"), 0, "I")', "@b+a, 8] grad", "slice"),
    (", 8] grad rep(a)", '{}(%x, ("a",), 1, "R")', ", 8@a] grad", "slice"),
    ("@a, 8] grad", '{}(%x, ("a",), 0)', ", 8] grad sum(a)", "pad"),
    (", 8] grad rep(a)", '{}(%x, ("a",), "R")', ", 8] grad sum(a)", "mask"),
    (", 8] grad", '{}(%x, ("a",), "I")', ", 8] grad sum(a)", "mask"),
    (", 8] grad", '{}(%x, ("a",))', ", 8] grad rep(a)", "to_replicate"),
    (", 8] grad rep(a)", '{}(%x, ("a",))', ", 8] grad", "to_invariant"),
    ("@a, 8] grad", '{}(%x, ("a",), 0, 8)', "@a/8, 8] grad", "recut"),
]


@pytest.mark.parametrize(("before", "call", "after", "name"), STEP_CASES)
def test_legal_steps(before: str, call: str, after: str, name: str) -> None:
    graph = step(before, call.format(name), after)
    verify_graph(graph, stage="partitioned")
    # The same step from or to any other state of this table is refused.
    others = {b for b, *_ in STEP_CASES} | {a for _, _, a, _ in STEP_CASES}
    for wrong in others - {after}:
        refused(step(before, call.format(name), wrong), "partitioned")


def test_every_step_is_tried() -> None:
    assert {f"autopar.{name}" for *_, name in STEP_CASES} == set(STEPS)


def test_a_step_may_drop_the_gradient() -> None:
    verify_graph(step("@a, 8] grad", 'all_gather(%x, ("a",), 0, "I")', ", 8]"), stage="partitioned")


@pytest.mark.parametrize(
    ("before", "call", "after", "problem"),
    [
        (
            ", 8] grad",
            'all_reduce(%x, ("a",), "I")',
            ", 8] grad",
            "value %y: autopar.all_reduce: axis 'a' must be in state 'P', it is in 'I' in [-, -]",
        ),
        (
            "@a+b, 8] grad",
            'all_gather(%x, ("a",), 0, "I")',
            "@b, 8] grad",
            "value %y: autopar.all_gather: axes ('a',) must be the minor-most of dimension 0, "
            "which is split by ('a', 'b')",
        ),
        (
            ", 8] grad sum(a)",
            'all_reduce(%x, ("a",), "I")',
            ", 8] grad rep(a)",
            "value %y: autopar.all_reduce gives layout [-, -], got [-, -] rep(a)",
        ),
        (
            ", 8] grad sum(a)",
            'all_reduce(%x, ("a",), "S")',
            ", 8] grad",
            "value %y: autopar.all_reduce: state must be 'I' or 'R', got 'S'",
        ),
        (
            ", 8] grad",
            'slice(%x, ("a",), 2, "I")',
            ", 8] grad",
            "value %y: autopar.slice: no dimension 2 in a layout of 2",
        ),
        (
            ", 8] grad",
            'slice(%x, "a", 0, "I")',
            ", 8] grad",
            "value %y: autopar.slice: axes must be a tuple of different mesh axes, got 'a'",
        ),
        (
            ", 8] grad",
            'slice(%x, ("a",), 0)',
            ", 8] grad",
            "value %y: autopar.slice: its arguments cannot be (0,)",
        ),
        (
            ", 8] grad",
            'slice(%x, axes=("a",))',
            ", 8] grad",
            "autopar.slice: it takes a value, the axes and the rest by position",
        ),
    ],
)
def test_illegal_steps(before: str, call: str, after: str, problem: str) -> None:
    graph = step(before, call, after)
    assert refused(graph, "partitioned").splitlines()[0] == problem
    verify_graph(graph, stage="planned")


def test_a_step_keeps_shape_and_dtype() -> None:
    graph = step(", 8] grad", 'slice(%x, ("a",), 0, "I")', "@a, 8] grad")
    for change, problem in (
        ({"shape": (8, 4)}, "gives shape (8, 8), got (8, 4)"),
        ({"dtype": torch.float64}, "gives dtype f32, got f64"),
    ):
        last = graph.nodes[-1]
        changed = replace(last, results=(replace(last.results[0], **change),))
        why = refused(graph.with_nodes((*graph.nodes[:-1], changed)), "partitioned")
        assert why.startswith(f"value %y: autopar.slice {problem}")


def test_what_enters_and_leaves_is_split_or_invariant() -> None:
    graph = parse_graph('mesh a=2\n%w : f32[2] grad rep(a) = param "w"\nreturn')
    assert refused(graph, "partitioned").startswith(
        "param 'w': layout [-] rep(a) must be split or Invariant along every axis"
    )
    graph = step(", 8] grad", 'to_replicate(%x, ("a",))', ", 8] grad rep(a)")
    graph = replace(graph, outputs=(graph.value("y"),))
    assert refused(graph, "partitioned").startswith("output %y: layout [-, -] rep(a) must be")


def test_an_update_has_the_layout_of_its_buffer() -> None:
    graph = parse_graph(
        'mesh a=2\n%m : f32[2] = buffer "m"\n%n : f32[2@a] = autopar.slice(%m, ("a",), 0, "I")\n'
        'return\nupdate "m" = %n'
    )
    verify_graph(graph, stage="planned")
    assert refused(graph, "partitioned").startswith(
        "update 'm': %n has layout [@a], the buffer has [-]"
    )
