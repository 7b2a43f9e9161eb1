"""Mixed precision: casts that stand in the graph, what they save, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import (
    Request,
    Traced,
    describe_plan,
    lower_plan,
    make_plan,
    trace_model,
)
from autopar.ir.errors import InputError, PlanError
from autopar.ir.fused import CAST_STEP, FUSED
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.reduced import is_parameter_cast, reduced_in
from autopar.ir.text import print_graph
from autopar.ir.verify import verify_graph
from autopar.mixed import MixedPrecision
from autopar.passes.baselines import baseline_assignments
from autopar.passes.casts import explicit_casts
from autopar.passes.communication import collectives_of, fused_collectives
from autopar.passes.prices import DevicePrices
from autopar.plans import Plan
from autopar.runtime.counting import count_communication
from autopar.runtime.simulate import Simulated, simulate
from autopar.verification import verify_plan
from random_plans import random_plan

BF16 = MixedPrecision("bf16")
ALL_BF16 = MixedPrecision("bf16", "bf16")
FP16 = MixedPrecision("fp16")
DP = Mesh.of({"dp": 2})


class Block(nn.Module):
    """Products with a norm between them, a weight that is used twice, and one that is not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(16, 8), nn.Linear(8, 12)
        self.norm, self.down = nn.LayerNorm(12), nn.Linear(12, 8, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.down(torch.relu(self.norm(self.up(self.embed(ids)))))
        scores = nn.functional.linear(self.down(self.norm(self.up(h))), self.embed.weight)
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def example() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Block(), (torch.randint(16, (4, 6)), torch.randint(16, (4, 6)))


def request(mesh: Mesh, mixed: MixedPrecision | None, mode: str | None = None) -> Request:
    return Request.make(mesh, mode, None, "h100", "auto", mixed=mixed)


def scheme(traced: Traced, asked: Request, name: str) -> Plan:
    prices = DevicePrices(asked.mesh, asked.device)
    found = baseline_assignments(traced.placed, traced.rules, asked.mesh, prices).found[name]
    return describe_plan(traced, asked, found.assignment, "auto", 1.0, 1.0)


def run(graph: Graph, model: nn.Module, call: tuple[Tensor, ...], mesh: Mesh) -> Simulated:
    inputs = iter(call)
    parameters = dict(model.named_parameters())
    sources = {
        n.name: next(inputs) if n.op == "input" else parameters[n.target].detach().requires_grad_()
        for n in graph.nodes
        if n.is_source
    }
    return simulate(graph, mesh, sources, [torch.ones(()), None])


def named(graph: Graph, grads: Any) -> dict[str, Tensor]:
    return {n.target: grads[n.name] for n in graph.sources("param")}


# --- the pass ------------------------------------------------------------------------------------


def region_graph(call: str, *sources: str) -> Graph:
    return parse_graph("\n".join([*sources, f"{call}", "return %y"]) + "\n")


CPU = '{autocast=("cpu", bf16)}'


def test_casts_are_those_of_autocast() -> None:
    """Products in the low dtype, losses up, norms as they are: what `torch.autocast` does."""
    graph = region_graph(
        f"%y : bf16[6, 8] grad = aten.linear.default(%x, %w) {CPU}",
        '%w : f32[8, 4] grad = param "w"',
        '%x : f32[6, 4] = input "x"',
    )
    made = explicit_casts(graph)
    verify_graph(made, stage="traced")
    assert print_graph(made).splitlines()[2:] == [
        "%x_bf16 : bf16[6, 4]      = aten.to.dtype(%x, bf16)",
        "%w_bf16 : bf16[8, 4] grad = aten.to.dtype(%w, bf16) {reduced_in=f32}",
        "%y      : bf16[6, 8] grad = aten.linear.default(%x_bf16, %w_bf16)",
        "return %y",
    ]
    loss = region_graph(
        f"%y : f32[] grad = aten.mse_loss.default(%x, %t) {CPU}",
        '%x : bf16[6, 4] grad = input "x"',
        '%t : f32[6, 4] = input "t"',
    )
    (cast, call) = explicit_casts(loss).calls
    assert cast.args[1] == torch.float32 and [v.dtype for v in call.operands] == [torch.float32] * 2
    plain = region_graph(
        f"%y : bf16[6, 4] grad = aten.relu.default(%x) {CPU}", '%x : bf16[6, 4] grad = input "x"'
    )
    assert [n.op for n in explicit_casts(plain).calls] == ["aten.relu.default"]


def test_double_precision_is_left_alone() -> None:
    graph = region_graph(
        f"%y : f64[6, 8] grad = aten.linear.default(%x, %w) {CPU}",
        '%w : f64[8, 4] grad = param "w"',
        '%x : f64[6, 4] = input "x"',
    )
    assert [n.op for n in explicit_casts(graph).calls] == ["aten.linear.default"]


def test_a_foreign_operator_keeps_its_region() -> None:
    graph = region_graph(
        f"%y : f32[6, 4] = mine.operator.default(%x) {CPU}", '%x : f32[6, 4] = input "x"'
    )
    assert explicit_casts(graph) == graph


def test_one_cast_for_all_readers() -> None:
    model, call = example()
    traced = trace_model(model, call, {}, request(DP, BF16))
    casts = Counter(n.operands[0].name for n in traced.graph.calls if is_parameter_cast(n))
    assert casts == Counter(("embed_weight", "up_weight", "up_bias", "down_weight"))


# --- the same as one device ----------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [BF16, ALL_BF16, FP16], ids=str)
def test_random_plans(mixed: MixedPrecision) -> None:
    model, call = example()
    asked = request(Mesh.of({"a": 2, "b": 2}), mixed)
    traced = trace_model(model, call, {}, asked)
    for seed in range(4):
        plan = random_plan(traced, asked, seed)
        report = verify_plan(model, call, {}, traced, plan, asked, 3e-2)
        assert report.ok, report


def test_an_undivided_plan_is_exact() -> None:
    """Casts that stand in the graph compute bit for bit what autocast does."""
    model, call = example()
    report = autopar.verify(
        model, call, mesh=2, mode="stand_alone", mixed_precision="bf16", tolerance=0.0
    )
    assert report.ok, report


def test_gradients_are_summed_in_single_precision() -> None:
    """What ranks add up loses nothing: closer to the sum of exact terms than a sum in bfloat16."""
    model, call = example()
    errors = {}
    for mixed in (BF16, ALL_BF16):
        asked = request(DP, mixed)
        traced = trace_model(model, call, {}, asked)
        plan = scheme(traced, asked, "FSDP")
        graph = lower_plan(traced, plan, asked)
        grads = named(graph, run(graph, model, call, DP).grads)
        # The ranks' own terms: the halves of the batch, each as its mean's share.
        terms = []
        for half in (slice(0, 2), slice(2, 4)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = model(call[0][half], call[1][half])
            (loss / 2).backward()
            terms.append(model.up.weight.grad.double())
        exact = terms[0] + terms[1]
        errors[mixed.reduced] = float((grads["up.weight"] - exact).norm() / exact.norm())
    assert errors["fp32"] < errors["bf16"] / 2, errors


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [None, BF16, ALL_BF16], ids=str)
@pytest.mark.parametrize("name", ["data parallel", "FSDP", "tensor parallel"])
def test_ranks_send_what_is_planned(name: str, mixed: MixedPrecision | None) -> None:
    model, call = example()
    asked = request(DP, mixed)
    traced = trace_model(model, call, {}, asked)
    plan = scheme(traced, asked, name)
    graph = lower_plan(traced, plan, asked)
    with count_communication(0) as counted:
        run(graph, model, call, DP)
    planned = collectives_of(graph, traced.rules, plan.assignment)
    got, want = Counter(), Counter()
    for sent in counted.sent:
        got[sent.kind, sent.axes] += sent.nbytes
    for each in planned:
        want[each.kind, each.axes] += each.nbytes
    assert got == want


def sent_by_cast_buckets(mixed: MixedPrecision, zero: int = 0) -> dict[str, int]:
    """Bytes by kind of the buckets that cast."""
    model, call = example()
    asked = request(DP, mixed, "data_parallel" if zero else None)
    asked = replace(asked, zero=zero)
    traced = trace_model(model, call, {}, asked)
    plan = make_plan(traced, asked) if zero else scheme(traced, asked, "FSDP")
    graph = lower_plan(traced, plan, asked)
    found: Counter[str] = Counter()
    for node in graph.calls:
        if node.op == FUSED and any(op == CAST_STEP for op, *_ in node.args[1]):
            assert reduced_in(node) == mixed.reduce_dtype
            for each in fused_collectives(node, DP, ""):
                found[each.kind] += each.nbytes
    return dict(found)


@pytest.mark.parametrize("zero", [0, 3])
def test_half_the_bytes_are_gathered(zero: int) -> None:
    """FSDP and ZeRO gather cast parameters; gradients come back in the dtype that is asked for."""
    model, _ = example()
    # The table of the embedding is read as it is, too, and travels by itself.
    cast = sum(model.get_parameter(n).numel() for n in ("up.weight", "up.bias", "down.weight"))
    in_single = sent_by_cast_buckets(BF16, zero)
    assert in_single == {"all_gather": 2 * cast, "reduce_scatter": 4 * cast}
    in_half = sent_by_cast_buckets(ALL_BF16, zero)
    assert in_half == {"all_gather": 2 * cast, "reduce_scatter": 2 * cast}


def test_what_is_kept_is_counted_at_its_size() -> None:
    model, call = example()
    peaks = [
        autopar.plan(model, call, mesh=1, mixed_precision=mixed).memory("none").peak
        for mixed in (None, "bf16")
    ]
    assert peaks[1] < peaks[0]


# --- the user's side -----------------------------------------------------------------------------


def test_a_plan_says_and_keeps_it(tmp_path: Path) -> None:
    model, call = example()
    plan = autopar.plan(model, call, mesh=2, mixed_precision="bf16", reduce_dtype=torch.bfloat16)
    assert "mixed precision bf16, gradients summed in bf16" in str(plan)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan and read.mixed == ALL_BF16
    assert autopar.verify(model, call, mesh=2, plan=read).ok
    with pytest.raises(PlanError, match=r"asked for mixed precision fp16.*made for mixed"):
        autopar.verify(model, call, mesh=2, plan=read, mixed_precision="fp16")


def test_the_module_computes_in_it() -> None:
    """On one rank: outputs, gradients and dtypes are those of the model under autocast."""
    model, call = example()
    parallel = autopar.autoparallelize(model, call, mesh=1, mixed_precision="bf16")
    loss, scores = parallel(*call)
    loss.backward()
    model, _ = example()
    with torch.autocast("cpu", torch.bfloat16):
        expected, expected_scores = model(*call)
    expected.backward()
    assert scores.dtype == torch.bfloat16 and torch.equal(scores, expected_scores)
    for name, parameter in model.named_parameters():
        mine = parallel.get_parameter(name)
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-2, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(parallel(*call)[1], scores)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(InputError, match=r"autocast of torch\.float16 around"),
    ):
        parallel(*call)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mixed_precision": "half"}, "mixed_precision: expected one of .*'half'"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision: expected one of"),
        ({"reduce_dtype": torch.float32}, "reduce_dtype: .* without mixed_precision"),
        (
            {"mixed_precision": "bf16", "reduce_dtype": torch.float16},
            "reduce_dtype: expected torch.float32 or torch.bfloat16",
        ),
    ],
)
def test_misuse(given: dict[str, Any], words: str) -> None:
    model, call = example()
    with pytest.raises(PlanError, match=words):
        autopar.plan(model, call, mesh=2, **given)
