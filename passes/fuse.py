"""Parameters that take the same steps on their way into the graph take them together.

before::    %v_1 : f32[8, 4] grad rep(dp) = autopar.to_replicate(%v, ("dp",))
            %h   : f32[6@dp, 8] grad = aten.linear.default(%x, %v_1)
            %w_1 : f32[4, 8] grad rep(dp) = autopar.to_replicate(%w, ("dp",))
            %y   : f32[6@dp, 4] grad = aten.linear.default(%h, %w_1)

after::     %v_1 : f32[8, 4] grad rep(dp), %w_1 : f32[4, 8] grad rep(dp) =
                autopar.fused((%v, %w), (("autopar.to_replicate", ("dp",), ((), ())),))
            %h   : f32[6@dp, 8] grad = aten.linear.default(%x, %v_1)
            %y   : f32[6@dp, 4] grad = aten.linear.default(%h, %w_1)

Parameters are put into buckets in the order of their first use, so that in the backward pass a
bucket is complete when its part of the graph is done, and what it sends can be under way during
the rest. A bucket is closed when it is large enough for latency to matter little, the first ones
earlier (`autopar.passes.bucket_size`); a parameter of
which copying into a bucket takes longer than a latency travels alone, from where it lies. Where
mixed precision casts a parameter on its way, the bucket casts it, and sums its gradient in the
dtype that is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.fused import CAST_STEP, FUSABLE, FusedStep, fused_node
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import REDUCED_IN, is_parameter_cast, reduced_in
from autopar.ir.steps import STEPS
from autopar.passes.bucket_size import bucket_size
from autopar.passes.communication import Collective, step_collectives
from autopar.passes.device import Device
from autopar.passes.policies import block_of


def fuse(graph: Graph, device: Device, apart: Container[str] = ()) -> Graph:
    """A partitioned graph with the first steps of its parameters in buckets.

    Only a parameter with a single reader is taken.

    apart:
        parameters (dotted names) that share buckets within their block of the model only: those
        that are gathered again in the backward pass, one block at a time
    """
    assert graph.mesh is not None
    buckets = _fill(_chains(graph, graph.mesh, apart), graph.mesh, device)
    if not buckets:
        return graph
    first = {bucket.members[0].end.name: bucket for bucket in buckets}
    gone = {step.name for b in buckets for chain in b.members for step in chain.steps}
    # A bucket may come before the source nodes of its last parameters: sources go first.
    nodes = [node for node in graph.nodes if node.is_source]
    for node in graph.calls:
        if node.name in first:
            nodes.append(first[node.name].node())
        elif node.name not in gone:
            nodes.append(node)
    return graph.with_nodes(tuple(nodes))


@dataclass(frozen=True)
class _Chain:
    """A parameter and the steps it takes before anything reads it."""

    parameter: Value
    steps: tuple[Node, ...]
    block: str | None = None

    @property
    def end(self) -> Value:
        return self.steps[-1].results[0]

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for all members of a bucket."""
        ways = tuple(
            (step.op, step.args[1], *(each for each in step.args[2:] if isinstance(each, str)))
            for step in self.steps
        )
        return ways, self.parameter.dtype, self.reduced, self.end.grad, self.block

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype in which gradients are summed, where a step casts."""
        return next((reduced_in(s) for s in self.steps if is_parameter_cast(s)), None)

    def runs(self, mesh: Mesh) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes of each collective it takes, by kind and axes."""
        found = [c for step in self.steps for c in _collectives(step, mesh)]
        return {(c.kind, c.axes): c.nbytes for c in found}


@dataclass
class _Bucket:
    members: list[_Chain] = field(default_factory=list)

    def node(self) -> Node:
        first = self.members[0]
        steps = tuple(
            FusedStep(CAST_STEP, (), ((step.args[1],),) * len(self.members))
            if is_parameter_cast(step)
            else FusedStep(step.op, step.args[1], tuple(m.steps[i].args[2:] for m in self.members))
            for i, step in enumerate(first.steps)
        )
        attrs = {} if first.reduced is None else {REDUCED_IN: first.reduced}
        return fused_node(
            tuple(m.parameter for m in self.members),
            steps,
            results=tuple(m.end for m in self.members),
            origin=first.steps[-1].origin,
            attrs=attrs,
        )


def _chains(graph: Graph, mesh: Mesh, apart: Container[str]) -> list[_Chain]:
    """The chains of all parameters, in the order of first use."""
    readers = _readers(graph)
    found = []
    for node in graph.sources("param"):
        value, steps = node.results[0], []
        while readers[value.name] is not None:
            step = readers[value.name]
            if step is None or not (step.op in FUSABLE or is_parameter_cast(step)):
                break
            steps.append(step)
            value = step.results[0]
        # What follows the last collective needs no company, but a cast decides how it sums.
        while steps and not is_parameter_cast(steps[-1]) and not _collectives(steps[-1], mesh):
            steps.pop()
        if any(_collectives(step, mesh) for step in steps):
            block = (block_of(node.target) or "") if node.target in apart else None
            found.append(_Chain(node.results[0], tuple(steps), block))
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda chain: position[chain.end.name])


def _collectives(step: Node, mesh: Mesh) -> list[Collective]:
    return step_collectives(step, mesh, "") if step.op in STEPS else []


def _readers(graph: Graph) -> Mapping[str, Node | None]:
    """The only reader of each value; None where it has none, has several or leaves the graph."""
    return {
        name: uses[0][0] if len(uses) == 1 and name not in graph.leaving else None
        for name, uses in graph.consumers.items()
    }


def _fill(chains: list[_Chain], mesh: Mesh, device: Device) -> list[_Bucket]:
    """Buckets, closed when each collective is large enough; large parameters stay alone."""
    found: list[_Bucket] = []
    closed: Counter[tuple[Any, ...]] = Counter()
    filling: dict[tuple[Any, ...], tuple[_Bucket, dict[tuple[str, tuple[str, ...]], int]]] = {}
    for chain in chains:
        runs = chain.runs(mesh)
        sizes = {run: bucket_size(device, mesh, *run) for run in runs}
        if all(runs[run] >= size.alone for run, size in sizes.items()):
            found.append(_Bucket([chain]))
            continue
        empty = (_Bucket(), dict.fromkeys(runs, 0))
        bucket, total = filling.pop(chain.key, empty)
        if not bucket.members:
            found.append(bucket)
        bucket.members.append(chain)
        total = {run: total[run] + runs[run] for run in runs}
        before = closed[chain.key]
        if any(total[run] < size.enough(before) for run, size in sizes.items()):
            filling[chain.key] = bucket, total
        else:
            closed[chain.key] += 1
    return found
