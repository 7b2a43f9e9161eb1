"""`autoparallelize` and `plan`: the two calls a user starts from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import agreement
from autopar.compiler import (
    Request,
    Traced,
    make_plan,
    place_program,
    resolve_plan,
    trace_model,
    trace_program,
)
from autopar.ir.errors import MeshError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.trace_export import model_device
from autopar.launch import compute_device, world_size
from autopar.mesh_search import on_topology, search_program
from autopar.mixed import MixedPrecision, given_with_plan
from autopar.module import CallOptions, ParallelModule
from autopar.passes.policies import Given
from autopar.passes.topology import Topology
from autopar.plan_check import check_mesh
from autopar.plan_reports import with_reports
from autopar.plans import Plan
from autopar.runtime.groups import RankContext
from autopar.skeleton import traceable

INPUTS = ("global", "local")
SHAPES = ("recompile", "error")
CHECKS = ("first", "every")


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
    topology: Topology | None = None,
    inputs: str = "global",
    outputs: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adam",
    memory_policy: Given = None,
    zero: int = 0,
    offload_optimizer: bool = False,
    mixed_precision: str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    share_blocks: bool = True,
    shapes: str = "recompile",
    check: str = "first",
    exact_rng: bool = False,
) -> ParallelModule:
    """Split a single-device model over the ranks of a mesh.

    Every rank calls it with the same model (same weights) and arguments. The result is called as
    the model is and trains as the model does on one device. The model is left as it is, and not
    referred to any longer once its pieces are made. It may be on the meta device: each rank then
    allocates its pieces only, to be filled by `load_pretrained`, `load_checkpoint` or `initialise`.

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
    topology:
        where the ranks stand: hosts of so many devices, and their links. With a count of ranks
        (or none) as the mesh, every mesh of up to three axes is planned and the best one used
        (this needs an example call); `plan.meshes` lists them
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
    memory_policy:
        what is kept for the backward pass: "keep", "recompute" (block by block),
        "recompute:sqrt", "recompute:<number of blocks>", "offload", "compress" or "compress8", or
        a dict of such by module path pattern, of which the last that matches counts. With
        "+regather" gathered parameters are gathered again. "auto": what fits `memory` at the least
        predicted time, plan and policy together. Default: keep, but for what the model checkpoints
        itself. A given `plan` brings its own.
    zero:
        1, 2 or 3: store parameters, their gradients and optimizer state in shards over the data
        axes of the plan; 3: gather parameters again in the backward pass instead of keeping the
        gathered copies. A given `plan` is taken as it is.
    offload_optimizer:
        keep the optimizer's state in the host's memory between steps; each step brings it to the
        device, a part at a time. A given `plan` brings its own.
    mixed_precision:
        "bf16" or "fp16": the model computes as under `torch.autocast` of that dtype, whatever the
        device: products in the low dtype, what needs it in float32. Parameters, their gradients
        and the optimizer's state stay as they are; a parameter is cast before it is gathered. For
        "fp16" see `GradScaler`. A given `plan` brings its own.
    reduce_dtype:
        the dtype in which gradients of parameters that are cast are summed over ranks:
        torch.float32 (default) or the low one
    share_blocks:
        whether equal blocks of the model, such as the layers of a transformer, share their
        decisions, so that they are searched once. Without, every block may be split another way;
        planning takes longer with every one.
    shapes:
        what a call unlike those before it does (other shapes or dtypes, other arguments, labels
        given or not): ``"recompile"``: a graph is made for it, and kept, on the same parameters;
        ``"error"``: InputError, one kind of call for training and one for evaluation
    check:
        when ranks compare their calls, for DesyncError instead of a hang where they differ:
        ``"first"``: where the kind of call is another than at the call before; ``"every"``: at
        every call (two small messages)
    exact_rng:
        dropout and the like draw bit for bit what the model draws on one device after the same
        `torch.manual_seed`, whatever the plan. Each rank draws for the whole tensor, in the order
        of its indices; PyTorch fills a transposed tensor in the order of its memory, and draws
        alike under `autopar.runtime.row_major.RowMajorDraws`.

    Raises MeshError, HintError, PlanError, TraceError or InputError before any communication
    where an argument is wrong, DesyncError where ranks disagree.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if inputs not in INPUTS:
        raise PlanError(f"inputs: expected one of {INPUTS}, got {inputs!r}")
    for name, value, allowed in (("shapes", shapes, SHAPES), ("check", check, CHECKS)):
        if value not in allowed:
            raise PlanError(f"{name}: expected one of {allowed}, got {value!r}")
    has_example = args is not None or kwargs is not None
    if inputs == "local" and not has_example:
        raise PlanError(
            "inputs='local': give an example call with the whole batch (args or kwargs), "
            "a local piece does not say how large it is"
        )
    mixed = MixedPrecision.make(mixed_precision, reduce_dtype)
    home = _home_of(model, mesh)
    given = None if plan is None else resolve_plan(plan)
    if given is not None:
        device, outputs = given.device if device is None else device, given.outputs
        mixed = given_with_plan(mixed, given.mixed)
    shape = _mesh_of(mesh)
    traced: Traced | None = None

    def request_for(shape: Mesh) -> Request:
        return Request.make(
            shape,
            mode,
            hints,
            device,
            outputs,
            memory,
            optimizer,
            memory_policy,
            zero,
            mixed,
            share_blocks,
            offload_optimizer,
        )

    if topology is not None and given is None:
        chosen, device = on_topology(
            shape if isinstance(mesh, DeviceMesh) else mesh, topology, device
        )
        if chosen is None and not has_example:
            raise MeshError("topology: choosing a mesh takes an example call (args or kwargs)")
        if chosen is None:
            traced, given = _choose_mesh(model, args, kwargs, topology, request_for, home, mixed)
            shape = given.mesh
    if given is not None:
        check_mesh(given, shape)
    request = request_for(shape)
    # Whatever is wrong with model, inputs or hints shows here, before ranks communicate.
    if traced is None and has_example:
        traced = _trace(model, args, kwargs, request, home)
    context = RankContext.from_process_group(
        shape,
        device_mesh=mesh if isinstance(mesh, DeviceMesh) else None,
        device_type=home.type,
    )
    options = CallOptions(inputs, shapes, check, exact_rng)
    module = ParallelModule(model, request, context, home, options, plan=given)
    if traced is not None:
        module.compile_example(traced, *_call(args, kwargs))
    return module


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | int | None = None,
    mode: str | None = None,
    hints: Mapping[str, Any] | None = None,
    device: Any = None,
    topology: Topology | None = None,
    outputs: str = "auto",
    memory: int | str | None = None,
    optimizer: str = "adam",
    memory_policy: Given = None,
    zero: int = 0,
    offload_optimizer: bool = False,
    mixed_precision: str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    share_blocks: bool = True,
) -> Plan:
    """Make a plan without process group, devices or memory for the model (it may be on meta).

    Arguments and errors are those of `autoparallelize`; the mesh must be given, or a topology.
    """
    mixed = MixedPrecision.make(mixed_precision, reduce_dtype)
    home = torch.device("cpu")
    shape = None
    if topology is not None:
        shape, device = on_topology(mesh, topology, device)
    elif mesh is None:
        raise MeshError("mesh: give the mesh to plan for, or a topology to find one for")
    else:
        shape = Mesh.of(mesh)

    def request_for(shape: Mesh) -> Request:
        return Request.make(
            shape,
            mode,
            hints,
            device,
            outputs,
            memory,
            optimizer,
            memory_policy,
            zero,
            mixed,
            share_blocks,
            offload_optimizer,
        )

    if shape is None:
        assert topology is not None
        traced, made = _best_mesh(model, args, kwargs, topology, request_for, home, mixed)
    else:
        request = request_for(shape)
        traced = _trace(model, args, kwargs, request, home)
        made = make_plan(traced, request)
    return with_reports(traced, made)


