"""Parts of a layout: fewer options, and what follows from that worked out.

Nodes keep some of their options; what is impossible or decided then goes, live sets that can no
longer be exceeded go too, and elimination takes the nodes that this sets free. An assignment of
a part is one of the whole, at the same cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .layout import Layout
from .prune import forbid_conflicts, prune_dominated, prune_unsupported, tighten
from .reduction import Reduction


@dataclass(frozen=True, eq=False)
class Part:
    """A layout with fewer options than the whole.

    Attributes:
        layout: of the nodes that are left; its costs are those of whole assignments.
        sets: the whole's number of each of its live sets, int [T].
        reductions: how it came about, outermost first.
    """

    layout: Layout
    sets: np.ndarray
    reductions: tuple[Reduction, ...] = ()

    @staticmethod
    def whole(layout: Layout) -> Part:
        memory = layout.memory
        return Part(layout, np.arange(0 if memory is None else len(memory.live.room)))

    def narrowed(self, kept: Mapping[int, np.ndarray], *, dominance: bool = False) -> Part:
        """The part in which nodes keep the options at the given indices only.

        Args:
            kept: node -> indices of its options, ascending.
            dominance: also look for options that others make needless.

        Raises:
            InfeasibleError: nothing is left.
        """
        network = self.layout.network.copy()
        changed = [node for node, at in kept.items() if len(at) < len(network.costs(node))]
        near: set[int] = set(changed)
        for node in changed:
            network.keep(node, kept[node])
            near.update(network.links[node])
        names = [f"node {node}" for node in range(len(network.unary))]
        prune_unsupported(network, names, sorted(near))
        live = None if self.layout.memory is None else self.layout.memory.live
        sets = np.arange(0)
        if live is not None:
            live, sets, _ = tighten(network, live, names)
        if live is not None and forbid_conflicts(network, live):
            prune_unsupported(network, names)
        keep = set() if live is None else live.varying()
        reduction = Reduction(network, lambda node: node not in keep).run()
        if dominance and prune_dominated(network, live):
            reduction.run()
        layout = Layout(network, network.alive(), live)
        return Part(layout, self.sets[sets], (*self.reductions, reduction))

    def choices(self, choice: np.ndarray) -> dict[int, int]:
        """The problem's choices of the whole's nodes, from those of the layout's."""
        choices = self.layout.choices(choice)
        for reduction in reversed(self.reductions):
            choices = reduction.expand(choices)
        return choices
