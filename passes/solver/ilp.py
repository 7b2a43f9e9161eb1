"""The assignment problem as an integer linear program.

One variable per option; per edge one *continuous* variable for every allowed pair of layout
classes, tied to the options by *equality* marginals: a transportation problem per edge, whose
relaxation is nearly always integral. A forbidden pair has no variable at all.

Memory enters by one binary per node and *amount* of memory, and by rows over these for the live
sets that a solution exceeds. Once the amounts are decided the rest is nearly always integral
again, so only they are branched on; options become binary when that is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .clock import Clock
from .layout import Layout
from .matrix_model import MatrixModel

# A value this close to 0 or 1 is integral; HiGHS's own feasibility tolerance is 1e-6.
_INTEGRAL = 1e-5
# Most memory rows to add per round, the most exceeded first.
_ROWS_PER_ROUND = 16
# So few live sets all get their row at once: every round costs an integer search.
_FEW_SETS = 256


@dataclass(frozen=True, eq=False)
class Answer:
    """What the program of a layout gave.

    Attributes:
        choice: the best assignment found, int [nodes], or None.
        bound: lower bound on every assignment that uses the program's pairs only.
        solved: whether ``choice`` is proven best, or proven not to exist.
        multipliers: memory prices of the linear relaxation, float64 [T]; None without one.
    """

    choice: np.ndarray | None
    bound: float
    solved: bool
    multipliers: np.ndarray | None = None


def solve(
    layout: Layout,
    allowed: np.ndarray,
    sets: set[int],
    clock: Clock,
    seconds: float,
    *,
    elastic: bool = False,
    slack: float = 0.0,
) -> Answer:
    """The best assignment that uses only ``allowed`` pairs, within the memory limit.

    Args:
        layout: the nodes and links.
        allowed: bool [pairs]; pairs of infinite cost must not be in it.
        sets: live sets whose memory rows the program starts with; it adds those it needs.
        clock: tells how much time there is in all.
        seconds: the most time to take here.
        elastic: the limit may be exceeded, and every unit of memory above it costs 1.
        slack: how much dearer than its bound the assignment may be.
    """
    until = min(clock.elapsed() + seconds, clock.elapsed() + clock.left())
    program = _Program(layout, allowed, elastic)
    if layout.memory is not None and len(layout.memory.live.room) <= _FEW_SETS:
        sets = set(range(len(layout.memory.live.room)))
    program.limit(sorted(sets))
    binary = _Binary.NONE
    multipliers: np.ndarray | None = None
    bound = -np.inf
    while True:
        left = until - clock.elapsed()
        if left <= 0:
            return Answer(None, bound, False, multipliers)
        outcome = program.model.solve(left, program.binaries(binary), slack)
        if outcome.infeasible:
            return Answer(None, np.inf, True, multipliers)
        bound = max(bound, outcome.bound + layout.network.constant)
        if outcome.values is None:
            return Answer(None, bound, False, multipliers)
        if binary == _Binary.NONE and outcome.duals is not None:
            multipliers = program.multipliers(outcome.duals)
        values = outcome.values[: len(layout.costs)]
        over = program.exceeded(outcome.values)
        if over:
            sets.update(over)
            program.limit(over)
            continue
        choice = program.rounded(values)
        integral = bool((np.minimum(values, 1 - values) < _INTEGRAL).all())
        usable = np.isfinite(layout.cost(choice)) and (elastic or layout.over(choice) <= 0)
        if integral and usable:
            return Answer(choice, bound, outcome.optimal, multipliers)
        if not outcome.optimal or binary == _Binary.ALL:
            return Answer(choice if usable else None, bound, False, multipliers)
        amounts_open = binary == _Binary.NONE and program.has_amounts()
        binary = _Binary.AMOUNTS if amounts_open else _Binary.ALL


class _Binary:
    """Which variables are binary."""

    NONE, AMOUNTS, ALL = range(3)


@dataclass(eq=False)
class _Program:
    """The rows and columns for a layout; options come first."""

    layout: Layout
    allowed: np.ndarray
    elastic: bool
    model: MatrixModel = field(default_factory=MatrixModel)

    def __post_init__(self) -> None:
        layout, model = self.layout, self.model
        possible = np.isfinite(layout.costs)
        options = np.arange(len(layout.costs))
        model.add_columns(np.where(possible, layout.costs, 0.0), np.where(possible, 1.0, 0.0))
        one = model.add_rows(np.ones(len(layout.nodes)), np.ones(len(layout.nodes)))
        model.add_entries(one + layout.owner, options, 1.0)
        pair = np.flatnonzero(self.allowed)
        columns = model.add_columns(layout.pair_costs[pair], np.inf) + np.arange(len(pair))
        edge = np.searchsorted(layout.pair_offset, pair, side="right") - 1
        row, column = np.divmod(pair - layout.pair_offset[edge], layout.shape[edge, 1])
        zeros = np.zeros(layout.slot_count)
        marginal = model.add_rows(zeros, zeros)
        model.add_entries(marginal + layout.slots[edge, 0] + row, columns, 1.0)
        model.add_entries(marginal + layout.slots[edge, 1] + column, columns, 1.0)
        for ends in layout.all_ends:
            model.add_entries(marginal + ends.slot[ends.of_entry], ends.option, -1.0)
        # Per node: the column of every class of options that hold the same all the time.
        self._amounts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._rows: dict[int, tuple[int, float]] = {}  # live set -> (row, unit of memory)
        # The column of the memory above the limit, and its unit.
        self._over, self._over_unit = 0, 1.0
        if self.elastic and layout.memory is not None:
            self._over_unit = float(layout.memory.scale.max(initial=1.0))
            self._over = model.add_columns(np.array([self._over_unit]), np.inf)

    def has_amounts(self) -> bool:
        return bool(self._amounts)

    def binaries(self, which: int) -> np.ndarray:
        """Bool per column: the ones that must be 0 or 1."""
        integer = np.zeros(self.model.columns, dtype=bool)
        if which != _Binary.NONE:
            for columns, _ in self._amounts.values():
                integer[columns] = True
        if which == _Binary.ALL:
            integer[: len(self.layout.costs)] = True
        return integer

    def limit(self, sets: list[int]) -> None:
        """Adds the memory rows of the given live sets."""
        memory = self.layout.memory
        if memory is None:
            return
        for index in sets:
            if index in self._rows:
                continue
            spans = memory.in_set(index)
            # Memory counts in parts of the largest number, so that rows of all sizes are alike.
            room = float(memory.live.room[index])
            unit = max(room, float(memory.scale[spans].max(initial=0.0)))
            row = self.model.add_rows(np.array([-np.inf]), np.array([room / unit]))
            for span in spans.tolist():
                columns, option = self._amount_columns(int(memory.owner[memory.shape[span]]))
                amounts = memory.usages(span)[option]
                held = np.flatnonzero(amounts > 0)
                self.model.add_entries(np.full(len(held), row), columns[held], amounts[held] / unit)
            if self.elastic:
                self.model.add_entries(
                    np.array([row]), np.array([self._over]), -self._over_unit / unit
                )
            self._rows[index] = (row, unit)

    def _amount_columns(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """The columns of a node's classes of options, and an option of every class."""
        found = self._amounts.get(position)
        if found is None:
            layout, model = self.layout, self.model
            assert layout.memory is not None
            options = np.arange(layout.offset[position], layout.offset[position + 1])
            of_option = layout.memory.amounts(position)
            _, first = np.unique(of_option, return_index=True)
            columns = model.add_columns(np.zeros(len(first)), 1.0) + np.arange(len(first))
            rows = model.add_rows(np.zeros(len(first)), np.zeros(len(first)))
            model.add_entries(rows + np.arange(len(first)), columns, -1.0)
            model.add_entries(rows + of_option, options, 1.0)
            found = self._amounts[position] = (columns, first)
        return found

    def multipliers(self, duals: np.ndarray) -> np.ndarray:
        """The prices of memory in a linear relaxation, float64 [T]."""
        memory = self.layout.memory
        if memory is None:
            return np.zeros(0)
        prices = np.zeros(len(memory.live.room))
        for index, (row, unit) in self._rows.items():
            prices[index] = max(0.0, -duals[row]) / unit
        return prices

    def exceeded(self, values: np.ndarray) -> list[int]:
        """Live sets without a row yet that a solution exceeds, worst first."""
        memory = self.layout.memory
        if memory is None:
            return []
        held = memory.profile(memory.mean_parts(values))
        if self.elastic:
            held -= values[self._over] * self._over_unit
        excess = held / np.maximum(memory.live.room, 1e-9) - 1.0
        worst = np.argsort(-excess, kind="stable")
        over = [int(index) for index in worst if excess[index] > 1e-6]
        return [index for index in over if index not in self._rows][:_ROWS_PER_ROUND]

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """The option with the largest value at every node; ties go to the lowest."""
        layout = self.layout
        sizes = np.diff(layout.offset)
        most = np.repeat(np.maximum.reduceat(values, layout.offset[:-1]), sizes)
        hits = np.flatnonzero(values >= most)
        positions, first = np.unique(layout.owner[hits], return_index=True)
        choice: np.ndarray = hits[first] - layout.offset[positions]
        return choice
