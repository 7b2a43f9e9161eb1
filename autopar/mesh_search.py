"""Which mesh to lay over the devices at hand: every candidate is planned, the best one kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.compiler import Request, make_plan, place_program, trace_program
from autopar.ir.errors import AutoparError, MeshError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.trace import Program
from autopar.mesh_table import MeshOption, format_meshes
from autopar.mixed import MixedPrecision
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

    @property
    def table(self) -> tuple[MeshOption, ...]:
        """What each candidate costs, without the plans."""
        return tuple(
            MeshOption.of(c.mesh, self.device, c.plan.seconds if c.plan else None, c.reason)
            for c in self.candidates
        )

    def __str__(self) -> str:
        head = f"meshes of {self.topology}, predicted for {self.device.name}"
        return f"{head}\n{format_meshes(self.table)}"


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
    memory: int | str | None = None,
    optimizer: str = "adam",
    mixed_precision: str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
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
    placed = topology.place(described)
    mixed = MixedPrecision.make(mixed_precision, reduce_dtype)
    program = trace_program(model, args, {} if kwargs is None else kwargs, mixed)

    def request_for(mesh: Mesh) -> Request:
        return Request.make(mesh, mode, hints, placed, outputs, memory, optimizer, mixed=mixed)

    return search_program(model, program, topology, request_for, max_axes=max_axes, names=names)


def search_program(
    model: nn.Module,
    program: Program,
    topology: Topology,
    request_for: Callable[[Mesh], Request],
    *,
    max_axes: int = 3,
    names: Sequence[str] = AXIS_NAMES,
) -> MeshSearch:
    """`search_meshes` for a model that is traced already.

    request_for:
        what is asked of the plan on a mesh, for the device as it stands in the topology
    """
    meshes = candidate_meshes(topology, max_axes=max_axes, names=names)
    requests = [request_for(mesh) for mesh in meshes]
    candidates = [_try(model, program, request) for request in requests]
    planned = [c for c in candidates if c.plan is not None]
    if not planned:
        reasons = "; ".join(f"{c.mesh}: {c.reason}" for c in candidates)
        raise PlanError(f"devices: no mesh of {topology} has a plan: {reasons}")
    fastest = min(map(_seconds, planned))
    best = next(c for c in planned if _seconds(c) <= fastest * (1 + SAME))
    # The sort is stable: of equal ones the first, with the fewest axes, stays in front.
    ranked = sorted(candidates, key=lambda c: (c is not best, _seconds(c)))
    return MeshSearch(topology, requests[0].device, tuple(ranked))


def on_topology(
    mesh: Mesh | Mapping[str, int] | int | None, topology: Any, device: Any
) -> tuple[Mesh | None, Device]:
    """The mesh that is asked for on a topology, None where it is to be chosen; and the device as
    it stands there.

    mesh:
        a count, or None for all devices: the mesh is to be chosen; or a mesh that is given

    Raises MeshError where it is no topology, or the mesh has another number of ranks.
    """
    if not isinstance(topology, Topology):
        raise MeshError(
            f"topology: expected an autopar.Topology, got {type(topology).__name__} {topology!r}"
        )
    placed = topology.place(device_for(device or "cpu", Mesh.of(1)))
    given = None if mesh is None else Mesh.of(mesh)
    if given is not None and given.size != topology.size:
        raise MeshError(
            f"mesh {given}: it has {given.size} ranks, but the topology has {topology.size} "
            f"devices ({topology}); give a mesh of {topology.size}, or hosts that hold "
            f"{given.size} devices together"
        )
    return (None if mesh is None or isinstance(mesh, int) else given), placed


def _seconds(candidate: Candidate) -> float:
    return math.inf if candidate.plan is None else candidate.plan.seconds


def _try(model: nn.Module, program: Program, request: Request) -> Candidate:
    try:
        plan = make_plan(place_program(program, model, request), request)
        return Candidate(request.mesh, plan)
    except (AutoparError, InfeasibleError) as error:
        return Candidate(request.mesh, None, str(error))
