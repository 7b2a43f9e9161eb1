"""From a graph to the assignment problem that the solver is given.

One problem node per source, call, shared value and output; its choices are strategies or layouts.
One edge per producer-consumer pair, priced by the reshard between their layouts. Copies of a
block may share their nodes: each is then priced once, however many copies there are.

A value with several uses gets a *relay*: a node whose choice is the layout in which the value is
handed to all of its uses. It is resharded to that layout once, so one all-gather serves q, k and
v alike, and their gradients are reduced once (the neutral node of PyTorch's autoparallel).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import gradient_itemsize, is_fetched
from autopar.ir.rule import Rule, Strategy
from autopar.passes.assignment import Assignment
from autopar.passes.choices import Choices, Fix, node_choices
from autopar.passes.overlap import Parts, last_gradients
from autopar.passes.share import Price, SharedProblem
from autopar.passes.signature import type_of
from autopar.passes.solver import Problem
from autopar.passes.source_layouts import source_layouts


class Prices(Protocol):
    """What the problem asks of the cost model; every time is in seconds, forward and backward."""

    def strategies(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray: ...

    def parameter(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray: ...

    def reshard(
        self, src: Sequence[Layout], dst: Sequence[Layout], value: Value, grad: bool
    ) -> np.ndarray: ...

    def fetch(
        self,
        src: Sequence[Layout],
        dst: Sequence[Layout],
        value: Value,
        grad: bool,
        itemsize: int,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The reshard of a parameter, and how much of it brings the gradient back, in elements of
        `itemsize` bytes."""
        ...

    def covering(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray | None:
        """How much of gradients on their way the backward of a call covers (`overlap`)."""
        ...

    def last_bucket(self) -> float:
        """Bytes of gradients that are on their way when the backward pass is over."""
        ...


@dataclass
class Built:
    """The problem, and what each of its choices means."""

    problem: Problem
    strategies: dict[str, tuple[int, tuple[Strategy, ...]]] = field(default_factory=dict)
    sources: dict[str, tuple[int, tuple[Layout, ...]]] = field(default_factory=dict)
    relays: dict[str, tuple[int, tuple[Layout, ...]]] = field(default_factory=dict)
    outputs: list[tuple[int, tuple[Layout, ...]] | None] = field(default_factory=list)
    #: Buffer -> the problem node that stands for its update; it has one choice, the whole value.
    updates: dict[str, int] = field(default_factory=dict)
    #: The choices of each problem node that stands for a call.
    choices: dict[int, Choices] = field(default_factory=dict)
    #: What of the problem's costs runs beside what.
    parts: Parts = field(default_factory=Parts)

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
        """The solution that an assignment stands for (the inverse of `assignment`).

        Raises PlanError where it decides differently about nodes that share their decision.
        """
        chosen: list[int | None] = [None] * len(self.problem.nodes)
        tables: tuple[tuple[dict, dict], ...] = (
            (self.strategies, assignment.strategies),
            (self.sources, assignment.sources),
            (self.relays, assignment.relays),
        )
        for options, decided in tables:
            for name, (i, choices) in options.items():
                position = choices.index(decided[name])
                if chosen[i] not in (None, position):
                    raise PlanError(
                        f"assignment of {name!r}: got {decided[name]}, other copies of its block "
                        f"have {choices[chosen[i]]}; build the problem without sharing"
                    )
                chosen[i] = position
        for option, layout in zip(self.outputs, assignment.outputs, strict=True):
            if option is not None:
                chosen[option[0]] = option[1].index(layout)  # type: ignore[arg-type]
        return tuple(x or 0 for x in chosen)  # an update has one choice


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
    share: Mapping[str, str] | None = None,
) -> Built:
    """The assignment problem of a graph on a mesh without trivial axes.

    fixes:
        call node name -> what hints decided about it
    pinned, fixed_sources:
        layouts given for parameters (by dotted name) and for any source (by node name)
    output_layouts:
        for each output the layouts it may be returned in, None for outputs that are no tensors
    share:
        node name -> the node whose decision it copies (`Blocks.representatives`): the two must be
        equal calls with equal fixes, or sources that may be held in the same layouts. A relay is
        shared where the value's producer and all of its uses are.

    Raises PlanError where a fix admits no strategy, or `share` joins nodes that differ.
    """
    return _Builder(graph, rules, mesh, prices, share or {}).build(
        fixes or {}, pinned or {}, fixed_sources or {}, output_layouts
    )


