"""From a graph to the assignment problem that the solver is given.

One problem node per source, call, shared value and output; its choices are strategies or layouts.
One edge per producer-consumer pair, priced by the reshard between their layouts.

A value with several uses gets a *relay*: a node whose choice is the layout in which the value is
handed to all of its uses. It is resharded to that layout once, so one all-gather serves q, k and
v alike, and their gradients are reduced once (the neutral node of PyTorch's autoparallel).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.passes.assignment import Assignment
from autopar.passes.choices import Fix, node_choices
from autopar.passes.solver import Edge, Problem
from autopar.passes.solver import Node as ProblemNode
from autopar.passes.source_layouts import source_layouts


class Prices(Protocol):
    """What the problem asks of the cost model; every time is in seconds, forward and backward."""

    def strategies(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray: ...

    def parameter(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray: ...

    def reshard(
        self, src: Sequence[Layout], dst: Sequence[Layout], value: Value, grad: bool
    ) -> np.ndarray: ...


@dataclass
class Built:
    """The problem, and what each of its choices means."""

    problem: Problem
    strategies: dict[str, tuple[int, tuple[Strategy, ...]]] = field(default_factory=dict)
    sources: dict[str, tuple[int, tuple[Layout, ...]]] = field(default_factory=dict)
    relays: dict[str, tuple[int, tuple[Layout, ...]]] = field(default_factory=dict)
    outputs: list[tuple[int, tuple[Layout, ...]] | None] = field(default_factory=list)

    def assignment(self, mesh: Mesh, choice: Sequence[int]) -> Assignment:
        """The decisions that a solution of the problem stands for."""
        return Assignment(
            mesh,
            {name: options[choice[i]] for name, (i, options) in self.strategies.items()},
            {name: options[choice[i]] for name, (i, options) in self.sources.items()},
            {name: options[choice[i]] for name, (i, options) in self.relays.items()},
            tuple(None if o is None else o[1][choice[o[0]]] for o in self.outputs),
        )

    def choice(self, assignment: Assignment) -> tuple[int, ...]:
        """The solution that an assignment stands for (the inverse of `assignment`)."""
        chosen = [0] * len(self.problem.nodes)
        tables: tuple[tuple[dict, dict], ...] = (
            (self.strategies, assignment.strategies),
            (self.sources, assignment.sources),
            (self.relays, assignment.relays),
        )
        for options, decided in tables:
            for name, (i, choices) in options.items():
                chosen[i] = choices.index(decided[name])
        for option, layout in zip(self.outputs, assignment.outputs, strict=True):
            if option is not None:
                chosen[option[0]] = option[1].index(layout)  # type: ignore[arg-type]
        return tuple(chosen)


def build_problem(
    graph: Graph,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    prices: Prices,
    *,
    fixes: Mapping[str, Fix] | None = None,
    pinned: Mapping[str, Layout] | None = None,
    fixed_sources: Mapping[str, Layout] | None = None,
    output_layouts: Sequence[Sequence[Layout] | None] = (),
) -> Built:
    """The assignment problem of a graph on a mesh without trivial axes.

    fixes:
        call node name -> what hints decided about it
    pinned, fixed_sources:
        layouts given for parameters (by dotted name) and for any source (by node name)
    output_layouts:
        for each output the layouts it may be returned in, None for outputs that are no tensors
    """
    return _Builder(graph, rules, mesh, prices).build(
        fixes or {}, pinned or {}, fixed_sources or {}, output_layouts
    )


class _Builder:
    def __init__(self, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, prices: Prices) -> None:
        self.graph, self.rules, self.mesh, self.prices = graph, rules, mesh, prices
        self.nodes: list[ProblemNode] = []
        self.edges: list[Edge] = []
        # Value name -> (problem node, layout of the value under each choice of that node).
        self.made_by: dict[str, tuple[int, tuple[Layout, ...]]] = {}
        # What an edge between such layouts of such a value looks like.
        self.priced: dict[Any, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def build(
        self,
        fixes: Mapping[str, Fix],
        pinned: Mapping[str, Layout],
        fixed_sources: Mapping[str, Layout],
        output_layouts: Sequence[Sequence[Layout] | None],
    ) -> Built:
        built = Built(Problem((), ()))
        wanted: dict[str, list[tuple[int, tuple[Layout, ...], bool]]] = {}
        for node in self.graph.nodes:
            if node.is_source:
                if node.name in fixed_sources:
                    options: tuple[Layout, ...] = (fixed_sources[node.name],)
                else:
                    options = source_layouts(node, self.mesh, pinned)
                index = self._add(f"{node.op} {node.target}", self._source_costs(node, options))
                built.sources[node.name] = (index, options)
                self.made_by[node.name] = (index, options)
                continue
            rule = self.rules[node.name]
            choices = node_choices(node, rule, self.mesh, fixes.get(node.name))
            index = self._add(node.name, self.prices.strategies(node, rule, choices.strategies))
            built.strategies[node.name] = (index, choices.strategies)
            for i, operand in enumerate(node.operands):
                wanted.setdefault(operand.name, []).append(
                    (index, choices.operands[i], node.operand_grad(i))
                )
            for value, layouts in zip(node.results, choices.results, strict=True):
                self.made_by[value.name] = (index, layouts)
        for output, layouts in zip(self.graph.outputs, output_layouts, strict=True):
            if not isinstance(output, Value):
                built.outputs.append(None)
                continue
            assert layouts is not None
            index = self._add(f"output {output.name}", np.zeros(len(layouts)))
            built.outputs.append((index, tuple(layouts)))
            wanted.setdefault(output.name, []).append((index, tuple(layouts), output.grad))
        for name, value in self.graph.updates:
            index = self._add(f"update {name}", np.zeros(1))
            whole = (Layout.whole(len(value.shape)),)
            wanted.setdefault(value.name, []).append((index, whole, False))
        for value_name, uses in wanted.items():
            self._connect(self.graph.value(value_name), uses, built)
        built.problem = Problem(tuple(self.nodes), tuple(self.edges))
        return built

    def _source_costs(self, node: Node, options: Sequence[Layout]) -> np.ndarray:
        if node.op == "param":
            return self.prices.parameter(node.results[0], options)
        return np.zeros(len(options))

    def _add(self, name: str, costs: np.ndarray) -> int:
        self.nodes.append(ProblemNode(name, np.asarray(costs, dtype=np.float64)))
        return len(self.nodes) - 1

    def _connect(
        self, value: Value, uses: list[tuple[int, tuple[Layout, ...], bool]], built: Built
    ) -> None:
        source, layouts = self.made_by[value.name]
        if len(uses) > 1:
            wanted = (layout for _, wants, _ in uses for layout in wants)
            options = tuple(dict.fromkeys(itertools.chain(layouts, wanted)))
            relay = self._add(f"relay {value.name}", np.zeros(len(options)))
            built.relays[value.name] = (relay, options)
            self._edge(source, layouts, relay, options, value, any(g for *_, g in uses))
            source, layouts = relay, options
        for index, wants, grad in uses:
            self._edge(source, layouts, index, wants, value, grad)

    def _edge(
        self,
        u: int,
        src: tuple[Layout, ...],
        v: int,
        dst: tuple[Layout, ...],
        value: Value,
        grad: bool,
    ) -> None:
        """Price the reshard once per pair of distinct layouts; equal edges share their arrays."""
        grad = grad and value.grad
        key = (src, dst, value.shape, value.dtype.itemsize, grad)
        if key not in self.priced:
            (rows, u_class), (columns, v_class) = _classes(src), _classes(dst)
            self.priced[key] = self.prices.reshard(rows, columns, value, grad), u_class, v_class
        self.edges.append(Edge(u, v, *self.priced[key]))


@lru_cache(maxsize=4096)
def _classes(layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], np.ndarray]:
    """The distinct layouts, and which of them each one is."""
    number: dict[Layout, int] = {}
    return tuple(dict.fromkeys(layouts)), np.array(
        [number.setdefault(layout, len(number)) for layout in layouts]
    )
