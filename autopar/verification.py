"""`verify`: is the distributed module the same as the single-device one? In one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.compiler import Request, Traced, lower_plan, make_plan, resolve_plan, trace_model
from autopar.ir.errors import PlanError, VerificationError
from autopar.ir.graph import Value
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.runtime.simulate import Simulated, simulate

#: Random operators draw from this seed on both sides.
SEED = 0


@dataclass(frozen=True)
class Check:
    """One tensor compared: the norms on both sides and the largest difference.

    error:
        largest absolute difference, divided by the largest absolute expected value (or by 1
        where that is smaller)
    """

    kind: str
    name: str
    expected_norm: float
    got_norm: float
    error: float


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    checks:
        one per output, gradient and buffer
    disagreement:
        the largest difference between ranks that should hold the same
    tolerance:
        the largest error that passes
    """

    plan: Plan
    checks: tuple[Check, ...]
    disagreement: float
    tolerance: float

    @property
    def max_error(self) -> float:
        errors = [check.error for check in self.checks]
        # max() would drop a nan that does not come first.
        return max([*errors, self.disagreement], key=lambda e: float("inf") if e != e else e)

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        width = max([len(c.name) for c in self.checks], default=4)
        lines = [f"{'kind':8}  {'name':{width}}  {'expected norm':>14}  {'got norm':>14}  error"]
        for c in self.checks:
            mark = "" if c.error <= self.tolerance else "  <-- differs"
            lines.append(
                f"{c.kind:8}  {c.name:{width}}  {c.expected_norm:14.6g}  {c.got_norm:14.6g}  "
                f"{c.error:.2e}{mark}"
            )
        lines.append(
            f"{'equal' if self.ok else 'DIFFERENT'}: largest error {self.max_error:.2e}, "
            f"tolerance {self.tolerance:.0e}, ranks differ by {self.disagreement:.2e}"
        )
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise VerificationError, naming the worst tensor, unless everything is equal."""
        if not self.ok:
            worst = max(self.checks, key=lambda c: float("inf") if c.error != c.error else c.error)
            raise VerificationError(
                f"the plan does not compute what the model computes: {worst.kind} {worst.name!r} "
                f"is off by {worst.error:.2e} (tolerance {self.tolerance:.0e})\n{self}"
            )


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | Mapping[str, int] | int,
    plan: Plan | str | os.PathLike[str] | None = None,
    hints: Mapping[str, Any] | None = None,
    mode: str | None = None,
    tolerance: float | None = None,
) -> Report:
    """Run a plan on all ranks of a mesh in this process and compare it with the model.

    Outputs, the gradient of every parameter (from the loss where the model returns a scalar, else
    from fixed random gradients of all outputs) and every updated buffer are compared; random
    operators draw the same numbers on both sides. The model is not changed.

    tolerance:
        largest error that passes; default 1e-9 where the model computes in float64 throughout,
        1e-4 where in float32, 5e-2 where in half precision

    Other arguments and errors are those of `autoparallelize`.
    """
    given = None if plan is None else resolve_plan(plan)
    request = Request.make(Mesh.of(mesh), mode, hints, None, given.outputs if given else "full")
    traced = trace_model(model, args, kwargs or {}, request)
    chosen = given or make_plan(traced, request)
    return verify_plan(model, args, kwargs or {}, traced, chosen, request, tolerance)


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
    inputs = traced.program.signature.bind(args, kwargs)
    sources: dict[str, Tensor] = {}
    arriving = iter(inputs)
    before = {name: b.detach().clone() for name, b in twin.named_buffers()}
    for node in graph.nodes:
        if node.op == "param":
            p = twin.get_parameter(node.target)
            sources[node.name] = p.detach().clone().requires_grad_(p.requires_grad)
        elif node.op == "buffer":
            sources[node.name] = before[node.target]
        elif node.op == "constant":
            sources[node.name] = traced.program.constants[node.target]
        elif node.op == "input":
            tensor = next(arriving)
            sources[node.name] = tensor.detach().clone().requires_grad_(node.results[0].grad)
    expected, cotangents = _run_single(twin, args, kwargs, graph.outputs)
    got = simulate(graph, plan.assignment.mesh, sources, cotangents, seed=SEED)
    checks = _compare(graph, traced, twin, expected, got)
    if tolerance is None:
        tolerance = _default_tolerance(traced)
    return Report(plan, tuple(checks), got.disagreement, tolerance)


def _run_single(
    twin: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Any]
) -> tuple[list[Any], list[Tensor | None]]:
    """The model's own outputs, its backward pass, and the gradients that pass began with."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, dict(kwargs))
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        config = getattr(twin, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
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


def _compare(
    graph: Any, traced: Traced, twin: nn.Module, expected: list[Any], got: Simulated
) -> list[Check]:
    checks = []
    for i, (want, out) in enumerate(zip(expected, got.outputs, strict=True)):
        if isinstance(want, Tensor):
            checks.append(_check("output", str(i), want, out))
    for node in graph.sources("param"):
        parameter = twin.get_parameter(node.target)
        if parameter.requires_grad:
            checks.append(_check("gradient", node.target, parameter.grad, got.grads[node.name]))
    for name, new in got.updates.items():
        checks.append(_check("buffer", name, twin.get_buffer(name), new))
    return checks


def _check(kind: str, name: str, want: Tensor | None, got: Tensor | None) -> Check:
    """Compare two tensors; a missing one counts as zeros."""
    if want is None and got is None:
        return Check(kind, name, 0.0, 0.0, 0.0)
    present = want if want is not None else got
    assert present is not None
    zeros = torch.zeros(present.shape, dtype=torch.float64)
    a = zeros if want is None else want.detach().to("cpu", torch.float64)
    b = zeros if got is None else got.detach().to("cpu", torch.float64)
    if a.shape != b.shape:
        return Check(kind, name, a.norm().item(), b.norm().item(), float("inf"))
    # Masked scores may hold equal infinities, whose difference is no number.
    difference = torch.where(a == b, 0.0, (a - b).abs())
    finite = a[a.isfinite()]
    scale = max(1.0, finite.abs().max().item() if finite.numel() else 1.0)
    error = difference.max().item() / scale if difference.numel() else 0.0
    return Check(kind, name, a.norm().item(), b.norm().item(), error)


def _default_tolerance(traced: Traced) -> float:
    """By the least precise dtype that the graph computes in."""
    dtypes = {v.dtype for node in traced.graph.nodes for v in node.results}
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2
    return 1e-4 if torch.float32 in dtypes else 1e-9