class _Use(NamedTuple):
    """Who reads a value: problem node, which of its operands, whether a gradient flows back."""

    node: int
    operand: int
    grad: bool


class _Builder:
    def __init__(
        self,
        graph: Graph,
        rules: Mapping[str, Rule],
        mesh: Mesh,
        prices: Prices,
        share: Mapping[str, str],
    ) -> None:
        self.graph, self.rules, self.mesh, self.prices = graph, rules, mesh, prices
        self.share = share
        self.shared = SharedProblem()
        # Node name -> its problem node, for the first of all nodes that share one.
        self.index: dict[str, int] = {}
        # Node name -> what the choices of that problem node follow from.
        self.decides: dict[str, Any] = {}
        # Problem node -> the choices of the call it stands for, or the layouts of the source.
        self.choices: dict[int, Choices] = {}
        self.layouts: dict[int, tuple[Layout, ...]] = {}
        # Value name -> (problem node that makes it, which of its results it is).
        self.made_by: dict[str, tuple[int, int]] = {}
        self.uses: dict[str, list[_Use]] = {}
        # The parameters whose gradients nothing hides.
        self.last = last_gradients(graph, prices.last_bucket())
        # What an edge between such layouts of such a value looks like.
        self.priced: dict[Any, Price] = {}

    def build(
        self,
        fixes: Mapping[str, Fix],
        pinned: Mapping[str, Layout],
        fixed_sources: Mapping[str, Layout],
        output_layouts: Sequence[Sequence[Layout] | None],
    ) -> Built:
        built = Built(Problem((), ()))
        for node in self.graph.nodes:
            if node.is_source:
                index = self._source(node, pinned, fixed_sources)
                built.sources[node.name] = (index, self.layouts[index])
            else:
                index = self._call(node, fixes.get(node.name))
                built.strategies[node.name] = (index, self.choices[index].strategies)
            for i, value in enumerate(node.results):
                self.made_by[value.name] = (index, i)
        for output, layouts in zip(self.graph.outputs, output_layouts, strict=True):
            if not isinstance(output, Value):
                built.outputs.append(None)
                continue
            assert layouts is not None
            index = self._end(f"output {output.name}", tuple(layouts))
            built.outputs.append((index, tuple(layouts)))
            self._use(output, _Use(index, 0, output.grad))
        updates: dict[tuple[int, int], int] = {}
        for name, value in self.graph.updates:
            made = self.made_by[value.name]
            if made not in updates:
                updates[made] = self._end(f"update {name}", (Layout.whole(len(value.shape)),))
            built.updates[name] = updates[made]
            self._use(value, _Use(updates[made], 0, False))
        self._connect_all(built)
        built.choices = self.choices
        built.problem = self.shared.problem()
        built.parts = self.shared.parts()
        return built

    def _source(self, node: Node, pinned: Mapping[str, Layout], fixed: Mapping[str, Layout]) -> int:
        (value,) = node.results
        given = fixed.get(node.name, pinned.get(node.target))
        joined = self._joined(node, (node.op, type_of(value), given))
        if joined is not None:
            return joined
        if node.name in fixed:
            options: tuple[Layout, ...] = (fixed[node.name],)
        else:
            options = source_layouts(node, self.mesh, pinned)
        costs = np.zeros(len(options))
        if node.op == "param":
            costs = self.prices.parameter(value, options)
        index = self.index[self._model(node)] = self.shared.add(f"{node.op} {node.target}", costs)
        self.layouts[index] = options
        return index

    def _call(self, node: Node, fix: Fix | None) -> int:
        rule = self.rules[node.name]
        types = tuple(map(type_of, (*node.operands, *node.results)))
        index = self._joined(node, (rule, fix, types))
        if index is None:
            choices = node_choices(node, rule, self.mesh, fix)
            costs = self.prices.strategies(node, rule, choices.strategies)
            covering = self.prices.covering(node, rule, choices.strategies)
            index = self.shared.add(node.name, costs, covering=covering)
            self.index[self._model(node)] = index
            self.choices[index] = choices
        for i, operand in enumerate(node.operands):
            self._use(operand, _Use(index, i, node.operand_grad(i)))
        return index

    def _model(self, node: Node) -> str:
        return self.share.get(node.name, node.name)

    def _joined(self, node: Node, decides: Any) -> int | None:
        """The problem node that a node shares with an earlier one; None where it is the first."""
        model = self._model(node)
        if self.decides.setdefault(model, decides) != decides:
            raise PlanError(
                f"share: {node.name!r} ({node.op} in {node.origin}) cannot copy {model!r}: "
                "they differ in types, rule or what is fixed about them"
            )
        if model not in self.index:
            return None
        self.shared.add_copy(self.index[model])
        return self.index[model]

    def _end(self, name: str, layouts: tuple[Layout, ...]) -> int:
        """Where a value leaves the graph."""
        index = self.shared.add(name, np.zeros(len(layouts)))
        self.layouts[index] = layouts
        return index

    def _use(self, value: Value, use: _Use) -> None:
        self.uses.setdefault(value.name, []).append(use)

    def _connect_all(self, built: Built) -> None:
        """Connect all values with their uses; those that join the same problem nodes, once."""
        alike: dict[Any, list[str]] = {}
        for name, uses in self.uses.items():
            alike.setdefault((self.made_by[name], tuple(Counter(uses).items())), []).append(name)
        for ((source, result), uses), names in alike.items():
            layouts = self._made(source, result)
            self._connect([self.graph.value(name) for name in names], source, layouts, uses, built)

    def _made(self, index: int, result: int) -> tuple[Layout, ...]:
        """The layout of a value under each choice of the node that makes it."""
        return self.layouts[index] if index in self.layouts else self.choices[index].results[result]

    def _wanted(self, use: _Use) -> tuple[Layout, ...]:
        """The layout that a use needs under each choice of the node that reads."""
        if use.node in self.layouts:
            return self.layouts[use.node]
        return self.choices[use.node].operands[use.operand]

    def _connect(
        self,
        values: Sequence[Value],
        source: int,
        layouts: tuple[Layout, ...],
        uses: Sequence[tuple[_Use, int]],
        built: Built,
    ) -> None:
        """The edges from one problem node to all uses (with their number) of what it makes."""
        value, copies = values[0], len(values)
        made_by = self.graph.producers[value.name][0]
        fetched = gradient_itemsize(made_by, value) if is_fetched(made_by) else 0
        last = sum(v.name in self.last for v in values)
        if sum(count for _, count in uses) > 1:
            wanted = (layout for use, _ in uses for layout in self._wanted(use))
            options = tuple(dict.fromkeys(itertools.chain(layouts, wanted)))
            relay = self.shared.add(f"relay {value.name}", np.zeros(len(options)), copies)
            built.relays |= {v.name: (relay, options) for v in values}
            grad = any(use.grad for use, _ in uses)
            price = self._price(layouts, options, value, grad, fetched=fetched)
            self.shared.connect(source, relay, price, copies, last)
            source, layouts, fetched, last = relay, options, 0, 0
        for use, count in uses:
            price = self._price(layouts, self._wanted(use), value, use.grad, fetched=fetched)
            self.shared.connect(source, use.node, price, copies * count, last)

    def _price(
        self,
        src: tuple[Layout, ...],
        dst: tuple[Layout, ...],
        value: Value,
        grad: bool,
        *,
        fetched: int,
    ) -> Price:
        """Price the reshard once per pair of distinct layouts; equal edges share their arrays.

        fetched:
            the bytes per element in which gradients come back, where it is the first one of a
            parameter, which travels in a bucket; else 0
        """
        grad = grad and value.grad
        key = (src, dst, value.shape, value.dtype.itemsize, grad, fetched)
        if key not in self.priced:
            (rows, u_class), (columns, v_class) = _classes(src), _classes(dst)
            matrix, sent = (
                self.prices.fetch(rows, columns, value, grad, fetched)
                if fetched
                else (self.prices.reshard(rows, columns, value, grad), None)
            )
            self.priced[key] = Price(matrix, u_class, v_class, sent)
        return self.priced[key]


@lru_cache(maxsize=4096)
def _classes(layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], np.ndarray]:
    """The distinct layouts, and which of them each one is."""
    number: dict[Layout, int] = {}
    return tuple(dict.fromkeys(layouts)), np.array(
        [number.setdefault(layout, len(number)) for layout in layouts]
    )
