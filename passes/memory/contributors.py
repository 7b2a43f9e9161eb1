"""What is in use at the peak of a step, by module and kind, and what would make it less."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.passes.communication import format_bytes
from autopar.passes.memory.timeline import Held, Timeline

#: The share of a peak above which a kind of memory is worth naming.
_MUCH = 0.15


@dataclass(frozen=True)
class Contributor:
    """What one module holds of one kind at the peak.

    module:
        its path ("" is the model itself)
    tensors:
        how many pieces of memory these are
    largest:
        the name of the largest of them
    """

    module: str
    kind: str
    nbytes: int
    tensors: int
    largest: str

    def __str__(self) -> str:
        count = "" if self.tensors == 1 else f" in {self.tensors} tensors, the largest"
        return (
            f"{format_bytes(self.nbytes)} {self.kind} of "
            f"{self.module or 'the model itself'}:{count} {self.largest}"
        )


def contributors(timeline: Timeline) -> tuple[Contributor, ...]:
    """What is in use at the peak by module and kind, the largest first."""
    groups: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for item in timeline.at_peak:
        groups[item.module, item.kind].append(item)
    found = [
        Contributor(module, kind, sum(i.nbytes for i in items), len(items), items[0].name)
        for (module, kind), items in groups.items()
    ]
    return tuple(sorted(found, key=lambda c: (-c.nbytes, c.module, c.kind)))


def remedies(timeline: Timeline, optimizer: str) -> str:
    """What would help most against a peak, in words."""
    kinds, peak = timeline.kinds_at_peak, max(timeline.peak, 1)
    found = []
    state = kinds["optimizer"]
    if state > _MUCH * peak:
        found.append(
            f"an optimizer with less state (optimizer={optimizer!r} keeps {format_bytes(state)})"
        )
    activations = kinds["activations"]
    if activations > _MUCH * peak:
        found.append(
            f"a smaller batch or activations that are computed again in the backward pass "
            f"({format_bytes(activations)} are kept)"
        )
    return ", ".join([*found, "more ranks"])
