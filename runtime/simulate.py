"""Run a partitioned graph on all ranks of a mesh in one process, forward and backward.

The emitted module and the operators are the ones that run in real processes; only the transport
of the pieces between ranks differs (see `runtime/lockstep.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Value
from autopar.ir.layout import Layout
from autopar.ir.local import is_uniform
from autopar.ir.mesh import Mesh
from autopar.runtime.emit import emit
from autopar.runtime.groups import current
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.pieces import assemble, piece
from autopar.runtime.random import RandomState


@dataclass(frozen=True)
class Simulated:
    """Whole tensors put together from what the ranks computed.

    outputs:
        the flat outputs of the graph
    grads:
        source node name -> gradient (None where no gradient arrived)
    updates:
        buffer name -> new value
    disagreement:
        the largest difference between two ranks that should hold the same
    """

    outputs: list[Any]
    grads: dict[str, Tensor | None]
    updates: dict[str, Tensor]
    disagreement: float


def simulate(
    graph: Graph,
    mesh: Mesh,
    sources: Mapping[str, Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    seed: int = 0,
) -> Simulated:
    """One forward and backward pass.

    graph:
        a partitioned graph
    mesh:
        the mesh its layouts speak of
    sources:
        source node name -> whole tensor; those that require gradients get them
    cotangents:
        for each output the (whole) gradient to start from, or None
    seed:
        of the random operators: they draw what one device draws after
        ``torch.manual_seed(seed)``

    Raises what a rank raises, DesyncError where ranks communicate differently.
    """
    shared = emit(graph) if is_uniform(graph) else None
    source_nodes = [n for n in graph.nodes if n.is_source]

    def run(rank: int) -> tuple[list[Any], list[Tensor | None], list[Tensor]]:
        context = current()
        context.random = RandomState(exact=torch.Generator().manual_seed(seed))
        here = mesh.coordinates(rank)
        module = shared or emit(graph, coordinates=here)
        leaves = []
        for node in source_nodes:
            whole = sources[node.name]
            local = piece(whole.detach(), _layout(node.results[0]), mesh, here).clone()
            leaves.append(local.requires_grad_(whole.requires_grad))
        outputs, updates = module(*leaves)
        pairs = [
            (out, piece(cotangent, _layout(value), mesh, here))
            for out, value, cotangent in zip(outputs, graph.outputs, cotangents, strict=True)
            if cotangent is not None and out.requires_grad
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [c for _, c in pairs])
        return list(outputs), [leaf.grad for leaf in leaves], list(updates)

    ranks = run_lockstep(mesh, run)
    gather = _Gather(mesh)
    outputs = [
        gather(value, [r[0][i] for r in ranks]) if isinstance(value, Value) else value
        for i, value in enumerate(graph.outputs)
    ]
    grads = {
        node.name: gather(node.results[0], [r[1][i] for r in ranks])
        for i, node in enumerate(source_nodes)
    }
    updates = {
        name: gather(value, [r[2][i] for r in ranks])
        for i, (name, value) in enumerate(graph.updates)
    }
    return Simulated(outputs, grads, updates, gather.disagreement)


def _layout(value: Value) -> Layout:
    assert value.layout is not None, f"{value.name} has no layout: the graph is not partitioned"
    return value.layout


class _Gather:
    """Assemble pieces, noting how far ranks that hold the same piece differ."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.disagreement = 0.0

    def __call__(self, value: Value, pieces: Sequence[Tensor | None]) -> Any:
        missing = [p is None for p in pieces]
        if all(missing):
            return None
        if any(missing):
            self.disagreement = math.inf
            return None
        layout = _layout(value)
        held = [p for p in pieces if p is not None]
        whole = assemble(held, layout, self.mesh, value.shape)
        for rank, part in enumerate(pieces):
            expected = piece(whole, layout, self.mesh, self.mesh.coordinates(rank))
            assert part is not None
            self.disagreement = max(self.disagreement, _distance(part.detach(), expected))
        return whole


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities and two NaNs agree, a NaN and a number do not."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    return difference.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
