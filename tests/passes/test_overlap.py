"""Gradients beside the backward pass: the price, the search with it, and what is said of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.compiler import Request, Traced, make_plan, trace_model
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.device import Device
from autopar.passes.device_presets import preset
from autopar.passes.overlap import (
    Parts,
    hidden_by,
    last_gradients,
    priced,
    settle,
    solve_overlapping,
)
from autopar.passes.search import Searched
from autopar.passes.solver import Edge, Node, Problem, evaluate, solve

MESH = {"dp": 2, "tp": 2}


# -- the price, on problems small enough to try everything -----------------------------------------


def _random_problem(seed: int, covers: float) -> tuple[Problem, Parts]:
    """A ring of decisions, in which every edge sends gradients and every node covers some."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    count = 5
    nodes = [Node(f"n{i}", 1 + rng.random(draw.randint(2, 3))) for i in range(count)]
    edges, sent = [], []
    for i in range(count):
        u, v = i, (i + 1) % count
        costs = 2 * rng.random((len(nodes[u].costs), len(nodes[v].costs)))
        edges.append(Edge.from_dense(u, v, costs))
        part = edges[-1].costs * rng.random(edges[-1].costs.shape)
        sent.append(part if draw.random() < 0.8 else None)
    covering = {i: covers * node.costs * rng.random() for i, node in enumerate(nodes)}
    sends = {0: nodes[0].costs * 0.3}
    return Problem(tuple(nodes), tuple(edges)), Parts(sends, tuple(sent), covering)


def _seconds(problem: Problem, parts: Parts, choice: tuple[int, ...]) -> float:
    """T as it is defined: the rest, and what is left of the gradients."""
    cost, _ = evaluate(problem, choice)
    gradients, covering = parts.of(problem, choice)
    return cost - gradients + max(0.0, gradients - covering)


