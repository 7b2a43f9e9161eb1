"""The rows of a plan as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.layout import Layout
from autopar.ir.rule import Rule, Strategy
from autopar.passes.assignment import Assignment
from autopar.passes.choices import layouts_of
from autopar.passes.communication import Collective, collectives_of
from autopar.passes.prices import DevicePrices

#: The fields of a row that hold several texts.
_LISTS = ("inputs", "outputs", "forward", "backward")


#: Where `collectives_of` puts what runs for the results of the graph.
RETURN = "return"


@dataclass(frozen=True)
class Row:
    """One operator of a plan.

    strategy:
        MindSpore's form: one tuple of split counts per tensor operand
    inputs, outputs:
        the layouts behind it, one text per operand and result
    forward, backward:
        the collectives run for it, each with its bytes
    seconds:
        predicted compute time on one rank, forward and backward, without the collectives
    chosen_by:
        the hint that decided, or "search"; per mesh axis where they differ
    """

    name: str
    operator: str
    module: str
    strategy: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    seconds: float
    chosen_by: str

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(data: Any) -> Row:
        """The inverse of `to_json`. Raises PlanError where a field is missing or malformed."""
        if not isinstance(data, dict) or set(data) != {f.name for f in fields(Row)}:
            raise PlanError(f"the field 'rows' has a malformed entry: got {data!r}"[:200])
        for name, value in data.items():
            if name == "seconds":
                fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            elif name in _LISTS:
                fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
            else:
                fits = isinstance(value, str)
            if not fits:
                raise PlanError(f"the field 'rows.{name}' has the wrong type: got {value!r}"[:200])
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return Row(**values)


def make_rows(
    graph: Graph,
    partitioned: Graph,
    rules: Mapping[str, Rule],
    assignment: Assignment,
    prices: DevicePrices,
    returned_by: str,
) -> tuple[Row, ...]:
    """One row per call of the (unpartitioned) graph, and one for the results where it takes
    collectives to bring them to the layouts they are returned in.

    returned_by:
        who chose those layouts
    """
    run_for: dict[str, list[Collective]] = {}
    for collective in collectives_of(partitioned, rules, assignment):
        run_for.setdefault(collective.at, []).append(collective)
    rows = []
    for node in graph.calls:
        rule, strategy = rules[node.name], assignment.strategies[node.name]
        layouts = layouts_of(node, rule, strategy, assignment.mesh)
        split = len(node.operands)
        mine = run_for.get(node.name, [])
        rows.append(
            Row(
                name=node.name,
                operator=node.op,
                module=node.origin.module,
                strategy=strategy_text(node, rule, layouts[:split], assignment),
                inputs=tuple(map(str, layouts[:split])),
                outputs=tuple(map(str, layouts[split:])),
                forward=tuple(str(c) for c in mine if not c.backward),
                backward=tuple(str(c) for c in mine if c.backward),
                seconds=float(prices.strategies(node, rule, [strategy])[0]),
                chosen_by=_chosen_by(strategy, assignment.reasons.get(node.name, {})),
            )
        )
    if RETURN in run_for:
        rows.append(
            Row(
                name=RETURN,
                operator=RETURN,
                module="",
                strategy="",
                inputs=(),
                outputs=tuple(str(layout) for layout in assignment.outputs if layout is not None),
                forward=tuple(str(c) for c in run_for[RETURN] if not c.backward),
                backward=tuple(str(c) for c in run_for[RETURN] if c.backward),
                seconds=0.0,
                chosen_by=returned_by,
            )
        )
    return tuple(rows)


def strategy_text(node: Node, rule: Rule, layouts: Sequence[Layout], assignment: Assignment) -> str:
    """The strategy in MindSpore's form, operands in the order hints list them."""
    order = rule.hint_order or range(len(node.operands))
    counts = [layouts[i].counts(assignment.mesh) for i in order]
    return str(tuple(counts)) if counts else "()"


def _chosen_by(strategy: Strategy, reasons: Mapping[str, str]) -> str:
    distinct = dict.fromkeys(reasons.values())
    if len(distinct) <= 1:
        return next(iter(distinct), "search")
    return "; ".join(f"{axis}: {reasons[axis]}" for axis, _ in strategy.roles if axis in reasons)


_COLUMNS = ("operator", "module", "strategy", "result", "forward", "backward", "time", "chosen by")


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a table of fixed-width columns."""
    cells = [_COLUMNS] + [
        (
            row.operator.removesuffix(".default"),
            row.module,
            row.strategy,
            " ".join(row.outputs),
            ", ".join(row.forward),
            ", ".join(row.backward),
            f"{row.seconds * 1e6:.1f} us",
            row.chosen_by,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
