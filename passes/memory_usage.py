"""Memory as the assignment problem counts it: bytes per choice, over fixed live ranges.

The problem has a node per call, source, shared value (relay) and output, and one choice says which
layouts that node gives and asks. Who carries what, with ``F`` nodes in the graph, a call at ``i``
running forward at ``i`` and backward at ``2F-1-i``, and the optimizer at ``2F``:

- a parameter: its shard with optimizer state always, its gradient from the first backward that
  makes one
- between a value and a use of it (a parameter's relay, a call): the copy made for that use
- the relay of a value: the value in the relay's layout, until its last use or the last backward
  that needs it
- a call: what autograd keeps for it (saved operands that no relay carries, saved results,
  internals) until its backward; results on their way to the next call; gradients on their way back
- an output: the tensor returned, until the step ends

Views carry nothing; the storage they show is carried once. Which tensors are saved, how long
gradients live and which of them share memory comes from simulating the whole graph. Not seen are
copies made within a chain of views, and what a reshard uses while it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.cut import largest
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Factor, Rule, Strategy
from autopar.passes.choices import Choices
from autopar.passes.kept import Kept, Piece, Probe, kept_by
from autopar.passes.lifetimes import Lifetimes
from autopar.passes.saved import Resolve
from autopar.passes.signature import signature
from autopar.passes.stand_ins import callable_of
from autopar.passes.timeline import OPTIMIZER_WORKSPACE, optimizer_states

#: How the dimensions of a tensor are cut: the mesh axes that split each, and in which units.
Cut = tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Carrier:
    """Memory that a problem node holds.

    what:
        "shard", "gradient", "copy", "held", "saved", or "moment" and which
    usages:
        bytes on one rank under each choice, float64 [choices]
    interval:
        the half-open range of positions
    """

    what: str
    usages: np.ndarray
    interval: tuple[int, int]


@dataclass(frozen=True)
class Copy:
    """What one node carries that stands between the maker of a value and a use of it.

    carriers:
        usages [2 * classes]: first where the value is used as it is, then where it is a copy
    classes:
        the distinct ways in which the use asks for the value to be split
    made, asked:
        how it is split under each choice of the maker and of the use
    """

    carriers: tuple[Carrier, ...]
    classes: tuple[Cut, ...]
    made: tuple[Cut, ...]
    asked: tuple[Cut, ...]


class ProblemUsages:
    """The carriers of every node of the assignment problem of one graph.

    ignore_below:
        leave out copies of activations, and what is held for a moment only (results and gradients
        on their way, workspace), where it is smaller than this many bytes under every choice

    Raises PlanError for an unknown optimizer.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[str, Rule],
        mesh: Mesh,
        *,
        optimizer: str = "adam",
        ignore_below: float = 0.0,
        resolve: Resolve = callable_of,
        probe: Probe | None = None,
    ) -> None:
        self.graph, self.rules, self.mesh = graph, rules, mesh
        self.resolve, self.probe = resolve, probe
        self.ignore_below = ignore_below
        self.states = optimizer_states(optimizer)
        self.workspace = OPTIMIZER_WORKSPACE[optimizer]
        self.lives = Lifetimes(graph, resolve)
        trained = [n.results[0] for n in graph.sources("param") if n.results[0].grad]
        self.largest = max((v.nbytes for v in trained), default=0)
        # (identity of the layouts, shape, dimensions) -> pieces; the layouts are kept so that it
        # stays.
        self._pieces: dict[Hashable, tuple[Sequence[Layout], np.ndarray]] = {}
        self._factors: dict[int, tuple[Choices, dict[str, np.ndarray]]] = {}
        self._kept: dict[Hashable, Kept] = {}

    @property
    def end(self) -> int:
        """The first position after the step."""
        return 2 * len(self.graph.nodes) + 1

    def call(self, node: Node, choices: Choices) -> tuple[Carrier, ...]:
        """What a call carries; the first carrier is what autograd keeps for it."""
        own = self.lives.of_call(node)
        kept = self._kept_by(node)
        split = self._factor_pieces(node, choices)
        saved = np.zeros(len(choices.strategies))
        for index in own.operands:
            held = self._local(node.operands[index], choices.operands[index])
            for factor, assisted in kept.assisted.items():
                if index not in assisted.operands:
                    held = np.where(split[factor] > 1, 0.0, held)
            saved += held
        for index in own.results:
            saved += self._local(node.results[index], choices.results[index])
        internals, forward, backward = self._kept_bytes(node, kept, split, choices)
        saved += internals
        carriers = [Carrier("saved", saved, own.interval)]
        for k, moment in enumerate(own.moments):
            layouts = choices.results[moment.result]
            usages = moment.nbytes / self._all_pieces(node.results[moment.result], layouts)
            carriers.append(Carrier(f"moment {k}", usages, moment.interval))
        lo, hi = own.interval
        carriers.append(Carrier("moment forward", forward, (lo, lo + 1)))
        carriers.append(Carrier("moment backward", backward, (hi - 1, hi)))
        return self._worth(carriers)

    def relay(self, value: Value, layouts: Sequence[Layout]) -> tuple[Carrier, ...]:
        """What the relay of a value carries; nothing for a parameter, whose copies `copy` sees."""
        own = self.lives.of_relay(value)
        carriers = [Carrier("saved", self._local(value, layouts), own.interval)]
        for k, moment in enumerate(own.moments):
            usages = moment.nbytes / self._all_pieces(value, layouts)
            carriers.append(Carrier(f"moment {k}", usages, moment.interval))
        return self._worth(carriers)

    def parameter(self, value: Value, stored: Sequence[Layout]) -> tuple[Carrier, ...]:
        """What a parameter carries: its shard, optimizer state and gradient, not its copies."""
        shard = value.nbytes / self._all_pieces(value, stored)
        if not value.grad:
            return (Carrier("shard", shard, (0, self.end)),)
        _, backward = self.lives.of_parameter(value)
        carriers = [
            Carrier("shard", shard * (1 + self.states), (0, self.end)),
            Carrier("gradient", shard, (backward[0], self.end)),
        ]
        if value.nbytes == self.largest:
            step = (self.end - 1, self.end)
            carriers.append(Carrier("moment step", shard * self.workspace, step))
        return self._worth(carriers)

    def copy(
        self, value: Value, made: Sequence[Layout], asked: Sequence[Layout], use: Node | None
    ) -> Copy:
        """What is carried between two nodes where one asks for a value in another layout.

        made, asked:
            the layout under each choice of the node that has the value (its source or relay) and
            of the one that wants it
        use:
            the call that wants it; None for the relay of a parameter
        """
        distinct = {_cut(layout): layout for layout in reversed(asked)}
        classes = list(dict.fromkeys(map(_cut, asked)))
        layouts = [distinct[cut] for cut in classes]
        nbytes = np.concatenate(
            [np.zeros(len(classes)), value.nbytes / self._all_pieces(value, layouts)]
        )
        kept, read, back = self.lives.of_copy(value, use)
        carriers = [Carrier("copy", nbytes, kept), Carrier("moment copy", nbytes, read)]
        if value.grad:
            carriers.append(Carrier("moment gradient", nbytes, back))
        if use is not None and self.graph.producers[value.name][0].op != "param":
            carriers = [c for c in carriers if nbytes.max() >= self.ignore_below]
        return Copy(
            self._worth(carriers),
            tuple(classes),
            tuple(map(_cut, made)),
            tuple(map(_cut, asked)),
        )

    def source(self, value: Value, layouts: Sequence[Layout]) -> tuple[Carrier, ...]:
        """What an input, buffer or constant carries."""
        usages = value.nbytes / self._all_pieces(value, layouts)
        return (Carrier("held", usages, (0, self.end)),)

    def output(self, value: Value, layouts: Sequence[Layout]) -> tuple[Carrier, ...]:
        """What a returned value carries, where its relay or producer does not already."""
        return self._worth(
            [Carrier("held", self._local(value, layouts), self.lives.of_output(value))]
        )

    # -- sizes --------------------------------------------------------------------------------

    def _worth(self, carriers: Sequence[Carrier]) -> tuple[Carrier, ...]:
        """The carriers that hold something, small moments left out."""
        return tuple(
            c
            for c in carriers
            if c.interval[0] < c.interval[1]
            and c.usages.max(initial=0.0) > 0
            and (c.usages.max() >= self.ignore_below or not c.what.startswith("moment"))
        )

    def _local(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of the memory that shows a value, on one rank, under each layout."""
        dims = self.lives.stored_dims(value)
        nbytes = value.dtype.itemsize
        for d in dims:
            nbytes *= value.shape[d]
        return nbytes / self._split_into(value, layouts, dims)

    def _all_pieces(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        return self._split_into(value, layouts, tuple(range(len(value.shape))))

    def _split_into(
        self, value: Value, layouts: Sequence[Layout], dims: tuple[int, ...]
    ) -> np.ndarray:
        """How often the largest piece goes into the whole along some dimensions, per layout."""
        key = id(layouts), value.shape, dims
        if key not in self._pieces:
            pieces = [layout.pieces(value.shape, self.mesh, dims) for layout in layouts]
            self._pieces[key] = layouts, np.array(pieces, dtype=np.float64)
        return self._pieces[key][1]

    # -- what autograd keeps besides ----------------------------------------------------------

    def _kept_by(self, node: Node) -> Kept:
        operands = tuple(self.lives.effects.spec(v) for v in node.operands)
        key = signature(node), operands
        if key not in self._kept:
            rule = self.rules[node.name]
            self._kept[key] = kept_by(node, rule, operands, self.resolve, self.probe)
        return self._kept[key]

    def _factor_pieces(self, node: Node, choices: Choices) -> dict[str, np.ndarray]:
        """How often the largest part of each factor goes into it, under every strategy."""
        key = id(choices)
        if key not in self._factors:
            split = {
                factor.name: np.array(
                    [self._parts(factor, s) for s in choices.strategies],
                    dtype=np.float64,
                )
                for factor in self.rules[node.name].factors
            }
            self._factors[key] = choices, split
        return self._factors[key][1]

    def _parts(self, factor: Factor, strategy: Strategy) -> float:
        axes = strategy.axes_of(factor.name)
        return factor.size / largest(factor.size, self.mesh.sizes_of(axes)) if axes else 1.0

    def _kept_bytes(
        self, node: Node, kept: Kept, split: dict[str, np.ndarray], choices: Choices
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Internals, forward and backward workspace under every strategy."""
        count = len(choices.strategies)
        found = [
            sum((_shrunk(piece, split, count) for piece in kept.internals), np.zeros(count)),
            _shrunk(kept.forward, split, count),
            _shrunk(kept.backward, split, count),
        ]
        for factor, assisted in kept.assisted.items():
            if not node.operands:
                continue
            pieces = self._all_pieces(node.operands[0], choices.operands[0])
            with_it = (assisted.internals, assisted.forward, assisted.backward)
            found = [
                np.where(split[factor] > 1, nbytes / pieces, usual)
                for nbytes, usual in zip(with_it, found, strict=True)
            ]
        internals, forward, backward = found
        return internals, forward, backward


def _cut(layout: Layout) -> Cut:
    return layout.dims, layout.units


def _shrunk(piece: Piece, split: dict[str, np.ndarray], strategies: int) -> np.ndarray:
    usages = np.full(strategies, float(piece.nbytes))
    for factor in piece.factors:
        usages /= split[factor]
    return usages


def merge_copies(copies: Sequence[Sequence[Carrier]], groups: int = 8) -> tuple[Carrier, ...]:
    """The carriers of a node that several copies of a block share, given copy by copy.

    What consecutive copies hold is added up over the hull of their intervals, in so many groups:
    intervals of copies are nested around the end of forward, where most is held, and there the
    sum is exact. Of moments, which follow each other, the last copy's are kept.
    """
    if len(copies) == 1:
        return tuple(copies[0])
    merged: list[Carrier] = []
    for part in np.array_split(np.arange(len(copies)), min(groups, len(copies))):
        by_what: dict[str, Carrier] = {}
        for carrier in (c for k in part.tolist() for c in copies[k]):
            if carrier.what.startswith("moment"):
                continue
            known = by_what.get(carrier.what)
            if known is not None:
                (lo, hi), (a, b) = known.interval, carrier.interval
                total = known.usages + carrier.usages
                carrier = Carrier(carrier.what, total, (min(lo, a), max(hi, b)))
            by_what[carrier.what] = carrier
        merged += by_what.values()
    return (*merged, *(c for c in copies[-1] if c.what.startswith("moment")))