@pytest.mark.parametrize("covers", [0.0, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_assignment_is_found_or_the_gap_is_told(seed: int, covers: float) -> None:
    problem, parts = _random_problem(seed, covers)
    found = solve_overlapping(problem, parts)
    solution, hiding = found.solution, found.hiding
    everything = itertools.product(*(range(len(node.costs)) for node in problem.nodes))
    best = min(_seconds(problem, parts, choice) for choice in everything)
    assert solution.cost == pytest.approx(_seconds(problem, parts, solution.choice))
    assert solution.bound <= best * (1 + 1e-9)
    assert best <= solution.cost * (1 + 1e-9)
    assert solution.gap < 0.1
    if solution.status == "optimal":
        assert solution.cost == pytest.approx(best)
    gradients, covering = parts.of(problem, solution.choice)
    assert (hiding.gradients, hiding.covering) == (gradients, covering)
    assert hiding.hidden == min(gradients, covering)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_a_weight_prices_every_assignment_in_between(weight: float) -> None:
    problem, parts = _random_problem(0, 0.5)
    line = priced(problem, parts, weight)
    for choice in itertools.product(*(range(len(node.costs)) for node in problem.nodes)):
        gradients, covering = parts.of(problem, choice)
        rest = evaluate(problem, choice)[0] - gradients
        expected = rest + weight * (gradients - covering)
        assert evaluate(line, choice)[0] == pytest.approx(expected)
        # So its optimum is a bound on every T.
        assert expected <= _seconds(problem, parts, choice) * (1 + 1e-12)


def test_equal_edges_go_on_sharing_their_arrays() -> None:
    costs, classes = np.array([[0.0, 2.0], [3.0, 0.0]]), np.arange(2)
    sent = costs / 2
    edges = tuple(Edge(0, v, costs, classes, classes) for v in (1, 2))
    problem = Problem(tuple(Node(name, np.ones(2)) for name in "abc"), edges)
    parts = Parts({}, (sent, sent), {0: np.array([0.1, 0.2])})
    first, second = priced(problem, parts, 0.5).edges
    assert first.costs is second.costs


def test_without_parts_the_problem_is_solved_as_it_is() -> None:
    problem, parts = _random_problem(3, 1.0)
    alone = solve(problem)
    for nothing in (Parts(), Parts({}, parts.edges), Parts(covering=parts.covering)):
        found = solve_overlapping(problem, nothing)
        assert found.solution.choice == alone.choice and found.solution.cost == alone.cost
        assert found.hiding.hidden == 0.0
        assert priced(problem, nothing, 0.0) is problem


def test_choices_behind_the_problem_are_left_out_of_its_price() -> None:
    problem, parts = _random_problem(1, 0.5)
    found = settle(problem, parts, solve(priced(problem, parts, 0.5)), 0.5)
    more = replace(found.solution, choice=(*found.solution.choice, 7))
    assert settle(problem, parts, more, 0.5).solution.cost == found.solution.cost
    assert found.solution.bound <= found.solution.cost


# -- models ----------------------------------------------------------------------------------------


def wide() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Six equal layers, 24 MiB: more than the last bucket of gradients holds."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.square().mean()

    return Wide(), {"x": torch.zeros(256, 1024)}


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=256, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(8, 64, dtype=torch.long)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


MODELS = {"wide": wide, "gpt2": gpt2}


def _example(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return MODELS[name]()


@cache
def _traced(name: str) -> Traced:
    torch.set_num_threads(1)
    model, call = _example(name)
    return trace_model(model, (), call, _request(preset("h100")))


def _request(device: Device, mode: str = "auto") -> Request:
    return Request.make(Mesh.of(MESH), mode, None, device, "auto")


def _device(overlap: float) -> Device:
    """A device that takes about as long to compute as to send gradients, with little latency."""
    link = preset("h100").links[0]
    slow = tuple(
        (kind, tuple(replace(m, latency=1e-7, bandwidth=2e9) for m in measures))
        for kind, measures in link.collectives
    )
    links = tuple(replace(link, name=name, collectives=slow) for name in ("intra", "inter"))
    return replace(
        preset("h100"),
        flop_rates=(("float32", 5e11),),
        links=links,
        launch=1e-7,
        overlap=overlap,
    )


def _decide(name: str, device: Device, share: bool = True) -> Searched:
    request = _request(device)
    return pipeline.decide(
        _traced(name).placed,
        request.mesh,
        device,
        mode="auto",
        outputs="auto",
        share_blocks=share,
    )


def test_more_overlap_never_costs_more() -> None:
    seconds = [_decide("gpt2", _device(k)).solution.cost for k in (0.0, 0.3, 1.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


@pytest.mark.parametrize("overlap", [0.02, 0.3])
def test_the_gap_is_small_and_the_price_is_that_of_the_assignment(overlap: float) -> None:
    searched = _decide("gpt2", _device(overlap))
    built, solution = searched.built, searched.solution
    choice = built.choice(searched.assignment)
    cost, _ = evaluate(built.problem, choice)
    hiding = hidden_by(built.problem, built.parts, choice)
    assert solution.cost == pytest.approx(cost - hiding.hidden)
    assert hiding.hidden == pytest.approx(searched.hiding.hidden) and hiding.hidden > 0
    assert solution.gap < 0.01


def test_blocks_that_share_their_decisions_hide_what_their_copies_hide() -> None:
    """The assignment of the shared problem costs the same, and hides the same, in the other."""
    shared, apart = _decide("gpt2", _device(0.3)), _decide("gpt2", _device(0.3), share=False)
    here = hidden_by(
        shared.built.problem, shared.built.parts, shared.built.choice(shared.assignment)
    )
    there = hidden_by(apart.built.problem, apart.built.parts, apart.built.choice(shared.assignment))
    assert here.gradients == pytest.approx(there.gradients) and here.gradients > 0
    assert here.covering == pytest.approx(there.covering) and here.covering > 0


def test_the_gradients_that_come_last_are_those_of_the_parameters_used_first() -> None:
    graph = _traced("wide").graph
    order = [node.results[0].name for node in graph.sources("param")]
    first = next(graph.calls).operands[1].name
    assert last_gradients(graph, 0.0) == frozenset()
    assert first in last_gradients(graph, 1.0) and len(last_gradients(graph, 1.0)) == 1
    assert last_gradients(graph, 1e12) == set(order)


def test_a_plan_says_what_is_hidden_and_keeps_it() -> None:
    plan = make_plan(_traced("wide"), _request(_device(1.0), "data_parallel"))
    assert plan.gradients >= plan.hidden > 0
    assert f"{plan.hidden * 1e3:.3f} ms of them hidden" in str(plan)
    again = autopar.Plan.from_json(plan.to_json())
    assert (again.gradients, again.hidden) == (plan.gradients, plan.hidden)
    nothing = make_plan(_traced("wide"), _request(_device(0.0), "data_parallel"))
    assert nothing.hidden == 0.0 and nothing.seconds > plan.seconds


def test_the_comparison_tells_exposed_from_hidden_communication() -> None:
    model, call = _example("wide")
    plan = autopar.plan(model, (), call, mesh={"dp": 4}, device=_device(1.0))
    table = plan.compare()
    row = table.row("data parallel")
    assert row.hidden > 0 and row.seconds == pytest.approx(row.compute + row.communication)
    assert "hidden" in str(table).splitlines()[1]


@pytest.mark.slow
def test_a_memory_limit_is_kept_at_the_true_price() -> None:
    """The limited search works at one weight; what it finds is priced and bounded as it is."""
    model, call = _example("gpt2")
    device = _device(0.3)
    free = autopar.plan(model, (), call, mesh=MESH, device=device)
    peak = free.memory("adam").peak
    tight = autopar.plan(model, (), call, mesh=MESH, device=device, memory=int(peak * 0.95))
    assert tight.memory("adam").peak <= peak * 0.95
    assert tight.seconds >= free.seconds * (1 - 1e-9)
    assert tight.bound <= tight.seconds
