"""What a hinted model runs: its collectives as planned, as run in lockstep, and its numbers.

A collective is written ``Ran(kind, ranks in a group, elements)``. The elements are those of the
tensor the group works on (`communication.Collective`), so its bytes are eight times as many in
the double precision of these tests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autopar.compiler import Request, Traced, lower_plan, make_plan, trace_model
from autopar.ir.errors import HintError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.communication import Collective, collectives_of
from autopar.passes.device import COLLECTIVES, INTER, INTRA, Device, Link, Measure, bytes_moved
from autopar.plans import Plan
from autopar.report import Row
from autopar.runtime.counting import Sent, count_communication
from autopar.verification import Report, verify_plan

#: The eight devices of most rows, as axes that any split count of theirs is made of.
EIGHT = {"a": 2, "b": 2, "c": 2}

#: Mesh axes -> the bytes that one rank sends in collectives over them.
Traffic = Counter[tuple[str, ...]]

ITEMSIZE = torch.float64.itemsize

#: 1 GB/s, and the time of one byte to start: of plans that send the same bytes, the one of the
#: fewest collectives is the best.
_LINE_RATE = tuple((kind, (Measure(2, 1e-9, 1e9),)) for kind in COLLECTIVES)

#: A device on which only the bytes sent between ranks take time. At the sizes of these rows the
#: latency of a collective is all its cost on real devices; here the plan is the one that would be
#: chosen at sizes that matter.
BYTES_ONLY = Device(
    "bytes only",
    (("float32", 1e18), ("float64", 1e18)),
    memory_bandwidth=1e18,
    launch=0.0,
    devices_per_host=64,
    links=(Link(INTRA, _LINE_RATE), Link(INTER, _LINE_RATE)),
)


@dataclass(frozen=True, order=True)
class Ran:
    """One collective: its kind, the ranks in one group, and elements (see the module)."""

    kind: str
    group: int
    elements: int

    @property
    def moved(self) -> float:
        """Elements that one rank sends."""
        whole = self.elements * (self.group if self.kind == "all_to_all" else 1)
        return bytes_moved(self.kind, self.group) * whole


def all_reduce(group: int, *shape: int) -> Ran:
    return Ran("all_reduce", group, math.prod(shape))


def all_gather(group: int, *shape: int) -> Ran:
    """`shape` is the gathered one."""
    return Ran("all_gather", group, math.prod(shape))


def reduce_scatter(group: int, *shape: int) -> Ran:
    """`shape` is the one before."""
    return Ran("reduce_scatter", group, math.prod(shape))


def all_to_all(group: int, *shape: int) -> Ran:
    """`shape` is that of one rank's piece."""
    return Ran("all_to_all", group, math.prod(shape))


def moved(collectives: Iterable[Ran]) -> float:
    """Elements that one rank sends in all."""
    return sum(c.moved for c in collectives)


@dataclass(frozen=True)
class Outcome:
    """A plan with what it runs.

    forward, backward:
        its collectives, sorted
    """

    traced: Traced
    plan: Plan
    graph: Graph
    forward: list[Ran]
    backward: list[Ran]
    report: Report

    def strategies(self, op: str) -> list[str]:
        """The strategies of all calls of an operator (``"aten.linear"``), in MindSpore's form."""
        return [row.strategy for row in self.rows(op)]

    def rows(self, op: str) -> list[Row]:
        return [row for row in self.plan.rows if row.operator.rpartition(".")[0] == op]


def outcome(
    model: nn.Module,
    *args: torch.Tensor,
    mesh: Mapping[str, int] = EIGHT,
    mode: str = "semi_auto",
    hints: Mapping[str, Any] | None = None,
    device: Any = BYTES_ONLY,
    outputs: str = "sharded",
    kwargs: Mapping[str, Any] | None = None,
) -> Outcome:
    """Plan a model, run it on all ranks in lockstep, and check what must hold of every plan.

    The result equals the single device's, the hints hold, and the collectives that ran are the
    ones the plan says.
    """
    shape = Mesh.of(mesh)
    request = Request.make(shape, mode, hints, device, outputs)
    traced = trace_model(model, args, kwargs or {}, request)
    plan = make_plan(traced, request)
    graph = lower_plan(traced, plan, request)
    with count_communication(rank=0) as ran:
        report = verify_plan(model, args, kwargs or {}, traced, plan, request)
    report.raise_if_failed()
    assert_hints_hold(traced, plan)
    _assert_ran_as_planned(
        _traffic(ran.sent, shape),
        _traffic(collectives_of(graph, traced.rules, plan.assignment), shape),
    )
    # Each for itself, before parameters are put into buckets.
    single = pipeline.partitioned(traced.graph, plan.assignment, plan.device)
    planned = collectives_of(single, traced.rules, plan.assignment)
    return Outcome(
        traced,
        plan,
        graph,
        _as_ran([c for c in planned if not c.backward], shape),
        _as_ran([c for c in planned if c.backward], shape),
        report,
    )


def _as_ran(collectives: Sequence[Collective], mesh: Mesh) -> list[Ran]:
    return sorted(Ran(c.kind, mesh.axis_size(*c.axes), c.nbytes // ITEMSIZE) for c in collectives)


def assert_hints_hold(traced: Traced, plan: Plan) -> None:
    """Every strategy of a hinted operator is one that its hint admits."""
    mesh = plan.assignment.mesh
    for name, fix in traced.placed.fixes.items():
        strategy = plan.assignment.strategies[name]
        assert fix.admits(strategy, mesh), f"{traced.placed.hints[name]}: {fix}, got {strategy}"


def _traffic(collectives: Iterable[Collective | Sent], mesh: Mesh) -> Traffic:
    """The bytes that a rank sends over each group of axes."""
    found: Traffic = Counter()
    for c in collectives:
        whole = c.nbytes * (mesh.axis_size(*c.axes) if c.kind == "all_to_all" else 1)
        found[c.axes] += bytes_moved(c.kind, mesh.axis_size(*c.axes)) * whole
    return found


def _assert_ran_as_planned(ran: Traffic, planned: Traffic) -> None:
    """The kinds are not compared: an assisted operator may reach the same by others. A count that
    is shared may be wider than the tensors it is priced like.
    """
    assert dict(ran) == pytest.approx(dict(planned), abs=torch.int64.itemsize)


class Net(nn.Module):
    """A forward function of the model (for its parameters) and the inputs, as a module."""

    def __init__(self, function: Callable[..., Any], **parameters: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        for k, (name, shape) in enumerate(parameters.items()):
            setattr(self, name, nn.Parameter(randn(*shape, seed=k + 1)))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def refusal(model: nn.Module, *args: torch.Tensor, **options: Any) -> str:
    """The message of the HintError that planning the model must raise."""
    with pytest.raises(HintError) as caught:
        outcome(model, *args, **options)
    return str(caught.value)


def seconds(collectives: Iterable[Ran], device: Device) -> float:
    """The time of collectives within one host of a device, one after the other."""
    (link,) = (link for link in device.links if link.name == INTRA)
    measures = [(c, link.at(c.kind, c.group)) for c in collectives]
    return sum(m.latency + c.moved * ITEMSIZE / m.bandwidth for c, m in measures)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Fixed random numbers in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)
