"""Megatron's pairs, found in the graph: a product split by columns, then one split by rows.

A *weight product* sums a factor that an activation and a weight share. Its output channels (the
factor of weight and result) are followed forward, through pointwise operators, reshapes into
heads and attention, for as long as a split of them needs no communication. Where every path ends
in the summed factor of another weight product, the two form a pair: between them nothing is
exchanged, and one sum follows the second.

    %h = aten.linear.default(%x, %up)        column: o split
    %g = aten.gelu.default(%h)               carries the split
    %y = aten.linear.default(%g, %down)      row: i split, a sum follows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import INVARIANT
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, is_searched


@dataclass
class Pairs:
    """Which weight products are split how, by call name.

    columns, rows:
        call -> the factor that is split: an output channel, a summed one
    fused:
        calls from a product whose output is cut into parts before it reaches its rows (queries,
        keys and values made by one product) up to that cut. A block of the whole output is no
        block of every part, so only the rows of such a pair can be split by contiguous blocks.
    heads:
        weight products that no other one follows, in no pair (a language model's head)
    """

    columns: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    fused: set[str] = field(default_factory=set)
    heads: set[str] = field(default_factory=set)


def find_pairs(graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, axes: Sequence[str]) -> Pairs:
    """The pairs of a graph that can be split over all of `axes` together."""
    return _Search(graph, rules, mesh, tuple(axes)).run()


def weight_values(graph: Graph) -> frozenset[str]:
    """The values made from parameters alone: parameters, their casts and views."""
    found: set[str] = set()
    for node in graph.nodes:
        made = node.op == "param" or (
            bool(node.operands) and all(v.name in found for v in node.operands)
        )
        if made:
            found.update(v.name for v in node.results)
    return frozenset(found)


@dataclass
class _Paths:
    """Where the channels of a product lead.

    ends:
        the weight products that sum them, with the factor
    blocked:
        whether some path meets an operator that cannot keep them split
    cut:
        the calls up to the one that takes the output apart; empty where none does
    """

    ends: dict[str, str] = field(default_factory=dict)
    blocked: bool = False
    cut: set[str] = field(default_factory=set)


class _Search:
    def __init__(
        self, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, axes: tuple[str, ...]
    ) -> None:
        self.graph, self.rules, self.mesh, self.axes = graph, rules, mesh, axes
        self.weights = weight_values(graph)
        self.returned = {v.name for v in graph.outputs if isinstance(v, Value)}
        self.products = [n for n in graph.calls if self._summed(n)]

    def run(self) -> Pairs:
        pairs = Pairs()
        for node in self.products:
            channel = self._channel(node)
            if node.name in pairs.rows or channel is None:
                continue
            paths = self._follow(node, channel)
            if paths.blocked or not paths.ends or set(paths.ends) & {node.name, *pairs.columns}:
                continue
            pairs.rows.update(paths.ends)
            if paths.cut:
                pairs.fused |= paths.cut
            else:
                pairs.columns[node.name] = channel
        pairs.heads = self._heads(pairs)
        return pairs

    def _heads(self, pairs: Pairs) -> set[str]:
        names = {n.name for n in self.products}
        followed: set[str] = set()
        # Values from which a weight product can be reached, found from the end of the graph.
        leading: set[str] = set()
        for node in reversed(self.graph.nodes):
            if any(v.name in leading for v in node.results):
                followed.add(node.name)
            if node.name in names or node.name in followed:
                leading.update(v.name for v in node.operands)
        return names - followed - set(pairs.columns) - set(pairs.rows) - pairs.fused

    def _summed(self, node: Node) -> set[str]:
        """The factors that a weight and an activation of a call share and that are summed."""
        rule = self.rules[node.name]
        if not rule.flops or all(v.name in self.weights for v in node.operands):
            return set()
        return {
            f
            for f in self._factors(node, weights=True) & self._factors(node, weights=False)
            if rule.is_reduced(f) and not rule.by_name[f].assist
        }

    def _factors(self, node: Node, *, weights: bool) -> set[str]:
        operands = zip(node.operands, self.rules[node.name].operands, strict=True)
        return {
            f
            for value, dims in operands
            if (value.name in self.weights) == weights
            for dim in dims
            for f in dim
        }

    def _channel(self, node: Node) -> str | None:
        """The first output channel that all axes can split."""
        rule = self.rules[node.name]
        mine = self._factors(node, weights=True) - self._factors(node, weights=False)
        for dims in rule.results:
            for dim in dims:
                for factor in dim:
                    if factor in mine and self._splits(rule, (factor,)) == [factor]:
                        return factor
        return None

    def _splits(self, rule: Rule, dim: tuple[str, ...]) -> list[str] | None:
        """The factors of a dimension that all axes together split, or None where they cannot."""
        roles: dict[str, str] = {}
        for axis in self.axes:
            for factor in dim:
                tried = {**roles, axis: factor}
                strategy = Strategy(tuple((a, tried.get(a, INVARIANT)) for a in self.mesh.names))
                if is_searched(rule, strategy, self.mesh):
                    roles = tried
                    break
            else:
                return None
        return list(dict.fromkeys(roles.values()))

    def _follow(self, node: Node, channel: str) -> _Paths:
        paths = _Paths()
        seen: set[tuple[str, int]] = set()
        work: list[tuple[Value, int, tuple[str, ...], bool]] = [
            (value, d, (node.name,), False)
            for value, dims in zip(node.results, self.rules[node.name].results, strict=True)
            for d, dim in enumerate(dims)
            if channel in dim
        ]
        while work and not paths.blocked:
            value, d, passed, cut = work.pop()
            if (value.name, d) in seen:
                continue
            seen.add((value.name, d))
            paths.blocked = value.name in self.returned
            for user, index in self.graph.consumers[value.name]:
                rule = self.rules[user.name]
                dim = rule.operands[index][d]
                if len(dim) == 1 and dim[0] in self._summed(user):
                    if self._splits(rule, dim) is None:
                        paths.blocked = True
                    paths.ends[user.name] = dim[0]
                    continue
                carried = self._carry(user, dim)
                taken = [] if carried else self._take(user, index, d)
                if not carried and not taken:
                    paths.blocked = True
                if taken:
                    paths.cut.update(passed, (user.name,))
                after = passed if cut else (*passed, user.name)
                work += [(v, at, after, cut or bool(taken)) for v, at in carried or taken]
        return paths

    def _carry(self, node: Node, dim: tuple[str, ...]) -> list[tuple[Value, int]]:
        """The results' dimensions that stay split when an operand's dimension is."""
        rule = self.rules[node.name]
        split = self._splits(rule, dim)
        if split is None or any(rule.by_name[f].assist for f in split):
            return []
        return [
            (value, at)
            for value, dims in zip(node.results, rule.results, strict=True)
            for at, factors in enumerate(dims)
            if set(split) <= set(factors)
        ]

    def _take(self, node: Node, index: int, d: int) -> list[tuple[Value, int]]:
        """The same dimension of the results, of a call that takes parts of one dimension."""
        rule = self.rules[node.name]

        def whole(dim: tuple[str, ...]) -> bool:
            return len(dim) == 1 and not rule.by_name[dim[0]].splittable

        mine = rule.operands[index]
        if len(node.operands) != 1 or not whole(mine[d]):
            return []
        parts = [
            (value, d)
            for value, dims in zip(node.results, rule.results, strict=True)
            if len(dims) == len(mine) and whole(dims[d]) and dims[d] != mine[d]
        ]
        return parts if len(parts) == len(node.results) else []
