"""A linear model as arrays, solved by HiGHS through OR-Tools MathOpt.

Models here have up to millions of terms, so they are handed over as one sparse matrix.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

# Costs are scaled so that the largest is between these: HiGHS's tolerances are absolute.
_LEAST_COST, _LARGEST_COST = 1e4, 1e6


@dataclass(frozen=True, eq=False)
class Outcome:
    """What HiGHS found.

    Attributes:
        values: one value per variable, or None when it found no solution.
        bound: HiGHS's lower bound on the objective; ``-inf`` when it has none.
        optimal: whether it stopped because it was done.
        infeasible: whether it proved that no solution exists.
        duals: one per row, for a model without integers.
    """

    values: np.ndarray | None
    bound: float
    optimal: bool
    infeasible: bool
    duals: np.ndarray | None


@dataclass(eq=False)
class MatrixModel:
    """Variables and rows, collected in blocks of arrays."""

    columns: int = 0
    rows: int = 0
    _objective: list[np.ndarray] = field(default_factory=list)
    _upper: list[np.ndarray] = field(default_factory=list)
    _row_lower: list[np.ndarray] = field(default_factory=list)
    _row_upper: list[np.ndarray] = field(default_factory=list)
    _entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def add_columns(self, costs: np.ndarray, upper: float | np.ndarray) -> int:
        """Adds variables in [0, upper] and returns the index of the first."""
        first = self.columns
        self._objective.append(costs)
        self._upper.append(np.broadcast_to(upper, costs.shape))
        self.columns += len(costs)
        return first

    def add_rows(self, lower: np.ndarray, upper: np.ndarray) -> int:
        """Adds empty rows with the given bounds and returns the index of the first."""
        first = self.rows
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        self.rows += len(lower)
        return first

    def add_entries(self, rows: np.ndarray, columns: np.ndarray, value: float | np.ndarray) -> None:
        """Adds coefficients; a (row, column) pair may be given once only."""
        self._entries.append((rows, columns, np.broadcast_to(value, rows.shape)))

    def solve(self, seconds: float, integer: np.ndarray, slack: float = 0.0) -> Outcome:
        """Minimises within ``seconds``, up to ``slack``.

        ``integer`` says per variable whether it must be whole.
        """
        objective = np.concatenate(self._objective)
        largest = float(np.abs(objective).max(initial=0.0))
        scale = largest / np.clip(largest, _LEAST_COST, _LARGEST_COST) if largest else 1.0
        model = mathopt.Model.from_model_proto(self._proto(objective / scale, integer))
        parameters = mathopt.SolveParameters(
            random_seed=1, relative_gap_tolerance=0.0, absolute_gap_tolerance=slack / scale
        )
        if np.isfinite(seconds):
            parameters.time_limit = datetime.timedelta(seconds=max(seconds, 0.01))
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        termination, reason = result.termination, mathopt.TerminationReason
        infeasible = termination.reason in (reason.INFEASIBLE, reason.INFEASIBLE_OR_UNBOUNDED)
        optimal = termination.reason == reason.OPTIMAL
        bound = termination.objective_bounds.dual_bound * scale
        if not result.has_primal_feasible_solution():
            return Outcome(None, bound, optimal, infeasible, None)
        values = np.array(result.variable_values(list(model.variables())))
        duals = None
        if result.has_dual_feasible_solution() and not integer.any():
            duals = scale * np.array(result.dual_values(list(model.linear_constraints())))
        return Outcome(values, bound, optimal, infeasible, duals)

    def _proto(self, objective: np.ndarray, integer: np.ndarray) -> model_pb2.ModelProto:
        proto = model_pb2.ModelProto()
        variables = proto.variables
        variables.ids.extend(range(self.columns))
        variables.lower_bounds.extend([0.0] * self.columns)
        variables.upper_bounds.extend(np.concatenate(self._upper).tolist())
        variables.integers.extend(integer.tolist())
        priced = np.flatnonzero(objective)
        proto.objective.linear_coefficients.ids.extend(priced.tolist())
        proto.objective.linear_coefficients.values.extend(objective[priced].tolist())
        constraints = proto.linear_constraints
        constraints.ids.extend(range(self.rows))
        constraints.lower_bounds.extend(np.concatenate(self._row_lower).tolist())
        constraints.upper_bounds.extend(np.concatenate(self._row_upper).tolist())
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        order = np.lexsort((columns, rows))
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(rows[order].tolist())
        matrix.column_ids.extend(columns[order].tolist())
        matrix.coefficients.extend(values[order].tolist())
        return proto
