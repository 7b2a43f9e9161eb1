"""Spread fixed strategies over the graph, through the factors of the rules.

before::    %h = aten.linear.default(%x, %w)      fixed: o by tp
            %y = aten.gelu.default(%h)
            %z = aten.linear.default(%y, %v)

after::     %h = aten.linear.default(%x, %w)      hint: o by tp
            %y = aten.gelu.default(%h)            spread: last dimension by tp
            %z = aten.linear.default(%y, %v)      spread: i by tp, so a sum over tp

Only splits spread (operands to results and back); what an axis does where nothing reached an
operator is left to the search. The nearest hint wins: the work list runs breadth first, in the
order of the graph, so the outcome does not depend on anything but graph and hints. The idea is
GSPMD's and Shardy's; unlike theirs, it never decides how to reshard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Graph, Node
from autopar.ir.layout import INVARIANT, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Dims, Rule, Strategy, is_searched
from autopar.passes.choices import Fix


@dataclass(frozen=True)
class _Together:
    """The axes that split one factor, major first.

    size:
        of the factor
    free:
        whether any other order would do (a count asked for them, not their names)
    """

    axes: tuple[str, ...]
    size: int
    free: bool = False


@dataclass
class Spread:
    """Fixes of all reached operators, and per (node, axis) who decided."""

    fixes: dict[str, Fix] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)


def propagate(
    graph: Graph,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    fixes: Mapping[str, Fix],
    origins: Mapping[str, str],
    input_layouts: Mapping[str, Layout] | None = None,
) -> Spread:
    """Spread fixes until nothing changes.

    mesh:
        the mesh without trivial axes
    fixes, origins:
        call node name -> what a hint fixed, and how to name that hint
    input_layouts:
        source node name -> a layout that spreads from there (data parallel's split batch)
    """
    work = _Propagation(graph, rules, mesh)
    for node in graph.calls:
        if node.name in fixes:
            work.seed(node.name, fixes[node.name], origins[node.name])
    for node in graph.nodes:
        if input_layouts and node.name in input_layouts:
            work.seed_source(node.name, input_layouts[node.name])
    work.run()
    return work.finish(fixes, origins)


class _Propagation:
    def __init__(self, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> None:
        self.graph, self.rules, self.mesh = graph, rules, mesh
        self.roles: dict[str, dict[str, str]] = {}
        self.closed: dict[str, set[str]] = {}
        self.order: dict[str, dict[str, _Together]] = {}
        # The factors that are cut as something a hint asked for is, be it worth it or not.
        self.asked: dict[str, set[str]] = {}
        self.reasons: dict[str, dict[str, str]] = {}
        self.queue: deque[str] = deque()

    def seed(self, name: str, fix: Fix, origin: str) -> None:
        roles = {axis: f for f, axes in fix.exact.items() for axis in axes}
        self.roles[name] = roles
        self.closed[name] = set(fix.exact)
        self.asked[name] = set(fix.exact)
        self.order[name] = {
            f: _Together(axes, self._size(name, f), f in fix.any_order)
            for f, axes in fix.exact.items()
            if len(axes) > 1
        }
        self.reasons[name] = dict.fromkeys(self.mesh.names, origin)
        self.queue.append(name)

    def seed_source(self, name: str, layout: Layout) -> None:
        """A source spreads its layout to every operator that reads it."""
        (value,) = self.graph.producers[name][0].results
        for d, axes in enumerate(layout.dims):
            for axis in axes:
                reason = f"input {self._target(name)!r}"
                self._offer_uses(value.name, d, axis, reason, _Together(axes, value.shape[d]))

    def _size(self, name: str, factor: str) -> int:
        return self.rules[name].by_name[factor].size

    def _target(self, name: str) -> str:
        return self.graph.producers[name][0].target

    def run(self) -> None:
        while self.queue:
            self._spread_from(self.graph.producers[self.queue.popleft()][0])

    def _spread_from(self, node: Node) -> None:
        rule = self.rules[node.name]
        roles = self.roles[node.name]
        for axis in self.mesh.names:
            factor = roles.get(axis)
            if factor is None:
                continue
            reason = self.reasons[node.name][axis]
            siblings = self._together(node.name, factor)
            for value, dims in zip(node.results, rule.results, strict=True):
                d = _dimension_of(dims, factor)
                if d is not None:
                    self._offer_uses(value.name, d, axis, reason, siblings)
            for value, dims in zip(node.operands, rule.operands, strict=True):
                d = _dimension_of(dims, factor)
                if d is not None:
                    self._offer_producer(value.name, d, axis, reason, siblings)
                    self._offer_uses(value.name, d, axis, reason, siblings)

    def _together(self, name: str, factor: str) -> _Together:
        ordered = self.order.get(name, {}).get(factor)
        mine = tuple(a for a in self.mesh.names if self.roles[name].get(a) == factor)
        if ordered and set(ordered.axes) == set(mine):
            return ordered
        return _Together(mine, self._size(name, factor))

    def _offer_uses(
        self, value: str, dim: int, axis: str, reason: str, siblings: _Together
    ) -> None:
        for node, index in self.graph.consumers[value]:
            self._offer(node, self.rules[node.name].operands[index][dim], axis, reason, siblings)

    def _offer_producer(
        self, value: str, dim: int, axis: str, reason: str, siblings: _Together
    ) -> None:
        node, index = self.graph.producers[value]
        if not node.is_source:
            self._offer(node, self.rules[node.name].results[index][dim], axis, reason, siblings)

    def _offer(
        self, node: Node, dim: tuple[str, ...], axis: str, reason: str, siblings: _Together
    ) -> None:
        """Let one axis split a dimension of an operator, if it is still free and may.

        An uneven cut spreads to loops of the same length; others get one that is worth it.
        """
        roles = self.roles.setdefault(node.name, {})
        if axis in roles:
            return
        rule = self.rules[node.name]
        for factor in dim:
            if factor in self.closed.get(node.name, ()):
                return
            candidate = {**roles, axis: factor}
            asked = self.asked.get(node.name, set())
            if rule.by_name[factor].size == siblings.size:
                asked = asked | {factor}
            if is_searched(rule, _as_strategy(candidate, self.mesh), self.mesh, asked):
                roles[axis] = factor
                self.asked[node.name] = asked
                if len(siblings.axes) > 1:
                    self.order.setdefault(node.name, {})[factor] = siblings
                self.reasons.setdefault(node.name, {})[axis] = _spread_reason(reason)
                self.queue.append(node.name)
                return

    def finish(self, fixes: Mapping[str, Fix], origins: Mapping[str, str]) -> Spread:
        spread = Spread()
        for name, roles in self.roles.items():
            if not roles and name not in fixes:
                continue
            base = fixes.get(name, Fix())
            extra = {axis: f for axis, f in roles.items() if f not in base.exact}
            orders = {
                f: together
                for f, together in self.order.get(name, {}).items()
                if f not in base.exact
                and set(together.axes) == {a for a, r in roles.items() if r == f}
            }
            spread.fixes[name] = replace(
                base,
                roles={**extra, **base.roles},
                exact={**{f: t.axes for f, t in orders.items()}, **base.exact},
                any_order=base.any_order | {f for f, t in orders.items() if t.free},
            )
            spread.reasons[name] = self.reasons.get(name, {})
        return spread


def _spread_reason(reason: str) -> str:
    return reason if reason.startswith("spread from ") else f"spread from {reason}"


def _dimension_of(dims: Dims, factor: str) -> int | None:
    return next((d for d, dim in enumerate(dims) if factor in dim), None)


def _as_strategy(roles: Mapping[str, str], mesh: Mesh) -> Strategy:
    return Strategy(tuple((axis, roles.get(axis, INVARIANT)) for axis in mesh.names))
