"""The strategies among which the search chooses, per operator."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.layout import INVARIANT, REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, operand_layout, result_layout, strategies
from autopar.ir.rules import rule_for
from autopar.passes.signature import signature

#: A role that stands for "this axis splits nothing and leaves the value whole": I or R.
WHOLE = "whole"


@dataclass(frozen=True)
class Fix:
    """What is decided about one operator before the search.

    exact:
        factor -> exactly the axes that split it, major first (none: it must not be split)
    any_order:
        factors of `exact` whose axes may stand in any order
    roles:
        mesh axis -> the factor it must split, or `WHOLE`
    """

    exact: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    any_order: frozenset[str] = frozenset()
    roles: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((frozenset(self.exact.items()), self.any_order, frozenset(self.roles.items())))

    def __str__(self) -> str:
        """The same text in every process, whatever order a set has there."""
        return f"{dict(self.exact)} any order {sorted(self.any_order)} {dict(self.roles)}"

    def admits(self, strategy: Strategy, mesh: Mesh) -> bool:
        for axis, wanted in self.roles.items():
            role = strategy.role[axis]
            if role != wanted and not (wanted == WHOLE and role in (INVARIANT, REPLICATE)):
                return False
        for factor, axes in self.exact.items():
            split = strategy.axes_of(factor)
            if split != axes and not (factor in self.any_order and set(split) == set(axes)):
                return False
        return all(
            role in self.exact or strategy.axes_of(role) == mesh_order(mesh, strategy, role)
            for _, role in strategy.roles
        )


def mesh_order(mesh: Mesh, strategy: Strategy, role: str) -> tuple[str, ...]:
    """The axes of a role in the order of the mesh."""
    return tuple(axis for axis in mesh.names if strategy.role[axis] == role)


def rules_of(graph: Graph) -> dict[str, Rule]:
    """The rule of every call of the graph, by node name; equal calls have the same object."""
    found: dict[Hashable, Rule] = {}
    rules: dict[str, Rule] = {}
    for node in graph.calls:
        key = signature(node)
        if key not in found:
            found[key] = rule_for(node)
        rules[node.name] = found[key]
    return rules


def layouts_of(node: Node, rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts of all operands, then of all results, under a strategy."""
    return _layouts(rule, strategy, mesh, *_gradients(node))


def _gradients(node: Node) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Through which operands and results of a node gradients flow."""
    return (
        tuple(node.operand_grad(i) for i in range(len(node.operands))),
        tuple(value.grad for value in node.results),
    )


# Cached, as `_choices` is: every block of a model repeats the same calls.
@lru_cache(maxsize=65536)
def _layouts(
    rule: Rule,
    strategy: Strategy,
    mesh: Mesh,
    operands: tuple[bool, ...],
    results: tuple[bool, ...],
) -> tuple[Layout, ...]:
    return tuple(
        operand_layout(rule, strategy, i, g, mesh) for i, g in enumerate(operands)
    ) + tuple(result_layout(rule, strategy, i, g, mesh) for i, g in enumerate(results))


@dataclass(frozen=True)
class Choices:
    """The strategies of one operator, and what each asks and gives.

    operands, results:
        for each operand and each result its layout under every strategy
    """

    strategies: tuple[Strategy, ...]
    operands: tuple[tuple[Layout, ...], ...]
    results: tuple[tuple[Layout, ...], ...]


def node_choices(node: Node, rule: Rule, mesh: Mesh, fix: Fix | None = None) -> Choices:
    """The strategies of one operator that its fix admits, one for each set of layouts.

    Raises PlanError where the fix admits none.
    """
    choices = _choices(rule, mesh, *_gradients(node), fix or Fix())
    if not choices.strategies:
        assert fix is not None
        raise PlanError(
            f"{node.op} in {node.origin}: no strategy splits {dict(fix.exact) or dict(fix.roles)} "
            f"on the mesh {mesh}"
        )
    return choices


# Equal calls are common (every block of a model repeats them), and their choices are the same.
@lru_cache(maxsize=4096)
def _choices(
    rule: Rule, mesh: Mesh, operands: tuple[bool, ...], results: tuple[bool, ...], fix: Fix
) -> Choices:
    orders = any(len(axes) > 1 for axes in fix.exact.values())
    asked = {factor for factor, axes in fix.exact.items() if axes} | set(fix.roles.values())
    found: dict[tuple[Layout, ...], Strategy] = {}
    for strategy in strategies(rule, mesh, grad=any(results), axis_orders=orders, asked=asked):
        if fix.admits(strategy, mesh):
            found.setdefault(_layouts(rule, strategy, mesh, operands, results), strategy)
    columns = tuple(zip(*found, strict=True)) if found else ()
    return Choices(tuple(found.values()), columns[: len(operands)], columns[len(operands) :])
