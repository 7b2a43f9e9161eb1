"""`autoparallelize` and `plan`: the two calls a user starts from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.compiler import Request, make_plan, resolve_plan, trace_model
from autopar.ir.errors import MeshError, PlanError
from autopar.ir.mesh import Mesh
from autopar.module import ParallelModule
from autopar.plan_reports import with_reports
from autopar.plans import Plan
from autopar.runtime.groups import RankContext

INPUTS = ("global", "local")


def autoparallelize(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | int | DeviceMesh | None = None,
    mode: str | None = None,
    hints: Mapping[str, Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    device: Any = None,
    inputs: str = "global",
    outputs: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adam",
) -> ParallelModule:
    """Split a single-device model over the ranks of a mesh.

    Every rank calls it with the same model (same weights) and arguments. The result is called as
    the model is and trains as the model does on one device.

    args, kwargs:
        an example call, with whole (global) inputs. Without one the module compiles at its first
        call, and its parameters cannot be asked for before that.
    mesh:
        a count, a dict ``{"dp": 2, "tp": 4}``, or a `DeviceMesh` with named dimensions; default:
        all ranks on one axis
    mode:
        ``"auto"``: search everything; ``"semi_auto"``: spread the hints, search the rest;
        ``"data_parallel"``; ``"stand_alone"``: no split. Default: semi-auto where there are
        hints, else auto.
    hints:
        module path or shell pattern -> strategy (see `shard`), beside those of `shard()`
    plan:
        a `Plan` or its file: used as it is, no search
    device:
        what to price the plan for: ``"h100"``, ``"a100"``, ``"h200"``, ``"cpu"`` (default), the
        path of a device file, or a `Device`
    inputs:
        ``"global"``: every rank passes the whole batch; ``"local"``: each rank passes the piece
        that ``plan.input_layouts`` says (this needs an example call)
    outputs:
        ``"full"``: whole on every rank; ``"sharded"``: as the plan has them (`DTensor`);
        ``"auto"``: sharded when the model also returns a scalar loss, else whole. Scalars are
        always plain tensors, equal on all ranks.
    memory, optimizer:
        the most one rank may hold during a training step (``"80GB"``, or bytes), counting the
        state of this optimizer: "none", "sgd", "momentum", "adam" or "adamw". The search keeps to
        it, or says what is missing (MemoryLimitError). A given `plan` is taken as it is.

    Raises MeshError, HintError, PlanError, TraceError or InputError before any communication
    where an argument is wrong, DesyncError where ranks disagree.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if inputs not in INPUTS:
        raise PlanError(f"inputs: expected one of {INPUTS}, got {inputs!r}")
    has_example = args is not None or kwargs is not None
    if inputs == "local" and not has_example:
        raise PlanError(
            "inputs='local': give an example call with the whole batch (args or kwargs), "
            "a local piece does not say how large it is"
        )
    _require_values(model)
    shape = _mesh_of(mesh)
    given = None if plan is None else resolve_plan(plan)
    if given is not None and given.mesh != shape:
        raise PlanError(f"plan: made for the mesh {given.mesh}, this run has {shape}")
    if given is not None:
        device, outputs = given.device if device is None else device, given.outputs
    request = Request.make(shape, mode, hints, device, outputs, memory, optimizer)
    # Whatever is wrong with model, inputs or hints shows here, before ranks communicate.
    traced = trace_model(model, *_call(args, kwargs), request) if has_example else None
    context = RankContext.from_process_group(
        shape,
        device_mesh=mesh if isinstance(mesh, DeviceMesh) else None,
        device_type=_device_type(model),
    )
    module = ParallelModule(model, request, context, inputs=inputs, plan=given)
    if traced is not None:
        module.compile_traced(traced)
    return module


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | int,
    mode: str | None = None,
    hints: Mapping[str, Any] | None = None,
    device: Any = None,
    outputs: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adam",
) -> Plan:
    """Make a plan without process group, devices or memory for the model (it may be on meta).

    Arguments and errors are those of `autoparallelize`; the mesh must be given.
    """
    request = Request.make(Mesh.of(mesh), mode, hints, device, outputs, memory, optimizer)
    traced = trace_model(model, *_call(args, kwargs), request)
    return with_reports(traced, make_plan(traced, request))


def _call(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return () if args is None else args, {} if kwargs is None else kwargs


def _require_values(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PlanError(
                f"{name!r} is on the meta device and has no values to train; autopar.plan() takes "
                "such a model, autoparallelize() needs it on a real device"
            )


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _mesh_of(mesh: Mesh | Mapping[str, int] | int | DeviceMesh | None) -> Mesh:
    """The shape of the mesh, checked against the number of processes."""
    world = _world_size()
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise MeshError("mesh: a DeviceMesh needs mesh_dim_names, they name the axes")
        return Mesh(tuple(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)))
    shape = Mesh.of(world if mesh is None else mesh)
    if shape.size != world:
        raise MeshError(
            f"mesh {shape}: it has {shape.size} ranks, but {world} "
            f"{'process is' if world == 1 else 'processes are'} running; "
            f"launch with torchrun --nproc-per-node {shape.size}, or give a mesh of {world}"
        )
    return shape


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")
