"""Which mesh to lay over the devices at hand: every candidate is planned, the best one kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.compiler import Request, make_plan, place_program, trace_program
from autopar.ir.errors import AutoparError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.trace import Program
from autopar.passes.device import Device, device_for
from autopar.passes.solver import InfeasibleError
from autopar.passes.topology import AXIS_NAMES, Topology, candidate_meshes
from autopar.plans import Plan

#: Predicted times closer than this fraction are the same; the mesh with fewer axes is preferred.
SAME = 1e-6


@dataclass(frozen=True)
class Candidate:
    """One mesh that was tried.

    plan:
        the best plan on it, None where there is none
    reason:
        why there is none
    """

    mesh: Mesh
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True)
class MeshSearch:
    """Every mesh that fits the devices, with its predicted time.

    ``autoparallelize(model, …, mesh=found.mesh, plan=found.plan)`` runs the best one.

    topology:
        where the devices stand
    device:
        the device as it stands there, for which the plans are priced
    candidates:
        the fastest first, then those without a plan
    """

    topology: Topology
    device: Device
    candidates: tuple[Candidate, ...]

    @property
    def plan(self) -> Plan:
        """The best plan."""
        plan = self.candidates[0].plan
        assert plan is not None
        return plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the best plan."""
        return self.candidates[0].mesh

    def __str__(self) -> str:
        names = [str(candidate.mesh) for candidate in self.candidates]
        width = max(map(len, names))
        lines = [f"meshes of {self.topology}, predicted for {self.device.name}"]
        for name, candidate in zip(names, self.candidates, strict=True):
            plan = candidate.plan
            what = candidate.reason if plan is None else f"{plan.seconds * 1e3:10.3f} ms per step"
            lines.append(f"{name.ljust(width)}  {what}")
        return "\n".join(lines)


def search_meshes(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int | Topology,
    device: Any = None,
    mode: str | None = None,
    hints: Mapping[str, Any] | None = None,
    outputs: str = "auto",
    max_axes: int = 3,
    names: Sequence[str] = AXIS_NAMES,
) -> MeshSearch:
    """Plan a model on every mesh that fits the devices. The model is traced once.

    devices:
        how many there are (they fill hosts of the device's kind, see `Topology.of`), or a
        `Topology`
    max_axes:
        the largest number of mesh axes to try
    names:
        what the axes are called, outermost first. Hints that name an axis hold on the meshes that
        have it; the others have no plan.

    The other arguments are those of `autopar.plan`; nothing is run and no process group needed.

    Raises MeshError where the devices do not fit the hosts, PlanError where no mesh has a plan,
    with the reasons.
    """
    described = device_for(device or "cpu", Mesh.of(1))
    topology = Topology.of(devices, described)
    placed_device = topology.place(described)
    meshes = candidate_meshes(topology, max_axes=max_axes, names=names)

    def request_for(mesh: Mesh) -> Request:
        return Request.make(mesh, mode, hints, placed_device, outputs)

    program = trace_program(model, args, {} if kwargs is None else kwargs)
    candidates = [_try(model, program, request_for(mesh)) for mesh in meshes]
    planned = [c for c in candidates if c.plan is not None]
    if not planned:
        reasons = "; ".join(f"{c.mesh}: {c.reason}" for c in candidates)
        raise PlanError(f"devices: no mesh of {topology} has a plan: {reasons}")
    fastest = min(map(_seconds, planned))
    best = next(c for c in planned if _seconds(c) <= fastest * (1 + SAME))
    # The sort is stable: of equal ones the first, with the fewest axes, stays in front.
    ranked = sorted(candidates, key=lambda c: (c is not best, _seconds(c)))
    return MeshSearch(topology, placed_device, tuple(ranked))


def _seconds(candidate: Candidate) -> float:
    return math.inf if candidate.plan is None else candidate.plan.seconds


def _try(model: nn.Module, program: Program, request: Request) -> Candidate:
    try:
        plan = make_plan(place_program(program, model, request), request)
        return Candidate(request.mesh, plan)
    except (AutoparError, InfeasibleError) as error:
        return Candidate(request.mesh, None, str(error))
