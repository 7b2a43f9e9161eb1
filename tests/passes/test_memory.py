"""Predicted memory: the timeline of a step against real tensors, and against the problem's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.compiler import Request, Traced, lower_plan, make_plan, trace_model
from autopar.dry_run import dry_context, dry_operators
from autopar.ir.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.memory_report import CONTRIBUTORS, memory_report, parse_size
from autopar.passes.memory.simulation import memory_timeline
from autopar.passes.stand_ins import callable_of
from live_bytes import OPTIMIZERS, peak_of_step

#: How far a prediction may be off, as a fraction of what is really used.
TOLERANCE = 0.02

MESH = Mesh.of({"dp": 2, "tp": 2})


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the models ------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 128)
        self.head = nn.Linear(128, 12)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.nn.functional.gelu(self.down(torch.relu(self.up(x))))
        scores = self.head(hidden)
        return nn.functional.cross_entropy(scores, target), scores


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    return Mlp(), {"x": torch.randn(512, 64), "target": torch.randint(12, (512,))}


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=504, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    ids = torch.randint(504, (8, 64))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def gpt2_dropout() -> tuple[nn.Module, dict[str, Any]]:
    return gpt2(0.1)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=504, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(504, (8, 64))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2],
        layer_type="bottleneck", num_labels=6,
    )  # fmt: skip
    images = torch.randn(8, 3, 64, 64)
    return ResNetForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(6, (8,)),
    }


MODELS = {f.__name__: f for f in (mlp, gpt2, gpt2_dropout, llama, resnet)}

MEGATRON = {
    "transformer.h.*.mlp.c_fc": (("dp", None, None), (None, "tp")),
    "transformer.h.*.mlp.c_proj": (("dp", None, "tp"), ("tp", None)),
}


def traced_model(
    name: str, mesh: Mesh, mode: str | None = None, hints: dict | None = None, device: str = "cpu"
) -> tuple[Traced, Request, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, call = MODELS[name]()
    request = Request.make(mesh, mode, hints, device, "auto")
    return trace_model(model.train(), (), call, request), request, model, call


# --- against real tensors --------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_an_mlp_uses_what_is_predicted_under_every_optimizer(optimizer: str) -> None:
    _check_one_device("mlp", optimizer)


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_models_use_what_is_predicted(name: str) -> None:
    _check_one_device(name, "adam")


def _check_one_device(name: str, optimizer: str) -> None:
    alone = Mesh.of({"dp": 1})
    traced, _, model, call = traced_model(name, alone)
    predicted = memory_timeline(traced.graph, callable_of, optimizer=optimizer)
    assert not predicted.assumed
    real = peak_of_step(traced, model, call, traced.graph, optimizer, alone, dry_context(alone))
    assert predicted.peak == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "mode", "hints"),
    [
        ("mlp", "auto", None),
        ("mlp", "data_parallel", None),
        ("gpt2", "auto", None),
        ("gpt2_dropout", "semi_auto", MEGATRON),
        ("gpt2_dropout", "data_parallel", None),
        ("llama", "auto", None),
        ("resnet", "auto", None),
        ("resnet", "data_parallel", None),
    ],
)
def test_one_rank_of_a_plan_uses_what_is_predicted(
    name: str, mode: str, hints: dict | None
) -> None:
    traced, request, model, call = traced_model(name, MESH, mode, hints)
    graph = lower_plan(traced, make_plan(traced, request), request)
    backend = request.device.backend
    predicted = memory_timeline(graph, dry_operators(MESH, backend))
    assert not predicted.assumed
    real = peak_of_step(traced, model, call, graph, "adam", MESH, dry_context(MESH, backend))
    assert predicted.peak == pytest.approx(real, rel=TOLERANCE)


# --- the timeline ----------------------------------------------------------------------------

CHAIN = """
%w : f32[16, 8] grad = param "w"
%x : f32[4, 8] = input "x"
%h : f32[4, 16] grad = aten.linear.default(%x, %w)
%t : f32[16, 4] grad = aten.t.default(%h)
%y : f32[16, 4] grad = aten.tanh.default(%t)
%s : f32[] grad = aten.sum.default(%y)
return %s
"""


def test_the_timeline_of_a_chain_is_the_one_drawn_by_hand() -> None:
    timeline = memory_timeline(parse_graph(CHAIN), callable_of, optimizer="momentum")
    w, x, h = 16 * 8 * 4, 4 * 8 * 4, 4 * 16 * 4
    live = {(i.kind, i.name): (i.nbytes, i.start, i.end) for i in timeline.held}
    assert live["parameters", "w"] == (w, 0, 13)
    assert live["optimizer", "w"] == (w, 0, 13)
    assert live["inputs", "x"] == (x, 0, 13)
    # The view keeps the storage of %h alive until tanh is done; nothing saves it.
    assert live["activations", "h"] == (h, 2, 5)
    # tanh saves its result, until its own backward at 2 * 6 - 1 - 4.
    assert live["activations", "y"] == (h, 4, 8)
    # The gradient of a sum is one number, expanded; that of %t is a tensor, and %h's a view of it.
    assert live["transients", "t"] == (h, 7, 10)
    assert live["gradients", "w"] == (w, 9, 13)
    assert timeline.total.tolist()[:2] == [2 * w + x] * 2
    assert timeline.total[12] == 3 * w + x + 4
    assert timeline.peak == timeline.total.max() == sum(i.nbytes for i in timeline.at_peak)
    assert sum(timeline.kinds_at_peak.values()) == timeline.peak


GATHER = '("autopar.all_gather", ("a",), ((0, "I"), (0, "I")))'
REPLICATE = '("autopar.to_replicate", ("a",), ((), ()))'
BUCKET = f"""
mesh a=2
%p : f32[64@a, 64] grad = param "p"
%q : f32[64@a, 64] grad = param "q"
%p_1 : f32[64, 64] grad rep(a), %q_1 : f32[64, 64] grad rep(a) =
    autopar.fused((%p, %q), ({GATHER}, {REPLICATE}))
