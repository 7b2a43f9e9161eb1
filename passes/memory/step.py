"""What a training step holds under any solution of the assignment problem, without running it.

All of `usage` added up: for every node what each of its choices holds and when, for every
pair of nodes what the reshards between them hold. It agrees with the simulation of the partitioned
graph (`simulation`) up to copies of copies, which it counts twice, and buckets (`fuse`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.passes.memory.critical import Clock
from autopar.passes.memory.lifetimes import Interval
from autopar.passes.memory.usage import Move, ProblemUsages


@dataclass(frozen=True, eq=False)
class Part:
    """One thing that the reshards between two nodes hold.

    copy:
        whether it is a copy that stays for a while; otherwise it is for the reshard only
    nbytes:
        float64 [layout of the source, layout of the target]
    sources, targets:
        the layout of each choice of either node
    times:
        interval -> how often it is held then
    """

    copy: bool
    nbytes: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    times: Mapping[Interval, int]

    def of(self, source: int, target: int) -> float:
        """Bytes under a choice of either node, each time."""
        return float(self.nbytes[self.sources[source], self.targets[target]])

    def dense(self) -> np.ndarray:
        """Bytes under every pair of choices [choice of the source, choice of the target]."""
        return self.nbytes[self.sources[:, None], self.targets[None, :]]


@dataclass(frozen=True, eq=False)
class Link:
    """The reshards between two problem nodes, which may be one and the same."""

    source: int
    target: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The memory of one rank over the times that matter (`critical`).

    held:
        for each problem node (interval, bytes under each choice)
    end:
        how many times there are
    """

    held: tuple[tuple[tuple[Interval, np.ndarray], ...], ...]
    links: tuple[Link, ...]
    end: int

    def profile(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes in use at every time, float64 [end]."""
        change = np.zeros(self.end + 1)
        for node, held in enumerate(self.held):
            for (lo, hi), usages in held:
                change[lo] += usages[choice[node]]
                change[hi] -= usages[choice[node]]
        for link in self.links:
            for part in link.parts:
                nbytes = part.of(choice[link.source], choice[link.target])
                if nbytes:
                    for (lo, hi), count in part.times.items():
                        change[lo] += count * nbytes
                        change[hi] -= count * nbytes
        return np.cumsum(change)[:-1]

    def peak(self, choice: Sequence[int]) -> float:
        """The most bytes in use at one time."""
        return float(self.profile(choice).max(initial=0.0))


def step_memory(usages: ProblemUsages, nodes: StepMemory | None = None) -> StepMemory:
    """Add up what everything holds.

    nodes:
        what is known of it already (`without_reshards`)
    """
    nodes = without_reshards(usages) if nodes is None else nodes
    clock = _clock(usages, len(usages.optimizer_step()))
    return replace(nodes, links=_links(usages, clock))


def _clock(usages: ProblemUsages, steps: int) -> Clock:
    return Clock(usages.lives, usages.passed_over, steps)


def without_reshards(usages: ProblemUsages) -> StepMemory:
    """The same without what reshards hold: less than there is, and known sooner."""
    steps = usages.optimizer_step()
    clock = _clock(usages, len(steps))
    holds = [_Holds() for _ in usages.built.problem.nodes]
    for usage in usages.usages():
        interval = clock.interval(usage.interval)
        holds[usage.node].add(usage.kind, usage.usages, interval, usage.times)
    for number, (index, workspace) in enumerate(steps.items()):
        holds[index].add("step", workspace, clock.moment(number), 1)
    return StepMemory(tuple(hold.held() for hold in holds), (), clock.end)


class _Holds:
    """Usages of one node by kind, with how often each interval occurs."""

    def __init__(self) -> None:
        self.usages: dict[Hashable, np.ndarray] = {}
        self.times: dict[Hashable, dict[Interval, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, kind: Hashable, usages: np.ndarray, interval: Interval, times: int) -> None:
        if interval[0] < interval[1]:
            self.usages[kind] = usages
            self.times[kind][interval] += times

    def held(self) -> tuple[tuple[Interval, np.ndarray], ...]:
        """One entry for each interval in which something is held."""
        total: dict[Interval, np.ndarray] = {}
        for kind, usages in self.usages.items():
            if usages.any():
                for interval, count in self.times[kind].items():
                    more = count * usages
                    total[interval] = total[interval] + more if interval in total else more
        return tuple(total.items())


@dataclass
class _Moves:
    """Reshards of one kind: what of them is held, and when.

    saved:
        whether each choice of the target keeps the copy for backward, where that differs
    """

    move: Move
    saved: np.ndarray | None = None
    times: dict[str, dict[Interval, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )

    def parts(self) -> list[Part]:
        found = []
        for what, times in self.times.items():
            nbytes = self._nbytes(what)
            targets = self.move.targets
            if what == "saved":
                # Strategies that do not keep the copy have a column of their own, of nothing.
                assert self.saved is not None
                targets = np.where(self.saved, targets, nbytes.shape[1])
                nbytes = np.hstack([nbytes, np.zeros((len(nbytes), 1))])
            if nbytes.any():
                copy = what in ("copy", "back", "saved")
                found.append(Part(copy, nbytes, self.move.sources, targets, dict(times)))
        return found

    def _nbytes(self, what: str) -> np.ndarray:
        parts: np.ndarray = getattr(self.move.memory, "copy" if what == "saved" else what)
        return parts * self.move.nbytes


def _links(usages: ProblemUsages, clock: Clock) -> tuple[Link, ...]:
    kinds: dict[Hashable, _Moves] = {}
    moves = dict(usages.moves())
    for move in moves.values():
        moved = kinds.setdefault(move.kind, _Moves(move))
        for at, what in (
            (move.at, "alone" if move.alone else "moment"),
            (move.back, "back_alone" if move.back_alone else "back_moment"),
        ):
            if at is not None:
                lo, hi = clock.interval((at, at + 1))
                if lo < hi:
                    moved.times[what][lo, hi] += move.times
    for copied in usages.lives.copied:
        move = moves[copied.slot]
        moved = kinds[move.kind]
        spans = [("back" if copied.grad else "copy", copied.interval)]
        saved = None if copied.grad else usages.saved(copied.slot)
        if saved is not None:
            moved.saved = saved
            (first, last), until = copied.interval, usages.lives.calls[copied.slot.name] + 1
            spans = [("copy", (first, min(until, last))), ("saved", (max(first, until), last))]
        for what, interval in spans:
            lo, hi = clock.interval(interval)
            if lo < hi:
                moved.times[what][lo, hi] += move.times
    between: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for moved in kinds.values():
        between[moved.move.source, moved.move.target] += moved.parts()
    return tuple(Link(u, v, tuple(parts)) for (u, v), parts in between.items() if parts)
