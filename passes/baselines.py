"""The plans people write by hand, as points of the search's own problem.

Data parallel, FSDP, Megatron's tensor parallel and tensor with sequence parallel, and mixtures of
them over two or more axes. Each is a restriction of the problem that the search solves without
hints: some strategies and layouts are ruled out, what the scheme says nothing of is left to the
solver. So a baseline is priced exactly as a plan is, and none can be cheaper than the optimum.

What a scheme (`autopar.passes.schemes`) decides along its axes:

- *data parallel*: the batch of every input is split, and whatever it reaches; parameters whole;
- *FSDP* (ZeRO-3): the same, but parameters are split along some dimension wherever one divides;
- *tensor parallel*: the pairs of `find_pairs` are split by columns and rows, everything between
  the pairs is computed alike by all ranks; embeddings, the head with its loss, and products that
  make several pairs' inputs at once may be split in any way, or not;
- *tensor + sequence parallel*: between the pairs the sequence is split (the last dimension before
  the channels; the channels where there is none that divides).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.cut import is_offered
from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.layout import INVARIANT, REPLICATE, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.passes.assignment import SEARCH
from autopar.passes.build import Built, Prices
from autopar.passes.choices import WHOLE, Fix
from autopar.passes.overlap import solve_overlapping
from autopar.passes.place_hints import Placed
from autopar.passes.propagate import propagate
from autopar.passes.restrict import restrict
from autopar.passes.schemes import Scheme, schemes
from autopar.passes.search import Outputs, Searched, batch_size, search
from autopar.passes.solver import InfeasibleError
from autopar.passes.tensor_pairs import Pairs, find_pairs, weight_values


@dataclass
class Baselines:
    """The baselines of one graph on one mesh.

    found:
        name -> the assignment with its cost
    skipped:
        name -> why the scheme does not exist for this model and mesh
    """

    found: dict[str, Searched] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def baseline_assignments(
    placed: Placed,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    prices: Prices,
    outputs: Outputs = "auto",
    *,
    built: Built | None = None,
) -> Baselines:
    """The cheapest assignment of every scheme.

    placed:
        the graph; its hints are not used: a baseline is what one would have without them
    mesh:
        the mesh without axes of size 1
    built:
        the problem without hints, where a search has built it already

    A mesh of one rank has no baselines.
    """
    graph = placed.graph
    if built is None:
        built = search(Placed(graph), rules, mesh, prices, mode="auto", outputs=outputs).built
    result = Baselines()
    for scheme, found in _solved(graph, rules, mesh, built):
        if isinstance(found, Searched):
            result.found[str(scheme)] = found
        else:
            result.skipped[str(scheme)] = found
    return result


def simplest_as_good(
    graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, precision: float, searched: Searched
) -> Searched:
    """The plan that the search found without hints, or a baseline that cannot be told from it.

    precision:
        by what share of a step's time a plan may be slower and still count as good: no more than
        what the device was measured with (`Device.precision`). Nothing is changed where it is 0

    Of the baselines within it the first of `schemes` is taken, data parallel before all others.
    Its bound is that of the search.
    """
    best = searched.solution
    if not precision:
        return searched
    for scheme, found in _solved(graph, rules, mesh, searched.built):
        if isinstance(found, str) or found.solution.cost > (1 + precision) * best.cost:
            continue
        solution = found.solution
        if solution.cost <= best.cost:
            return searched
        gain = 1 - best.cost / solution.cost
        note = (
            f"this is {scheme}: the search found a plan that is {gain:.2%} faster, which is less "
            f"than the device was measured to ({precision:.1%})"
        )
        solution = replace(solution, bound=best.bound, status="feasible")
        notes = (*searched.notes, note)
        return replace(found, solution=solution, blocks=searched.blocks, notes=notes)
    return searched


def _solved(
    graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, built: Built
) -> Iterator[tuple[Scheme, Searched | str]]:
    """The cheapest assignment of each scheme, solved as it is asked for, or why there is none."""
    for scheme in schemes(mesh) if mesh.axes else ():
        try:
            yield scheme, _solve(_Restriction(graph, rules, mesh, scheme), built)
        except (PlanError, InfeasibleError) as error:
            yield scheme, str(error)


def _solve(restriction: _Restriction, built: Built) -> Searched:
    smaller = restrict(built, restriction.kept(built))
    found = solve_overlapping(smaller.problem, smaller.parts)
    assignment = smaller.assignment(restriction.mesh, found.solution.choice)
    reasoned = replace(assignment, reasons=restriction.reasons())
    return Searched(reasoned, found.solution, smaller, found.hiding, found.weighed)


class _Restriction:
    """What one scheme fixes. Raises PlanError where it does not exist."""

    def __init__(self, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, scheme: Scheme) -> None:
        self.graph, self.rules, self.mesh, self.scheme = graph, rules, mesh, scheme
        self.weights = weight_values(graph)
        self.batch = self._batch()
        self.pairs = self._pairs()
        self.open = self._open()
        self.roles = self._roles()

    def _batch(self) -> int | None:
        axes = self.scheme.batch
        if not axes:
            return None
        batch = batch_size(self.graph.sources("input"))
        if batch is None:
            raise PlanError("no input has a batch dimension")
        in_order = tuple(a for a in self.mesh.names if a in axes)
        if not is_offered(batch, self.mesh.sizes_of(in_order)):
            ranks = self.mesh.axis_size(*axes)
            raise PlanError(f"the batch of {batch} does not divide over {ranks} ranks")
        return batch

    def _pairs(self) -> Pairs:
        if not self.scheme.tensor:
            return Pairs()
        pairs = find_pairs(self.graph, self.rules, self.mesh, self.scheme.tensor)
        if not pairs.rows:
            ranks = self.mesh.axis_size(*self.scheme.tensor)
            raise PlanError(
                f"no two weight products can be split by columns and rows over {ranks} ranks"
            )
        return pairs

    def _open(self) -> set[str]:
        """The calls that the tensor axes may split in any way."""
        found = set(self.pairs.fused)
        if self.scheme.tensor:
            reached: set[str] = set()
            for node in self.graph.calls:
                if node.name in self.pairs.heads or any(v.name in reached for v in node.operands):
                    found.add(node.name)
                    reached.update(v.name for v in node.results)
                elif self._is_lookup(node):
                    found.add(node.name)
        return found

    def _is_lookup(self, node: Node) -> bool:
        """Whether a call reads rows of a weight, the one operand with that dimension."""
        rule = self.rules[node.name]
        return any(
            value.name in self.weights and rule.by_name[f].assist and rule.is_reduced(f)
            for value, dims in zip(node.operands, rule.operands, strict=True)
            for dim in dims
            for f in dim
        )

    # --- what every call must do -------------------------------------------------------------

    def _roles(self) -> dict[str, dict[str, str]]:
        """Call -> axis -> the factor it splits, or `WHOLE`."""
        scheme, found = self.scheme, self._spread()
        for node in self.graph.calls:
            roles = found.setdefault(node.name, {})
            for axis in scheme.tensor:
                if node.name in self.open:
                    roles.pop(axis, None)
                else:
                    roles.setdefault(axis, WHOLE)
        return found

    def _spread(self) -> dict[str, dict[str, str]]:
        axes = self.scheme.tensor
        seeds = {**self.pairs.columns, **self.pairs.rows}
        if self.scheme.sequence:
            seeds = {**self._between(), **seeds}
        fixes = {name: Fix(exact={factor: axes}) for name, factor in seeds.items()}
        spread = propagate(
            self.graph,
            self.rules,
            self.mesh,
            fixes,
            dict.fromkeys(fixes, str(self.scheme)),
            self._inputs(),
        )
        return {
            name: {**fix.roles, **{a: f for f, split in fix.exact.items() for a in split}}
            for name, fix in spread.fixes.items()
        }

    def _inputs(self) -> dict[str, Layout]:
        """The layouts of the inputs along the batch axes, by node name."""
        found = {}
        for node in self.graph.sources("input") if self.batch is not None else ():
            shape = node.results[0].shape
            is_batch = bool(shape) and shape[0] == self.batch
            axes = tuple(a for a in self.mesh.names if a in self.scheme.batch)
            found[node.name] = Layout.make(
                axes if d == 0 and is_batch else () for d in range(len(shape))
            )
        return found

    def _between(self) -> dict[str, str]:
        """The calls that read what a pair gives -> the factor the sequence is for them."""
        found: dict[str, str] = {}
        paired = {*self.pairs.columns, *self.pairs.rows, *self.open}
        for row in self.pairs.rows:
            (value, *_) = self.graph.producers[row][0].results
            # From the dimension before the channels to the second one, then the channels.
            order = [*range(len(value.shape) - 2, 0, -1), len(value.shape) - 1]
            for node, index in self.graph.consumers[value.name]:
                if node.name in paired:
                    continue
                dims = self.rules[node.name].operands[index]
                factor = next((f for d in order for f in dims[d][:1] if self._may(node, f)), None)
                if factor is not None:
                    found[node.name] = factor
        if not found:
            raise PlanError("nothing between the pairs has a dimension that divides")
        return found

    def _may(self, node: Node, name: str) -> bool:
        factor = self.rules[node.name].by_name[name]
        counts = self.mesh.sizes_of(self.scheme.tensor)
        return factor.splittable and is_offered(factor.size, counts)

    # --- what stays of the problem -----------------------------------------------------------

    def kept(self, built: Built) -> dict[int, list[int]]:
        """Index of a problem node -> the positions of the choices that the scheme allows."""
        found: dict[int, list[int]] = {}

        def keep(index: int, kept: list[int], node: Node) -> None:
            # Equal blocks may share one decision: that of the first.
            if not found.setdefault(index, kept):
                raise PlanError(f"{node.op} {node.target or node.origin}: no choice fits")

        for name, (index, strategies) in built.strategies.items():
            keep(index, self._strategies(name, strategies), self.graph.producers[name][0])
        for node in self.graph.sources("param"):
            index, layouts = built.sources[node.name]
            keep(index, self._parameter(node, layouts), node)
        for name, wanted in self._inputs().items():
            index, layouts = built.sources[name]
            same = [
                k
                for k, layout in enumerate(layouts)
                if all(layout.state(a) == wanted.state(a) for a in self.scheme.batch)
            ]
            keep(index, same, self.graph.producers[name][0])
        return found

    def _strategies(self, name: str, strategies: Sequence[Strategy]) -> list[int]:
        roles = self.roles[name]

        def allowed(strategy: Strategy) -> bool:
            return all(
                strategy.role[axis] in ((INVARIANT, REPLICATE) if role == WHOLE else (role,))
                for axis, role in roles.items()
            )

        return [k for k, strategy in enumerate(strategies) if allowed(strategy)]

    def _parameter(self, node: Node, layouts: Sequence[Layout]) -> list[int]:
        scheme = self.scheme
        split = self._is_split(node)

        def allowed(layout: Layout) -> bool:
            whole = all(layout.state(a) == INVARIANT for a in scheme.data)
            if split is None:
                return whole
            return whole and all((layout.state(a) != INVARIANT) == split for a in scheme.tensor)

        kept = [k for k, layout in enumerate(layouts) if allowed(layout)]
        count = [sum(a in scheme.fsdp for a in layout.split_axes) for layout in layouts]
        most = max((count[k] for k in kept), default=0)
        return [k for k in kept if count[k] == most]

    def _is_split(self, node: Node) -> bool | None:
        """Whether the tensor axes split a parameter, None where they may or may not.

        They do where a call that reads it (or its cast, its transpose) splits one of its factors.
        """
        split = False
        for user, index in self._uses(node):
            if user.name in self.open:
                return None
            roles = self.roles[user.name]
            mine = {f for dim in self.rules[user.name].operands[index] for f in dim}
            split |= any(roles.get(a) in mine for a in self.scheme.tensor)
        return split

    def _uses(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Every read of a parameter, or of what was made from parameters alone, by others."""
        work = [v.name for v in node.results]
        while work:
            name = work.pop()
            for user, index in self.graph.consumers[name]:
                if all(v.name in self.weights for v in user.operands):
                    work.extend(v.name for v in user.results)
                else:
                    yield user, index

    def reasons(self) -> dict[str, dict[str, str]]:
        """Call -> mesh axis -> who decided."""
        return {
            node.name: {
                axis: str(self.scheme) if axis in self.roles[node.name] else SEARCH
                for axis in self.mesh.names
            }
            for node in self.graph.calls
        }