%s : f32[64, 64] grad rep(a) = aten.mul.Tensor(%p_1, %q_1)
return %s
"""


def test_gradients_go_when_their_bucket_has_started() -> None:
    operators = dry_operators(Mesh.of({"a": 2}))
    graph = parse_graph(BUCKET.replace("\n    ", " "))
    timeline = memory_timeline(graph, operators, optimizer="none")
    (backward,) = (h for h in timeline.held if h.kind == "workspace" and h.start == 5)
    whole = 64 * 64 * 4
    # First the two gradients and the buffer that they are copied to; then the buffer and the two
    # halves that are kept. Beyond the gradients and the halves that leaves half the buffer.
    assert backward.nbytes == 2 * whole - whole


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"optimizer: expected one of none, sgd.*got 'lion'"):
        memory_timeline(parse_graph(CHAIN), callable_of, optimizer="lion")


FOREIGN = """
%w : f32[16, 8] grad = param "w"
%y : f32[16, 8] grad = autopar.unheard_of(%w)
%s : f32[] grad = aten.sum.default(%y)
return %s
"""


def test_what_cannot_be_observed_is_named_and_counted_in_full() -> None:
    timeline = memory_timeline(parse_graph(FOREIGN), callable_of, optimizer="none")
    assert timeline.assumed == ("autopar.unheard_of",)
    (y,) = [i for i in timeline.held if i.name == "y" and i.kind == "activations"]
    assert (y.start, y.end) == (1, 5)


# --- the report ------------------------------------------------------------------------------


def test_a_report_names_the_modules_that_hold_most() -> None:
    traced, _, _, _ = traced_model("gpt2", Mesh.of({"dp": 1}))
    report = memory_report(traced.graph, "sgd")
    text = str(report)
    assert "optimizer sgd: peak" in text and "in the backward" in text
    top = report.contributors[:CONTRIBUTORS]
    assert [c.nbytes for c in top] == sorted((c.nbytes for c in top), reverse=True)
    assert sum(c.nbytes for c in report.contributors) == report.peak
    assert {"transformer.h.0.mlp.act", "transformer.h.2.mlp.act"} <= {c.module for c in top}
    assert all(str(c) in text for c in top)
    assert "optimizer   " not in text  # plain SGD has no state


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 512),
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5kib", 1536),
        ("2 TB", 2 * 10**12),
    ],
)
def test_sizes_are_read(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", [0, -1, True, None, 1.5, "", "80", "GB", "80XB", "-1GB", "0GB"])
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(PlanError, match=r"memory size: got .*expected a positive number of bytes"):
        parse_size(size)
