"""The graph that ranks run, as text (``tests/golden/partition``).

Input: a graph in text form, then the decisions about it (what is not said is whole)::

    split %y dp:b0 tp:o                 the strategy of a call
    hold %w f32[32@tp, 16]              the layout a parameter or an input is stored in
    hand %x f32[8@dp, 16] rep(tp)       the layout in which a value goes to all of its uses
    returned f32[8@dp, 32]              the layouts of the outputs, in order

Output: the partitioned graph.
"""

from __future__ import annotations

import pytest

from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import INVARIANT, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.rule import Strategy, strategies
from autopar.ir.rules import rule_for
from autopar.ir.text import print_graph
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.device import device_for
from golden_support import GoldenCase, check, golden_cases


@pytest.mark.parametrize("case", golden_cases("partition"), ids=str)
def test_partition(case: GoldenCase, request: pytest.FixtureRequest) -> None:
    mesh = Mesh.of({axis: int(size) for axis, size in (w.split("=") for w in case.header["mesh"])})
    text = [
        line for line in case.inputs if line.split(" ")[0] in ("return", "update") or line[0] == "%"
    ]
    graph = parse_graph("\n".join(text) + "\n")
    assignment = _assignment(graph, mesh, [line for line in case.inputs if line not in text])
    for node in graph.calls:
        assert assignment.strategies[node.name] in _possible(node, mesh), (
            f"no strategy of {node.op}"
        )
    # The pipeline's pass, so that the verifier has its say.
    device = device_for(case.header["device"][0], mesh)
    partitioned = pipeline.partitioned(graph, assignment, device)
    written = print_graph(partitioned).splitlines()
    assert print_graph(parse_graph("\n".join(written) + "\n")).splitlines() == written
    check(case, written[1:], update=request.config.getoption("--update"))


def _assignment(graph: Graph, mesh: Mesh, decisions: list[str]) -> Assignment:
    chosen = {node.name: Strategy.invariant(mesh) for node in graph.calls}
    sources = {n.name: Layout.whole(len(n.results[0].shape)) for n in graph.nodes if n.is_source}
    relays: dict[str, Layout] = {}
    returned: list[Layout] = []
    for line in decisions:
        word, _, rest = line.partition(" ")
        name, _, what = rest.removeprefix("%").partition(" ")
        if word == "split":
            chosen[name] = _strategy(dict(role.split(":") for role in what.split()), mesh)
        elif word == "hold":
            sources[name] = _layout(what, mesh)
        elif word == "hand":
            relays[name] = _layout(what, mesh)
        else:
            assert word == "returned", line
            returned.append(_layout(rest, mesh))
    values = [v for v in graph.outputs if isinstance(v, Value)]
    whole = [Layout.whole(len(v.shape)) for v in values]
    given = iter(returned or whole)
    outputs = tuple(next(given) if isinstance(v, Value) else None for v in graph.outputs)
    return Assignment(mesh, chosen, sources, relays, outputs)


def _strategy(given: dict[str, str], mesh: Mesh) -> Strategy:
    """In the order of the mesh, but axes that share a factor as they are written."""
    roles = {axis: given.get(axis, INVARIANT) for axis in mesh.names}
    written = [*given, *(axis for axis in mesh.names if axis not in given)]
    sharing = {role: iter([a for a in written if roles[a] == role]) for role in roles.values()}
    return Strategy(tuple((next(sharing[role]), role) for role in roles.values()))


def _possible(node: Node, mesh: Mesh) -> tuple[Strategy, ...]:
    return strategies(rule_for(node), mesh, grad=node.differentiable, axis_orders=True)


def _layout(kind: str, mesh: Mesh) -> Layout:
    """A layout written as the type of a value."""
    axes = " ".join(f"{name}={size}" for name, size in mesh.axes)
    text = f'mesh {axes}\n%v : {kind} = input "v"\nreturn\n'
    layout = parse_graph(text).nodes[0].results[0].layout
    assert layout is not None
    return layout
