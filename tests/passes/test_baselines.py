"""The plans people write by hand are points of the search's problem, and look as they should."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.baseline_report import compare
from autopar.compiler import Request, Traced, describe_plan, trace_model
from autopar.ir.errors import MeshError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.layout import INVARIANT, Layout
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.baselines import Baselines, baseline_assignments
from autopar.passes.communication import collectives_of
from autopar.passes.device_presets import preset
from autopar.passes.overlap import hidden_by
from autopar.passes.prices import DevicePrices
from autopar.passes.schemes import schemes
from autopar.passes.search import Searched
from autopar.passes.solver import evaluate
from autopar.passes.tensor_pairs import find_pairs
from autopar.verification import verify_plan
from zoo import ZOO, build

MESHES: tuple[dict[str, int], ...] = ({"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4})
DP_TP = "data parallel on dp, tensor parallel on tp"


def _request(mesh: dict[str, int]) -> Request:
    return Request.make(Mesh.of(mesh), None, None, "h100", "auto")


def _solve(traced: Traced, request: Request) -> tuple[Searched, Baselines]:
    free = pipeline.decide(traced.placed, request.mesh, request.device, mode="auto", outputs="auto")
    prices = DevicePrices(request.mesh, request.device)
    found = baseline_assignments(
        traced.placed, traced.rules, request.mesh, prices, built=free.built
    )
    return free, found


@cache
def _zoo(name: str) -> Traced:
    torch.set_num_threads(1)
    model, call = build(name)
    return trace_model(model, (), call, _request(MESHES[0]))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", sorted(ZOO))
def test_no_baseline_is_cheaper_than_the_search(name: str, mesh: dict[str, int]) -> None:
    traced, request = _zoo(name), _request(mesh)
    free, baselines = _solve(traced, request)
    assert set(baselines.found) | set(baselines.skipped) == {
        str(scheme) for scheme in schemes(request.mesh)
    }
    assert "tensor parallel" in baselines.found
    for found in baselines.found.values():
        assert found.solution.status == "optimal"
        assert found.solution.cost >= free.solution.cost * (1 - 1e-9)
        # The very problem of the search gives the same assignment the same cost.
        choice = free.built.choice(found.assignment)
        cost, _ = evaluate(free.built.problem, choice)
        cost -= hidden_by(free.built.problem, free.built.parts, choice).hidden
        assert cost == pytest.approx(found.solution.cost, rel=1e-9)


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_every_baseline_trains_as_one_device_does(name: str) -> None:
    """Outputs and gradients, all ranks in this process."""
    traced, request = _zoo(name), _request({"dp": 2, "tp": 2})
    model, call = build(name)
    for scheme, found in _solve(traced, request)[1].found.items():
        cost = found.solution.cost
        plan = describe_plan(traced, request, found.assignment, "auto", cost, cost)
        report = verify_plan(model, (), call, traced, plan, request)
        assert report.ok, f"{scheme}\n{report}"


def test_a_scheme_that_does_not_fit_is_skipped_with_the_reason() -> None:
    traced, request = _zoo("llama"), _request({"dp": 2, "tp": 4})
    skipped = _solve(traced, request)[1].skipped
    assert skipped["data parallel"] == "the batch of 4 does not divide over 8 ranks"


def test_a_model_without_pairs_has_no_tensor_parallel_plan() -> None:
    request = _request({"dp": 2})
    traced = trace_model(nn.Linear(4, 4), (torch.zeros(4, 4),), {}, request)
    skipped = _solve(traced, request)[1].skipped
    assert "no two weight products" in skipped["tensor parallel"]


# --- what the schemes are -------------------------------------------------------------------------

#: A Llama whose shapes are those of a real one: two blocks are enough to see what each does.
WIDTH, INNER, VOCABULARY, BATCH, LENGTH = 1024, 2816, 32000, 16, 512


@cache
def _llama() -> tuple[Traced, Request, Baselines]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER,
        num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    request = _request({"dp": 2, "tp": 4})
    traced = trace_model(model, (), {"input_ids": ids, "labels": ids}, request)
    return traced, request, _solve(traced, request)[1]


def _parameters(graph: Graph, assignment: Assignment) -> dict[str, Layout]:
    return {n.target: assignment.sources[n.name] for n in graph.sources("param")}


def _block_collectives(assignment: Assignment) -> Counter[tuple[str, tuple[str, ...], bool]]:
    """Kind, axes and direction of the large collectives that the second block runs."""
    traced, request, _ = _llama()
    graph = pipeline.partitioned(traced.graph, assignment, request.device)
    inside = {
        n.name for n in traced.graph.calls if f"{n.origin.module}.".startswith("model.layers.1.")
    }
    found = collectives_of(graph, traced.rules, assignment)
    return Counter(
        (c.kind, c.axes, c.backward) for c in found if c.at in inside and c.nbytes > 2**17
    )


def test_pairs_of_llama_are_those_of_megatron() -> None:
    traced, request, _ = _llama()
    pairs = find_pairs(traced.graph, traced.rules, request.mesh, ("tp",))
    module = {n.name: n.origin.module.split(".", 3)[-1] for n in traced.graph.calls}
    assert Counter(module[name] for name in pairs.columns) == {
        f"{part}_proj": 2
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    }
    assert Counter(module[name] for name in pairs.rows) == {
        "self_attn.o_proj": 2,
        "mlp.down_proj": 2,
    }
    assert [module[name] for name in pairs.heads] == ["lm_head"]
    assert not pairs.fused


def test_key_heads_that_do_not_divide_are_not_split() -> None:
    traced, _, _ = _llama()
    mesh = Mesh.of({"tp": 8})  # 16 query heads, 4 key heads
    pairs = find_pairs(traced.graph, traced.rules, mesh, ("tp",))
    module = {n.name: n.origin.module.split(".", 3)[-1] for n in traced.graph.calls}
    assert {module[name] for name in pairs.columns} == {
        f"{part}_proj" for part in ("self_attn.q", "mlp.gate", "mlp.up")
    }


def test_fused_queries_keys_and_values_pair_with_the_row_alone() -> None:
    traced = _zoo("gpt2")
    pairs = find_pairs(traced.graph, traced.rules, Mesh.of({"tp": 2}), ("tp",))
    module = {n.name: n.origin.module for n in traced.graph.calls}
    for k in range(2):
        at = f"transformer.h.{k}"
        assert f"{at}.attn.c_proj" in {module[name] for name in pairs.rows}
        assert f"{at}.attn.c_attn" in {module[name] for name in pairs.fused}
        assert f"{at}.attn.c_attn" not in {module[name] for name in pairs.columns}


#: The dimension of a weight ``[out, in]`` that Megatron splits.
_MEGATRON = {f"{part}_proj": 0 for part in ("q", "k", "v", "gate", "up")}
_MEGATRON |= {"o_proj": 1, "down_proj": 1}


def test_tensor_parallel_sums_two_activations_per_block_and_direction() -> None:
    traced, _, baselines = _llama()
    assignment = baselines.found[DP_TP].assignment
    found = _block_collectives(assignment)
    assert {key: n for key, n in found.items() if key[1] == ("tp",)} == {
        ("all_reduce", ("tp",), False): 2,
        ("all_reduce", ("tp",), True): 2,
    }
    # One gradient sum per weight on the data axis: q, k, v, o, gate, up, down.
    assert found[("all_reduce", ("dp",), True)] == 7
    for name, layout in _parameters(traced.graph, assignment).items():
        assert layout.state("dp") == INVARIANT
        if name.startswith("model.layers."):
            assert layout.state("tp") == _MEGATRON.get(name.split(".")[-2], INVARIANT), name


def test_sequence_parallel_gathers_and_scatters_instead() -> None:
    _, _, baselines = _llama()
    name = "data parallel on dp, tensor + sequence parallel on tp"
    found = _block_collectives(baselines.found[name].assignment)
    assert {key: n for key, n in found.items() if key[1] == ("tp",)} == {
        (kind, ("tp",), backward): 2
        for kind in ("all_gather", "reduce_scatter")
        for backward in (False, True)
    }
    assert baselines.found[name].solution.cost < baselines.found[DP_TP].solution.cost


def test_fsdp_gathers_every_weight_and_scatters_its_gradient() -> None:
    traced, _, baselines = _llama()
    assignment = baselines.found["FSDP"].assignment
    for name, layout in _parameters(traced.graph, assignment).items():
        assert set(layout.split_axes) == {"dp", "tp"}, name
    found = _block_collectives(assignment)
    kinds: Counter[tuple[str, bool]] = Counter()
    for (kind, _, backward), n in found.items():
        kinds[kind, backward] += n
    assert kinds["all_gather", False] >= 7
    assert kinds["reduce_scatter", True] >= 7
    assert not kinds["all_reduce", False]


def test_data_parallel_only_sums_gradients() -> None:
    traced, _, baselines = _llama()
    assignment = baselines.found["data parallel"].assignment
    assert all(not v.split_axes for v in _parameters(traced.graph, assignment).values())
    found = _block_collectives(assignment)
    assert {(kind, backward) for kind, _, backward in found} == {("all_reduce", True)}


# --- the table ------------------------------------------------------------------------------------


def test_the_comparison_lists_the_plan_first_and_splits_its_time() -> None:
    torch.set_num_threads(1)
    model, call = build("mlp")
    table = compare(model, (), call, mesh={"dp": 2, "tp": 2}, device="h100")
    assert table.rows[0].name == "this plan" and table.rows[0].ratio == 1.0
    assert [r.seconds for r in table.rows] == sorted(r.seconds for r in table.rows)
    for row in table.rows:
        assert row.compute > 0 and row.communication >= -1e-12
        assert row.compute + row.communication == pytest.approx(row.seconds)
    assert table.row("FSDP").communication > table.row("data parallel").communication
    assert table.best_baseline is not None and table.best_baseline.name in str(table)
    with pytest.raises(KeyError, match="no row 'nothing'"):
        table.row("nothing")


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_gain_that_cannot_be_measured_is_left_alone(name: str) -> None:
    torch.set_num_threads(1)
    model, call = build(name)

    def planned(precision: float) -> autopar.Plan:
        device = replace(preset("h100"), precision=precision)
        return autopar.plan(model, (), call, mesh=MESHES[1], device=device)

    best = planned(0.0)
    baselines = compare(model, (), call, plan=best)
    in_order = [str(s) for s in schemes(best.assignment.mesh) if str(s) not in baselines.skipped]
    for precision in (1e-9, 0.02, 0.3, 1.0):
        plan = planned(precision)
        enough = (1 + precision) * best.seconds
        taken = next((n for n in in_order if baselines.row(n).seconds <= enough), "")
        as_good = baselines.row(taken).seconds <= best.seconds if taken else True
        notes = [note for note in plan.notes if "measured to" in note]
        assert plan.bound == best.bound
        if as_good:
            assert (plan.seconds, plan.assignment, notes) == (best.seconds, best.assignment, [])
            continue
        assert plan.seconds == baselines.row(taken).seconds <= enough
        assert len(notes) == 1 and notes[0].startswith(f"this is {taken}: ")
        assert f"{1 - best.seconds / plan.seconds:.2%} faster" in notes[0]
        shown = compare(model, (), call, plan=plan)
        assert shown.row("search without hints").seconds == best.seconds


def test_hints_and_limits_are_kept_whatever_the_precision() -> None:
    torch.set_num_threads(1)
    model, call = build("mlp")
    device = replace(preset("h100"), precision=1.0)
    hints = {"fc1": ((1, 1), (2, 1))}
    hinted = autopar.plan(model, (), call, mesh={"dp": 2}, device=device, hints=hints, mode="auto")
    row = next(row for row in hinted.rows if row.module == "fc1")
    assert "(2, 1)" in str(row.strategy)
    free = autopar.plan(model, (), call, mesh={"dp": 2}, device=device)
    peak = free.memory().peak
    limited = autopar.plan(model, (), call, mesh={"dp": 2}, device=device, memory=int(0.9 * peak))
    assert limited.memory().peak <= 0.9 * peak


def test_a_hinted_plan_stands_beside_the_search_without_hints() -> None:
    torch.set_num_threads(1)
    model, call = build("mlp")
    hints = {"fc1": ((2, 1), (1, 1))}
    table = compare(model, (), call, mesh={"dp": 2}, device="h100", hints=hints)
    free, plan = table.row("search without hints"), table.row("this plan")
    assert free.seconds < plan.seconds
    assert free.ratio < plan.ratio == 1.0


def test_a_plan_that_was_made_before_is_compared_on_its_own_mesh_and_device(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, call = build("mlp")
    plan = autopar.plan(model, (), call, mesh={"tp": 2}, device="a100", mode="data_parallel")
    plan.save(tmp_path / "plan.json")
    table = compare(model, (), call, plan=tmp_path / "plan.json")
    assert table.mesh == plan.mesh and table.device == "a100"
    assert table.row("this plan").seconds == plan.seconds
    assert table.row("search without hints").seconds < plan.seconds
    with pytest.raises(PlanError, match="made for another model"):
        compare(build("vit")[0], (), build("vit")[1], plan=plan)
    with pytest.raises(MeshError, match="give the mesh to plan for, or a plan"):
        compare(model, (), call)


def test_a_plan_compares_itself_and_one_from_a_file_says_how(tmp_path: Path) -> None:
    model, call = build("mlp")
    plan = autopar.plan(model, (), call, mesh={"dp": 2, "tp": 2}, device="h100")
    table = plan.compare()
    assert table.row("this plan").seconds == pytest.approx(plan.seconds)
    assert table.best_baseline is not None and table.best_baseline.ratio >= 1
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    with pytest.raises(autopar.PlanError, match=r"autopar\.compare"):
        loaded.compare()
    with pytest.raises(autopar.PlanError, match="autoparallelize"):
        loaded.memory()


def test_a_plan_reports_its_memory() -> None:
    model, call = build("mlp")
    plan = autopar.plan(model, (), call, mesh={"dp": 2, "tp": 2}, device="h100")
    report = plan.memory(optimizer="adam")
    held = sum(
        math.prod(layout.local_shape(model.get_parameter(name).shape, plan.assignment.mesh))
        for name, layout in plan.parameter_layouts.items()
    )
    assert report.timeline.kind_peaks["parameters"] == held * 8
    assert report.peak >= 4 * held * 8  # parameters, gradients and Adam's two moments
    with pytest.raises(autopar.PlanError, match="optimizer"):
        plan.memory(optimizer="lion")