def _call(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return () if args is None else args, {} if kwargs is None else kwargs


def _trace(
    model: nn.Module, args: Any, kwargs: Any, request: Request, home: torch.device
) -> Traced:
    if isinstance(model, nn.Module):
        model = traceable(model, home)
    return trace_model(model, *_call(args, kwargs), request)


def _best_mesh(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    topology: Topology,
    request_for: Callable[[Mesh], Request],
    home: torch.device,
    mixed: MixedPrecision | None,
    choose: Callable[[Callable[[], Plan]], Plan] = lambda make: make(),
) -> tuple[Traced, Plan]:
    """The plan of the best mesh on a topology, and the model as it is traced for it.

    choose:
        calls the search, or takes what another rank has found
    """
    if isinstance(model, nn.Module):
        model = traceable(model, home)
    program = trace_program(model, *_call(args, kwargs), mixed)

    def search() -> Plan:
        found = search_program(model, program, topology, request_for)
        return replace(found.plan, meshes=found.table)

    plan = choose(search)
    return place_program(program, model, request_for(plan.mesh)), plan


def _choose_mesh(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    topology: Topology,
    request_for: Callable[[Mesh], Request],
    home: torch.device,
    mixed: MixedPrecision | None,
) -> tuple[Traced, Plan]:
    """The same on every rank: the first one searches."""

    def choose(search: Callable[[], Plan]) -> Plan:
        ranks = Mesh.of({"ranks": topology.size})
        context = RankContext.from_process_group(ranks, device_type=home.type)
        return agreement.from_first_rank(context, search, "choosing the mesh")

    return _best_mesh(model, args, kwargs, topology, request_for, home, mixed, choose)


def _home_of(model: nn.Module, mesh: Any) -> torch.device:
    """Where the pieces of a model go: where it is, or where the ranks of the mesh compute."""
    device = model_device(model, ())
    return compute_device(mesh) if device.type == "meta" else device


def _mesh_of(mesh: Mesh | Mapping[str, int] | int | DeviceMesh | None) -> Mesh:
    """The shape of the mesh, checked against the number of processes."""
    world = world_size()
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
