"""`verify`: is the distributed module the same as the single-device one? In one process."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.compiler import Request, Traced, lower_plan, make_plan, resolve_plan, trace_model
from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import Mesh
from autopar.ir.trace_export import model_device
from autopar.ir.trace_watch import caches_off
from autopar.mixed import MixedPrecision, given_with_plan, region
from autopar.passes.policies import Given
from autopar.plans import Plan
from autopar.runtime.row_major import RowMajorDraws
from autopar.runtime.simulate import Simulated, simulate
from autopar.verify_report import Check, Pair, Report, compare_tensors

#: Random operators draw from this seed on both sides.
SEED = 0


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | int,
    plan: Plan | str | os.PathLike[str] | None = None,
    hints: Mapping[str, Any] | None = None,
    mode: str | None = None,
    memory_policy: Given = None,
    zero: int = 0,
    mixed_precision: str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    tolerance: float | None = None,
) -> Report:
    """Run a plan on all ranks of a mesh in this process and compare it with the model.

    Outputs, the gradient of every parameter and of every input that requires one (from the loss
    where the model returns a scalar, else from fixed random gradients of all outputs) and every
    updated buffer are compared; random operators draw the same numbers on both sides. The model
    is not changed.

    tolerance:
        largest error that passes; default 1e-9 where the model computes in float64 throughout,
        1e-4 where in float32, 5e-2 where in half precision

    Other arguments and errors are those of `autoparallelize`.
    """
    given = None if plan is None else resolve_plan(plan)
    mixed = MixedPrecision.make(mixed_precision, reduce_dtype)
    if given is not None:
        mixed = given_with_plan(mixed, given.mixed)
    kwargs = {} if kwargs is None else kwargs
    request = Request.make(
        Mesh.of(mesh),
        mode,
        hints,
        None,
        given.outputs if given else "full",
        memory_policy=memory_policy,
        zero=zero,
        mixed=mixed,
    )
    traced = trace_model(model, args, kwargs, request)
    chosen = given or make_plan(traced, request)
    return verify_plan(model, args, kwargs, traced, chosen, request, tolerance)


def verify_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    traced: Traced,
    plan: Plan,
    request: Request,
    tolerance: float | None = None,
) -> Report:
    """`verify` for a model that is traced and planned already."""
    graph = lower_plan(traced, plan, request)
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, dict(kwargs))
    )
    inputs = traced.program.signature.bind(args, kwargs)
    before = {name: b.detach().clone() for name, b in twin.named_buffers()}
    sources = _sources(graph, traced, twin, inputs)
    around = region(request.mixed, model_device(twin, (args, kwargs)))
    expected, cotangents = _run_single(twin, args, kwargs, graph.outputs, around)
    got = simulate(graph, plan.assignment.mesh, sources, cotangents, seed=SEED)
    checks = (
        *_compare_outputs(expected, got),
        *_compare_gradients(graph, twin, inputs, got),
        *_compare_buffers(twin, before, got),
    )
    if tolerance is None:
        tolerance = _default_tolerance(traced)
    return Report(plan, checks, got.disagreement, tolerance)


def _sources(
    graph: Graph, traced: Traced, twin: nn.Module, inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The whole tensor of every source node of the graph."""
    found: dict[str, Tensor] = {}
    arriving = iter(inputs)
    for node in graph.nodes:
        if node.op == "param":
            p = twin.get_parameter(node.target)
            found[node.name] = p.detach().clone().requires_grad_(p.requires_grad)
        elif node.op == "buffer":
            found[node.name] = twin.get_buffer(node.target).detach().clone()
        elif node.op == "constant":
            found[node.name] = traced.program.constants[node.target]
        elif node.op == "input":
            x = next(arriving)
            found[node.name] = x.detach().clone().requires_grad_(x.requires_grad)
    return found


def _run_single(
    twin: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Any],
    around: contextlib.AbstractContextManager[Any],
) -> tuple[list[Any], list[Tensor | None]]:
    """The model's own outputs, its backward pass, and the gradients that pass began with.

    around:
        what the model is called under
    """
    with torch.random.fork_rng(), RowMajorDraws():
        torch.manual_seed(SEED)
        # As the model was traced: a cache in the output is dropped, in nested configs too.
        with caches_off(twin), around:
            expected = pytree.tree_leaves(twin(*args, **kwargs))
    if len(expected) != len(outputs):
        raise PlanError(
            f"the model returned {len(expected)} values, the traced graph has {len(outputs)}"
        )
    cotangents = _cotangents(outputs)
    pairs = [
        (out, c)
        for out, c in zip(expected, cotangents, strict=True)
        if c is not None and out.requires_grad
    ]
    if pairs:
        # A layer that is computed again draws again, in the same order.
        with RowMajorDraws():
            torch.autograd.backward([out for out, _ in pairs], [c for _, c in pairs])
    return expected, cotangents


def _cotangents(outputs: Sequence[Any]) -> list[Tensor | None]:
    """1 for a loss; without one, fixed random gradients for every differentiable output."""
    values = [v if isinstance(v, Value) and v.grad else None for v in outputs]
    losses = [v is not None and v.numel == 1 for v in values]
    generator = torch.Generator().manual_seed(SEED)
    found: list[Tensor | None] = []
    for value, is_loss in zip(values, losses, strict=True):
        if value is None or (any(losses) and not is_loss):
            found.append(None)
        elif is_loss:
            found.append(torch.ones(value.shape, dtype=value.dtype))
        else:
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            found.append(drawn.to(value.dtype))
    return found


def _compare_outputs(expected: Sequence[Any], got: Simulated) -> list[Check]:
    return compare_tensors(
        "output",
        [
            (str(i), want, out)
            for i, (want, out) in enumerate(zip(expected, got.outputs, strict=True))
            if isinstance(want, Tensor)
        ],
    )


def _compare_gradients(
    graph: Graph, twin: nn.Module, inputs: Sequence[Tensor], got: Simulated
) -> list[Check]:
    pairs: list[Pair] = []
    for node in graph.sources("param"):
        parameter = twin.get_parameter(node.target)
        if parameter.requires_grad:
            pairs.append((node.target, parameter.grad, got.grads[node.name]))
    for node, tensor in zip(graph.sources("input"), inputs, strict=True):
        if tensor.requires_grad:
            pairs.append((f"input {node.target}", tensor.grad, got.grads[node.name]))
    return compare_tensors("gradient", pairs)


def _compare_buffers(twin: nn.Module, before: Mapping[str, Tensor], got: Simulated) -> list[Check]:
    """Buffers that the plan updates, and those that the model changed though the plan does not."""
    return compare_tensors(
        "buffer",
        [
            (name, after, got.updates.get(name, before[name]))
            for name, after in twin.named_buffers()
            if name in got.updates or not torch.equal(after, before[name])
        ],
    )


def _default_tolerance(traced: Traced) -> float:
    """By the least precise dtype that the graph computes in."""
    dtypes = {v.dtype for node in traced.graph.nodes for v in node.results}
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2
    return 1e-4 if torch.float32 in dtypes else 1e-9
