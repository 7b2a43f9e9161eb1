"""Single operators of a plan, predicted and measured: where a wrong prediction comes from.

Each distinct call of the partitioned graph is run by itself on random pieces of the right shapes,
forward and backward, without communication; the prediction leaves communication out, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import autopar
from autopar.compiler import Traced
from autopar.dry_run import dry_operators
from autopar.ir.graph import Node, Value, map_values
from autopar.ir.steps import STEPS
from autopar.passes import pipeline
from autopar.passes.prices import DevicePrices

REPEATS = 7


@dataclass
class OperatorTime:
    """All calls of one operator in one step: how many, and their seconds."""

    operator: str
    calls: int = 0
    predicted: float = 0.0
    measured: float = 0.0


def operator_times(traced: Traced, plan: autopar.Plan) -> list[OperatorTime]:
    """The operators of a plan, those that took longest first; all ranks call it at once."""
    assignment = plan.assignment
    prices = DevicePrices(assignment.mesh, plan.device)
    graph = pipeline.partitioned(traced.graph, assignment, plan.device)
    resolve = dry_operators(assignment.mesh, plan.device.backend)
    whole = {node.name: node for node in traced.graph.calls}
    found: dict[str, OperatorTime] = {}
    known: dict[Any, float] = {}
    for node in graph.calls:
        if node.op in STEPS or node.name not in whole:
            continue
        original = whole[node.name]
        rule, strategy = traced.rules[node.name], assignment.strategies[node.name]
        times = prices.call(original, rule, [strategy])
        pieces = [(v.layout, v.shape, v.dtype, v.grad) for v in (*node.operands, *node.results)]
        key = node.op, str(node.kwargs), tuple(pieces)
        if key not in known:
            known[key] = _measure(node, resolve(node.op), plan)
        row = found.setdefault(node.op, OperatorTime(node.op))
        row.calls += 1
        row.predicted += float(times.forward[0] + times.backward[0])
        row.measured += known[key]
    return sorted(found.values(), key=lambda row: -row.measured)


def _measure(node: Node, run: Callable[..., Any], plan: autopar.Plan) -> float:
    """Seconds of a call on this rank, forward and backward; 0 where it cannot run by itself."""
    mesh = plan.assignment.mesh
    made: dict[str, Tensor] = {}

    def piece(value: Value) -> Tensor:
        if value.name not in made:
            assert value.layout is not None
            made[value.name] = _random(value, value.layout.local_shape(value.shape, mesh))
        return made[value.name]

    args, kwargs = map_values((node.args, node.kwargs), piece)

    def step() -> None:
        out = run(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else [out]
        wanted = [o for o in outs if isinstance(o, Tensor) and o.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(o) for o in wanted])
        for tensor in made.values():
            tensor.grad = None

    try:
        step()
    except (RuntimeError, IndexError):  # random numbers are no indices, say
        return 0.0
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _random(value: Value, shape: tuple[int, ...]) -> Tensor:
    if value.dtype.is_floating_point:
        return torch.randn(shape, dtype=value.dtype).mul_(0.1).requires_grad_(value.grad)
    return torch.zeros(shape, dtype=value.dtype)


def format_operators(title: str, rows: list[OperatorTime], count: int = 12) -> str:
    """The longest of them as a table."""
    lines = [
        f"\n{title}",
        f"{'operator':45} {'calls':>5} {'predicted':>10} {'measured':>10}  ratio",
    ]
    for row in rows[:count]:
        ratio = row.measured / row.predicted if row.predicted else float("inf")
        lines.append(
            f"{row.operator:45} {row.calls:5} {row.predicted * 1e3:7.2f} ms "
            f"{row.measured * 1e3:7.2f} ms  {ratio:5.2f}"
        )
    return "\n".join(lines)
