"""The memory the problem counts, against the simulation of the graph that ranks run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.compiler import Request, Traced, trace_model
from autopar.dry_run import dry_operators
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.blocks import NO_BLOCKS, find_blocks
from autopar.passes.build import Built, build_problem
from autopar.passes.memory.problem import with_memory
from autopar.passes.memory.shorten import shorten
from autopar.passes.memory.simulation import memory_timeline
from autopar.passes.memory.step import StepMemory, step_memory
from autopar.passes.memory.usage import ProblemUsages
from autopar.passes.prices import DevicePrices
from autopar.passes.search import output_choices
from autopar.passes.solver import InfeasibleError, evaluate, solve
from zoo import build

MESH = Mesh.of({"dp": 2, "tp": 2})
#: How far the problem may be below and above the simulation. Random plans reshard a value again
#: and again; of two copies on the way to one use it counts both.
LEAST, MOST = 0.98, 1.25
#: The same for the cheapest plan, which does not.
TOLERANCE = 0.01


pytestmark = pytest.mark.usefixtures("one_thread")


class Stack(nn.Module):
    """Equal blocks with a residual stream."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


class Case:
    """A model, its problem with or without shared blocks, and what that says of memory."""

    def __init__(self, model: nn.Module, call: dict[str, Any], *, share: bool) -> None:
        self.request = Request.make(MESH, "auto", None, "h100", "auto")
        self.traced: Traced = trace_model(model, (), call, self.request)
        graph, rules = self.traced.graph, self.traced.rules
        self.blocks = find_blocks(graph, rules) if share else NO_BLOCKS
        self.built: Built = build_problem(
            graph,
            rules,
            MESH,
            DevicePrices(MESH, self.request.device),
            output_layouts=output_choices(graph, MESH, "auto"),
            share=self.blocks.representatives(),
        )
        self.probe = partial(dry_operators, backend=self.request.device.backend)
        usages = ProblemUsages(
            self.built, graph, rules, MESH, self.request.device,
            blocks=self.blocks, probe=self.probe,
        )  # fmt: skip
        self.memory: StepMemory = step_memory(usages)

    def exact(self, choice: Any) -> int:
        assignment = self.built.assignment(MESH, choice)
        graph = pipeline.partitioned(self.traced.graph, assignment, self.request.device)
        return memory_timeline(graph, self.probe(MESH)).peak

    def random(self, count: int) -> Iterator[list[int]]:
        draw = random.Random(0)
        for _ in range(count):
            yield [draw.randrange(len(node.costs)) for node in self.built.problem.nodes]

    def ratio(self, choice: Any) -> float:
        return self.memory.peak(choice) / self.exact(choice)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_the_problem_counts_what_the_simulation_does(name: str, share: bool) -> None:
    _check_tracking(name, share, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "resnet"])
def test_the_problem_counts_what_the_simulation_does_for_more_models(name: str) -> None:
    _check_tracking(name, True, 8)


def _check_tracking(name: str, share: bool, plans: int) -> None:
    case = Case(*build(name), share=share)
    best = solve(case.built.problem).choice
    assert case.ratio(best) == pytest.approx(1, abs=TOLERANCE)
    ratios = [case.ratio(choice) for choice in case.random(plans)]
    assert min(ratios) >= LEAST and max(ratios) <= MOST, ratios


def test_copies_of_a_block_count_as_often_as_there_are() -> None:
    case = Case(Stack(12), {"x": torch.randn(16, 32)}, share=True)
    best = solve(case.built.problem).choice
    assert case.ratio(best) == pytest.approx(1, abs=TOLERANCE)
    assert all(LEAST <= case.ratio(choice) <= MOST for choice in case.random(6))


def test_a_deeper_stack_is_looked_at_in_as_many_places() -> None:
    short, deep = (
        Case(Stack(layers), {"x": torch.randn(16, 32)}, share=True) for layers in (6, 24)
    )
    assert short.memory.end == deep.memory.end
    graph, blocks = deep.traced.graph, deep.blocks
    models = {name: index for name, (index, _) in deep.built.strategies.items()}
    shorter = shorten(graph, blocks, models)
    (run,) = blocks.runs
    assert len(run.copies) >= 23
    gone = len(run.copies) - 4
    assert len(shorter.graph.nodes) == len(graph.nodes) - gone * len(run.copies[0])
    weights = [shorter.weights.get(node.name, 1) for node in shorter.graph.nodes]
    assert sum(weights) == len(graph.nodes)


def test_the_solver_is_given_the_same_numbers() -> None:
    case = Case(*build("mlp"), share=True)
    made = with_memory(case.built.problem, case.memory)
    for choice in case.random(5):
        extended = made.extended(choice)
        assert extended is not None
        cost, peak = evaluate(made.problem, extended)
        assert cost == pytest.approx(evaluate(case.built.problem, choice)[0])
        assert peak == pytest.approx(case.memory.peak(choice))


def test_what_a_limit_rules_out_does_not_fit() -> None:
    case = Case(*build("mlp"), share=True)
    limit = 0.8 * np.median([case.memory.peak(choice) for choice in case.random(20)])
    made = with_memory(case.built.problem, case.memory, limit)
    ruled_out = 0
    for choice in case.random(200):
        extended = made.extended(choice)
        if extended is None or not np.isfinite(evaluate(made.problem, extended)[0]):
            ruled_out += 1
            assert case.memory.peak(choice) > limit
    assert ruled_out


def test_a_limit_below_what_every_choice_holds_is_refused() -> None:
    case = Case(*build("mlp"), share=True)
    with pytest.raises(InfeasibleError, match="whatever is chosen"):
        with_memory(case.built.problem, case.memory, 100.0)
