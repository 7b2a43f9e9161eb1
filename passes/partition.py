"""From a graph and its assignment to the graph that each rank runs.

before::    %h : f32[8, 768] grad = aten.linear.default(%x, %w)
            %y : f32[8, 768] grad = aten.relu.default(%h)

after::     %h : f32[8, 768] grad sum(tp) = aten.linear.default(%x, %w)
            %h_1 : f32[8, 768] grad = autopar.all_reduce(%h, ("tp",), "I")
            %y : f32[8, 768] grad = aten.relu.default(%h_1)

Every value gets its layout; one chain of collectives is inserted per (value, target layout).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.ir.layout import Layout
from autopar.ir.reduced import REDUCED_IN, SUMMING, is_fetched, reduced_in
from autopar.ir.rule import Rule
from autopar.ir.steps import STEPS
from autopar.passes.assignment import Assignment
from autopar.passes.choices import layouts_of
from autopar.passes.localise import local_call
from autopar.passes.reshard.path import Step, step_node_args

#: Plans a reshard: (from, to, the value, whether a gradient flows, whether it is the first one of
#: a parameter) -> its steps.
Reshard = Callable[[Layout, Layout, Value, bool, bool], tuple[Step, ...]]


def partition(
    graph: Graph, rules: Mapping[str, Rule], assignment: Assignment, reshard: Reshard
) -> Graph:
    """The partitioned graph: layouts on all values, local calls, collectives in place.

    A value with several uses is first brought to its relay layout, once; each use then takes the
    nearer of that copy and the value as its producer made it.
    """
    return _Partitioner(graph, rules, assignment, reshard).run()


class _Partitioner:
    def __init__(
        self, graph: Graph, rules: Mapping[str, Rule], assignment: Assignment, reshard: Reshard
    ) -> None:
        self.graph, self.rules, self.assignment = graph, rules, assignment
        self.reshard = reshard
        self.nodes: list[Node] = []
        # Whole value name -> its copies by (layout, whether gradients flow through the copy).
        self.copies: dict[str, dict[tuple[Layout, bool], Value]] = {}
        self.taken = set(graph.producers)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.is_source:
                self._emit(node, (self.assignment.sources[node.name],))
            else:
                self._call(node)
        outputs = tuple(
            self._use(v, layout, v.grad) if isinstance(v, Value) and layout is not None else v
            for v, layout in zip(self.graph.outputs, self.assignment.outputs, strict=True)
        )
        updates = tuple(
            (name, self._use(v, Layout.whole(len(v.shape)), False))
            for name, v in self.graph.updates
        )
        return Graph(tuple(self.nodes), outputs, updates, self.assignment.mesh)

    def _emit(self, node: Node, layouts: tuple[Layout, ...]) -> None:
        results = tuple(
            replace(v, layout=layout) for v, layout in zip(node.results, layouts, strict=True)
        )
        self.nodes.append(replace(node, results=results))
        for value in results:
            assert value.layout is not None
            self.copies[value.name] = {(value.layout, value.grad): value}

    def _call(self, node: Node) -> None:
        rule, strategy = self.rules[node.name], self.assignment.strategies[node.name]
        layouts = layouts_of(node, rule, strategy, self.assignment.mesh)
        placed = iter(
            [self._use(v, layouts[i], node.operand_grad(i)) for i, v in enumerate(node.operands)]
        )
        local = local_call(node, rule, strategy, self.assignment.mesh)
        args, kwargs = map_values((local.args, local.kwargs), lambda _: next(placed))
        self._emit(replace(local, args=args, kwargs=kwargs), layouts[len(node.operands) :])

    def _use(self, value: Value, layout: Layout, grad: bool) -> Value:
        """The copy of a value in the layout one use needs, made where it does not exist yet."""
        copies = self.copies[value.name]
        made = next(iter(copies.values()))
        assert made.layout is not None
        if self._same(made.layout, layout, grad and value.grad):
            return made
        relay = self.assignment.relays.get(value.name)
        if relay is None:
            return self._reshard(value.name, made, layout, grad)
        shared_grad = value.grad and self._any_gradient(value)
        handed = self._reshard(value.name, made, relay, shared_grad)
        return self._reshard(value.name, handed, layout, grad)

    def _any_gradient(self, value: Value) -> bool:
        """Whether a gradient comes back through any use of the value."""
        uses = self.graph.consumers[value.name]
        returned = any(v.name == value.name for v in self.graph.outputs if isinstance(v, Value))
        return returned or any(node.operand_grad(i) for node, i in uses)

    def _same(self, made: Layout, wanted: Layout, grad: bool) -> bool:
        return made == wanted if grad else made.without_gradient() == wanted.without_gradient()

    def _reshard(self, name: str, source: Value, layout: Layout, grad: bool) -> Value:
        """Bring one copy of a value to a layout, through steps other uses may share."""
        grad = grad and source.grad
        assert source.layout is not None
        if self._same(source.layout, layout, grad):
            return source
        current = source
        if not grad and source.layout.replicate:
            # Without a gradient R is I; the graph says so before it goes on from there.
            plain = source.layout.without_gradient()
            current = self._step(
                name, current, "autopar.to_invariant", (source.layout.replicate,), plain, False
            )
        made_by = self.graph.producers[name][0]
        fetched = is_fetched(made_by) and source.name == name
        for step in self.reshard(source.layout, layout, source, grad, fetched):
            current = self._step(name, current, step.op, step_node_args(step), step.after, grad)
        return current

    def _step(
        self, name: str, current: Value, op: str, args: tuple[Any, ...], after: Layout, grad: bool
    ) -> Value:
        """The copy of a value that one step makes, shared by all who ask for it."""
        copies = self.copies[name]
        existing = copies.get((after, grad))
        if existing is None:
            existing = replace(current, name=self._fresh(name), layout=after, grad=grad)
            made_by = self.graph.producers[name][0]
            reduced = reduced_in(made_by) if grad and op in SUMMING else None
            attrs = {} if reduced is None else {REDUCED_IN: reduced}
            self.nodes.append(
                Node(op, (current, *args), {}, (existing,), origin=made_by.origin, attrs=attrs)
            )
            copies[(after, grad)] = existing
        return existing

    def _fresh(self, name: str) -> str:
        for k in range(1, len(self.taken) + 2):
            candidate = f"{name}_{k}"
            if candidate not in self.taken:
                self.taken.add(candidate)
                return candidate
        raise AssertionError("names are finite")


def collectives(graph: Graph) -> list[Node]:
    """The reshard steps of a partitioned graph, in order."""
    return [node for node in graph.nodes if node.op in STEPS]
