"""How hints spread over a graph, as text (``tests/golden/propagate``).

Input: a graph in text form, then what spreads over it::

    hint %y ((2, 1), (1, 4))            the strategy of a call (or of a constraint, its layout)
    input %x f32[8@dp, 16]              the layout of an input, data parallel's split batch

Output: per call the factors that are split and by which axes (``any`` where their order is free),
and who decided, per axis where that differs.
"""

from __future__ import annotations

import ast

import pytest

from autopar.ir.graph import Graph, Node
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.passes.choices import Fix, node_choices, rules_of
from autopar.passes.hints import Hint, layout_fix, operator_fix
from autopar.passes.propagate import Spread, propagate
from golden_support import GoldenCase, check, golden_cases


@pytest.mark.parametrize("case", golden_cases("propagate"), ids=str)
def test_propagate(case: GoldenCase, request: pytest.FixtureRequest) -> None:
    mesh = Mesh.of({axis: int(size) for axis, size in (w.split("=") for w in case.header["mesh"])})
    graph = parse_graph("\n".join(line for line in case.inputs if line[0] in "%r") + "\n")
    rules = rules_of(graph)
    fixes: dict[str, Fix] = {}
    inputs: dict[str, Layout] = {}
    for line in case.inputs:
        word, _, rest = line.partition(" ")
        name, _, what = rest.removeprefix("%").partition(" ")
        if word == "hint":
            fixes[name] = _fix(graph.producers[name][0], ast.literal_eval(what), mesh)
        elif word == "input":
            inputs[name] = _layout(what, case.header["mesh"])
    origins = {name: f"hint {name}" for name in fixes}
    spread = propagate(graph, rules, mesh, fixes, origins, inputs)
    # The order of the hints does not matter, only that of the graph.
    assert spread == propagate(graph, rules, mesh, dict(reversed(fixes.items())), origins, inputs)
    for node in graph.calls:
        # What spread must leave the search a strategy.
        assert node_choices(node, rules[node.name], mesh, spread.fixes.get(node.name))
    check(case, _written(graph, spread, mesh), update=request.config.getoption("--update"))


def _fix(node: Node, strategy: tuple, mesh: Mesh) -> Fix:
    rule = rules_of(Graph((node,)))[node.name]
    if node.op == "autopar.constrain":
        shape = node.results[0].shape
        return layout_fix(strategy, rule, shape, f"layout {node.name}", mesh, "tensor")
    return operator_fix(node, rule, Hint(node.name, strategy), mesh)[0]


def _layout(kind: str, axes: list[str]) -> Layout:
    """A layout written as the type of a value."""
    text = f'mesh {" ".join(axes)}\n%v : {kind} = input "v"\nreturn\n'
    layout = parse_graph(text).nodes[0].results[0].layout
    assert layout is not None
    return layout


def _written(graph: Graph, spread: Spread, mesh: Mesh) -> list[str]:
    lines = []
    for node in graph.calls:
        fix = spread.fixes.get(node.name, Fix())
        split = {axis: factor for axis, factor in fix.roles.items() if factor != "whole"}
        split |= {axis: factor for factor, axes in fix.exact.items() for axis in axes}
        parts = []
        for factor in dict.fromkeys(split[axis] for axis in mesh.names if axis in split):
            axes = fix.exact.get(factor) or tuple(a for a in mesh.names if split.get(a) == factor)
            free = " any" if factor in fix.any_order else ""
            parts.append(f"{factor}@{'+'.join(axes)}{free}")
        reasons = spread.reasons.get(node.name, {})
        said = {axis: reasons[axis] for axis in mesh.names if axis in split}
        if len(set(said.values())) > 1:
            why = "; ".join(f"{axis}: {reason}" for axis, reason in said.items())
        else:
            why = next(iter(said.values()), "")
        lines.append(f"%{node.name} {', '.join(parts) or 'open'}{f'  ({why})' if why else ''}")
    return lines
