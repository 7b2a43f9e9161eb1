"""The table that sets a plan beside the ones people write by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.mesh import Mesh

#: How the rows that are no baselines are called.
PLAN = "this plan"
FREE = "search without hints"


@dataclass(frozen=True)
class ComparisonRow:
    """One way to split the model; times are predictions in seconds for one step.

    seconds:
        forward and backward, with the optimizer's update
    compute, communication:
        what it is made of: operators and update, and collectives
    hidden:
        seconds of collectives besides, which run beside the backward pass
    ratio:
        `seconds` over the plan's
    """

    name: str
    seconds: float
    compute: float
    communication: float
    hidden: float
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """The plan, the search without hints, and every baseline, the fastest first.

    skipped:
        baseline -> why it does not exist for this model and mesh
    """

    mesh: Mesh
    device: str
    rows: tuple[ComparisonRow, ...]
    skipped: Mapping[str, str]

    def row(self, name: str) -> ComparisonRow:
        """A row by its name. Raises KeyError where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"comparison: no row {name!r}: the rows are {[r.name for r in self.rows]}")

    @property
    def best_baseline(self) -> ComparisonRow | None:
        """The fastest of the plans written by hand, None where none exists."""
        return next((row for row in self.rows if row.name not in (PLAN, FREE)), None)

    def __str__(self) -> str:
        head = ("plan", "step", "compute", "communication", "hidden", "ratio")
        cells = [head] + [
            (
                row.name,
                *(
                    f"{t * 1e3:.3f} ms"
                    for t in (row.seconds, row.compute, row.communication, row.hidden)
                ),
                f"{row.ratio:.2f}x",
            )
            for row in self.rows
        ]
        widths = [max(len(line[k]) for line in cells) for k in range(len(head))]
        lines = [f"predicted for {self.device} on mesh {self.mesh}"]
        for name, *numbers in cells:
            aligned = (text.rjust(w) for text, w in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *aligned]))
        lines.extend(f"not possible: {name}: {why}" for name, why in self.skipped.items())
        return "\n".join(lines)
