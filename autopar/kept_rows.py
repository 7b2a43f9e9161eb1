"""What a plan keeps for the backward pass, for reading: what it saves and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from autopar.ir.errors import PlanError
from autopar.passes.communication import format_bytes
from autopar.passes.keep_costs import Effect, Place

#: The most rows a printed plan shows.
SHOWN = 12

#: What a row of the optimizer's state has as its place, before the optimizer's name.
_STATE = "optimizer state"


@dataclass(frozen=True)
class KeptRow:
    """One policy in one place.

    place:
        the region, module or bucket it holds for
    policy:
        what is done, in the words of `memory_policy`
    saves:
        bytes that one rank does not hold between forward and backward, in this place
    host:
        bytes it holds in the host's memory instead
    seconds:
        predicted time it adds to a step
    collectives:
        those that run once more in the backward pass
    """

    place: str
    policy: str
    saves: int
    host: int
    seconds: float
    collectives: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(data: Any) -> KeptRow:
        """The inverse of `to_json`. Raises PlanError where a field is missing or malformed."""
        fits = isinstance(data, dict) and set(data) == {f.name for f in fields(KeptRow)}
        if fits:
            texts = [data["place"], data["policy"]]
            numbers = [data["saves"], data["host"], data["seconds"]]
            again = data["collectives"]
            fits = isinstance(again, list) and all(isinstance(t, str) for t in [*texts, *again])
            fits = fits and all(
                isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers
            )
        if not fits:
            raise PlanError(f"the field 'kept' has a malformed entry: got {data!r}"[:200])
        return KeptRow(**{**data, "collectives": tuple(data["collectives"])})

    def __str__(self) -> str:
        host = f" ({format_bytes(self.host)} on the host)" if self.host else ""
        counted = Counter(self.collectives)
        runs = [run if n == 1 else f"{n} x {run}" for run, n in counted.items()]
        again = f", runs again {', '.join(runs)}" if runs else ""
        return (
            f"{self.policy} {self.place}: saves {format_bytes(self.saves)}{host}, "
            f"costs {self.seconds * 1e6:.1f} us{again}"
        )


def make_kept_rows(effects: Mapping[Place, Effect]) -> tuple[KeptRow, ...]:
    """One row per policy and place."""
    rows = []
    for (policy, place), effect in effects.items():
        again = tuple(map(str, effect.collectives))
        rows.append(KeptRow(place, policy, effect.saves, effect.host, effect.seconds, again))
    return tuple(rows)


def state_row(effect: Effect, optimizer: str) -> KeptRow:
    """The row of optimizer state that is in the host's memory."""
    place = f"{_STATE} ({optimizer})"
    return KeptRow(place, "offload", effect.saves, effect.host, effect.seconds)


def format_kept(rows: Sequence[KeptRow]) -> list[str]:
    """The lines of a printed plan; of many rows the largest, and the sum."""
    states = [row for row in rows if row.place.startswith(_STATE)]
    if states:
        others = [row for row in rows if row not in states]
        return [*format_kept(others), *(f"between steps: {row}" for row in states)]
    if not rows:
        return []
    saves, seconds = sum(r.saves for r in rows), sum(r.seconds for r in rows)
    lines = [
        f"kept for backward: policies save {format_bytes(saves)} on each rank and add "
        f"{seconds * 1e3:.3f} ms per step"
    ]
    ranked = sorted(rows, key=lambda r: -r.saves)[:SHOWN]
    lines += [f"  {row}" for row in rows if row in ranked]
    if len(rows) > SHOWN:
        lines.append(f"  and {len(rows) - SHOWN} more")
    return lines
