"""Repeated blocks: which are found, and that a plan with shared blocks costs what it says."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from autopar.compiler import Request, Traced, trace_model
from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.rule import Rule, Strategy
from autopar.passes import pipeline
from autopar.passes.blocks import Blocks, find_blocks
from autopar.passes.build import Built, build_problem
from autopar.passes.choices import rules_of
from autopar.passes.device_presets import preset
from autopar.passes.prices import DevicePrices
from autopar.passes.search import Searched, output_choices
from autopar.passes.share import Price, SharedProblem
from autopar.passes.signature import signature
from autopar.passes.solver import Edge, Problem, evaluate
from autopar.passes.solver import Node as ProblemNode
from zoo import build

torch.set_num_threads(1)

MESH = Mesh.of({"dp": 2, "tp": 2})


def _model(name: str, layers: int) -> tuple[nn.Module, dict]:
    """A model of the zoo with another number of layers."""
    model, call = build(name)
    stack = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer"}[name]
    blocks = model.get_submodule(stack)
    assert isinstance(blocks, nn.ModuleList)
    del blocks[layers:]
    while len(blocks) < layers:
        blocks.append(copy.deepcopy(blocks[0]))
    model.config.num_hidden_layers = layers  # type: ignore[union-attr, assignment]
    return model, call


@cache
def _traced(name: str, layers: int, hints: tuple[tuple[str, object], ...] = ()) -> Traced:
    model, call = build(name) if not layers else _model(name, layers)
    return trace_model(model, (), call, _request(dict(hints)))


def _request(hints: dict | None = None) -> Request:
    return Request.make(MESH, None, hints, "h100", "auto")


def _search(traced: Traced, share: bool, mode: str = "auto") -> Searched:
    return pipeline.decide(
        traced.placed,
        MESH,
        preset("h100"),
        mode=mode,  # type: ignore[arg-type]
        outputs="auto",
        share_blocks=share,
    )


def _blocks(graph: Graph) -> Blocks:
    return find_blocks(graph, rules_of(graph))


def _problem(graph: Graph, share: bool) -> Built:
    rules = rules_of(graph)
    return build_problem(
        graph,
        rules,
        MESH,
        DevicePrices(MESH, preset("h100")),
        output_layouts=output_choices(graph, MESH, "auto"),
        share=find_blocks(graph, rules).representatives() if share else None,
    )


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer.h."), ("llama", "model.layers.")]
)
def test_the_layers_of_a_model_are_its_blocks(name: str, prefix: str, layers: int) -> None:
    graph = _traced(name, layers).graph
    (run,) = _blocks(graph).runs
    assert len(run.copies) == layers
    for k, names in enumerate(run.copies):
        nodes = [graph.producers[n][0] for n in names]
        calls, sources = nodes[: run.period], nodes[run.period :]
        assert all(f"{node.origin.module}.".startswith(f"{prefix}{k}.") for node in calls)
        brought = {n.target for n in graph.sources("param") if n.target.startswith(f"{prefix}{k}.")}
        assert {node.target for node in sources} == brought
    inside = sum(f"{n.origin.module}.".startswith(prefix) for n in graph.calls)
    assert run.period * layers == inside


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_values_that_feed_every_block_are_in_none(name: str) -> None:
    graph = _traced(name, 3).graph
    (run,) = _blocks(graph).runs
    inside = {n for names in run.copies for n in names}
    read = [
        {
            v.name
            for n in names[: run.period]
            for v in graph.producers[n][0].operands
            if graph.producers[v.name][0].name not in inside
        }
        for names in run.copies
    ]
    assert set.intersection(*read), "the masks, and the rotary tables of Llama"


def test_a_block_that_ends_in_a_norm_starts_behind_the_norm_of_the_embedding() -> None:
    """The embedding's norm in front of BERT's first layer looks like the end of another layer."""
    graph = _traced("bert", 3).graph
    (run,) = _blocks(graph).runs
    assert len(run.copies) == 3
    modules = {graph.producers[n][0].origin.module for n in run.copies[0][: run.period]}
    assert all(module.startswith("bert.encoder.layer.0") for module in modules)


@pytest.mark.parametrize(("name", "layers"), [("mlp", 0), ("llama", 1), ("resnet", 0)])
def test_a_model_without_repeats_is_left_as_it_is(name: str, layers: int) -> None:
    """The equal projections of one attention are no blocks: none reads what another made."""
    graph = _traced(name, layers).graph
    assert not _blocks(graph).runs
    shared, full = _problem(graph, True).problem, _problem(graph, False).problem
    assert [n.name for n in shared.nodes] == [n.name for n in full.nodes]
    assert [(e.u, e.v) for e in shared.edges] == [(e.u, e.v) for e in full.edges]


def _stack(*parts: tuple[int, int], body: str = "norm", width: int = 32) -> Graph:
    """Residual blocks in a row: for each part its number of layers and its inner width."""
    sources = [f'%table : f64[1, 16, {width}] = buffer "table"']
    calls = [f"%cos : f64[1, 16, {width}] = aten.cos.default(%table)"]
    x, number = "x", 0
    shape = f"f64[4, 16, {width}] grad"
    sources.append(f'%x : {shape} = input "x"')
    for layers, inner in parts:
        for _ in range(layers):
            k = number = number + 1
            sources += [
                f'%up{k} : f64[{inner}, {width}] grad = param "{k}.up"',
                f'%down{k} : f64[{width}, {inner}] grad = param "{k}.down"',
            ]
            inside = f"f64[4, 16, {inner}] grad"
            calls += [
                f"%n{k} : {shape} = aten.mul.Tensor(%{x}, %cos)",
                f"%h{k} : {inside} = aten.linear.default(%n{k}, %up{k})",
                f"%g{k} : {inside} = aten.gelu.default(%h{k})",
            ]
            if body == "norm":
                calls.append(f"%d{k} : {shape} = aten.linear.default(%g{k}, %down{k})")
                calls.append(f"%r{k} : {shape} = aten.add.Tensor(%{x}, %d{k})")
            else:
                sources.pop()
                calls.append(f"%r{k} : {shape} = aten.add.Tensor(%{x}, %g{k})")
            x = f"r{k}"
        calls.append(f"%s{number} : {shape} = aten.tanh.default(%{x})")
        x = f"s{number}"
    return parse_graph("\n".join([*sources, *calls, f"return %{x}"]) + "\n")


def test_several_runs_in_one_model() -> None:
    runs = _blocks(_stack((4, 64), (3, 128))).runs
    assert [(len(run.copies), run.period) for run in runs] == [(4, 5), (3, 5)]
    assert runs[0].copies[0] == ("n1", "h1", "g1", "d1", "r1", "up1", "down1")
    assert runs[1].copies[2] == ("n7", "h7", "g7", "d7", "r7", "up7", "down7")


def test_of_layers_with_one_product_two_make_a_block() -> None:
    """Their weights want to be split by columns and by rows in turn."""
    assert [(len(r.copies), r.period) for r in _blocks(_stack((6, 32), body="one")).runs] == [
        (3, 8)
    ]
    assert not _blocks(_stack((3, 32), body="one")).runs


def test_an_equal_argument_of_another_type_makes_another_call() -> None:
    def call(*args: object) -> Node:
        return Node("aten.add.Tensor", args, {}, (Value("y", (4,), torch.float32),))

    x, y = (Value(n, (4,), torch.float32) for n in "xy")
    assert signature(call(x, y)) == signature(call(y, x)) != signature(call(x, x))
    assert len({signature(call(x, n)) for n in (1, 1.0, True)}) == 3
    assert signature(call(x, [1, 2])) == signature(call(y, [1, 2]))


# -- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_shared_plan_costs_what_the_whole_problem_charges_for_it(name: str, layers: int) -> None:
    traced = _traced(name, layers)
    shared, full = _search(traced, True), _search(traced, False)
    assert shared.solution.status == full.solution.status == "optimal"
    cost, _ = evaluate(full.built.problem, full.built.choice(shared.assignment))
    assert cost == pytest.approx(shared.solution.cost, rel=1e-9)
    # Only what meets the embedding or the head may gain by differing from the other blocks.
    assert full.solution.cost <= shared.solution.cost * (1 + 1e-9)
    assert shared.solution.cost <= full.solution.cost * 1.005


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_every_shared_choice_costs_what_the_whole_problem_charges(name: str) -> None:
    graph = _traced(name, 3).graph
    shared, full = _problem(graph, True), _problem(graph, False)
    assert len(shared.problem.nodes) < 0.6 * len(full.problem.nodes)
    draw = random.Random(0)
    for _ in range(20):
        choice = [draw.randrange(len(node.costs)) for node in shared.problem.nodes]
        same = full.choice(shared.assignment(MESH, choice))
        cost, expected = evaluate(shared.problem, choice)[0], evaluate(full.problem, same)[0]
        assert cost == pytest.approx(expected, rel=1e-9)


def test_batch_norms_that_update_buffers_are_shared() -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8], depths=[4],
        layer_type="basic", downsample_in_first_stage=False,
    )  # fmt: skip
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(2, (4,))
    model = ResNetForImageClassification(config)
    graph = trace_model(model, (), {"pixel_values": images, "labels": labels}, _request()).graph
    (run,) = _blocks(graph).runs
    assert len(run.copies) == 4 and len(graph.updates) > 8
    shared, full = _problem(graph, True), _problem(graph, False)
    kinds = [n.name.split()[0] for n in shared.problem.nodes]
    assert kinds.count("update") == len(graph.updates) - 3 * 2 * 3
    choice = [len(node.costs) // 2 for node in shared.problem.nodes]
    same = full.choice(shared.assignment(MESH, choice))
    cost, expected = evaluate(shared.problem, choice)[0], evaluate(full.problem, same)[0]
    assert cost == pytest.approx(expected, rel=1e-9)


def test_an_edge_within_one_variable_is_its_own_cost() -> None:
    draw = np.random.default_rng(0)
    matrix = Price(draw.random((2, 3)), np.array([0, 1, 1]), np.array([0, 2, 1]))
    costs = draw.random(3)
    shared = SharedProblem()
    shared.add("a", costs)
    shared.add_copy(0)
    shared.add_copy(0)
    shared.connect(0, 0, matrix, copies=2)
    edges = tuple(Edge(k, k + 1, matrix.costs, matrix.u_class, matrix.v_class) for k in (0, 1))
    chain = Problem(tuple(ProblemNode(f"a{k}", costs) for k in range(3)), edges)
    assert not shared.problem().edges
    for x in range(3):
        cost, expected = evaluate(shared.problem(), [x])[0], evaluate(chain, [x] * 3)[0]
        assert cost == pytest.approx(expected)


# -- how much work it is --------------------------------------------------------------------------


class _Counting(DevicePrices):
    """The prices of a device, and how often they were asked for."""

    asked = 0

    def strategies(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray:
        self.asked += len(choices)
        return super().strategies(node, rule, choices)

    def parameter(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        self.asked += len(layouts)
        return super().parameter(value, layouts)

    def reshard(
        self, src: Sequence[Layout], dst: Sequence[Layout], value: Value, grad: bool
    ) -> np.ndarray:
        self.asked += len(src) * len(dst)
        return super().reshard(src, dst, value, grad)


def _work(layers: int, share: bool) -> tuple[int, int, int]:
    """Problem nodes, edges, and prices of a stack of equal layers."""
    graph = _stack((layers, 64))
    rules, prices = rules_of(graph), _Counting(MESH, preset("h100"))
    built = build_problem(
        graph,
        rules,
        MESH,
        prices,
        output_layouts=output_choices(graph, MESH, "auto"),
        share=find_blocks(graph, rules).representatives() if share else None,
    )
    assert len(built.strategies) == sum(1 for _ in graph.calls)
    return len(built.problem.nodes), len(built.problem.edges), prices.asked


def test_the_work_does_not_grow_with_the_number_of_layers() -> None:
    assert _work(8, True) == _work(96, True)
    assert _work(96, False)[0] > 8 * _work(8, False)[0]


def test_equal_calls_share_their_rule() -> None:
    rules = rules_of(_stack((8, 64)))
    assert rules["h1"] is rules["h8"]
    assert len({id(rule) for rule in rules.values()}) == 7


# -- hints ----------------------------------------------------------------------------------------

COLUMNS = ((None, None, None), (None, "tp"))


def _strategies(searched: Searched, traced: Traced, suffix: str) -> list[str]:
    """What was chosen for the products in the modules of a name, in the order of the layers."""
    return [
        str(searched.assignment.strategies[n.name])
        for n in traced.graph.calls
        if n.origin.module.endswith(suffix) and n.op == "autopar.addmm_nd"
    ]


def test_a_block_with_a_hint_of_its_own_is_planned_apart() -> None:
    traced = _traced("gpt2", 3, (("transformer.h.1.mlp.c_fc", COLUMNS),))
    shared, full = _search(traced, True), _search(traced, False)
    first, hinted, last = _strategies(shared, traced, "mlp.c_fc")
    assert hinted == "dp:I tp:o" or hinted == "dp:R tp:o"
    assert first == last
    index = {name: found[0] for name, found in shared.built.strategies.items()}
    (run,) = _blocks(traced.graph).runs
    apart = [[index[n] for n in names[: run.period]] for names in run.copies]
    assert apart[0] == apart[2] and not set(apart[0]) & set(apart[1])
    cost, _ = evaluate(full.built.problem, full.built.choice(shared.assignment))
    assert cost == pytest.approx(shared.solution.cost, rel=1e-9)


@pytest.mark.parametrize("mode", ["auto", "semi_auto"])
def test_blocks_with_equal_hints_share(mode: str) -> None:
    traced = _traced("gpt2", 3, (("transformer.h.*.mlp.c_fc", COLUMNS),))
    shared = _search(traced, True, mode)
    chosen = _strategies(shared, traced, "mlp.c_fc")
    assert len(chosen) == 3 and len(set(chosen)) == 1
    index = [shared.built.strategies[n.name][0] for n in traced.graph.calls]
    assert len(set(index)) < len(index)


def test_parameters_that_are_stored_differently_do_not_share() -> None:
    traced = _traced("gpt2", 2)
    name = "transformer.h.{}.mlp.c_fc.weight"
    pinned = {name.format(0): Layout.make([["dp"], []]), name.format(1): Layout.whole(2)}
    shared = pipeline.decide(
        traced.placed, MESH, preset("h100"), mode="auto", outputs="auto", pinned=pinned
    )
    layouts = {n.target: shared.assignment.sources[n.name] for n in traced.graph.sources("param")}
    assert {target: layouts[target] for target in pinned} == pinned


# -- errors ---------------------------------------------------------------------------------------


def test_nodes_that_differ_cannot_share() -> None:
    graph = _stack((2, 64))
    prices = DevicePrices(MESH, preset("h100"))
    outputs = output_choices(graph, MESH, "auto")
    for other, model in (("d2", "h1"), ("up2", "down1")):
        with pytest.raises(PlanError, match=f"'{other}' .*cannot copy '{model}'"):
            build_problem(
                graph, rules_of(graph), MESH, prices, output_layouts=outputs, share={other: model}
            )


def test_a_plan_whose_copies_differ_is_no_choice_of_the_shared_problem() -> None:
    graph = _stack((3, 64))
    shared, full = _problem(graph, True), _problem(graph, False)
    choice = [0] * len(full.problem.nodes)
    choice[full.strategies["g2"][0]] = 1
    with pytest.raises(PlanError, match=r"assignment of 'g2': .* other copies"):
        shared.choice(full.assignment(MESH, choice))
