"""Operators of the runtime compute under autocast in what the operators they stand for do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.compiler import Request, trace_model
from autopar.ir.mesh import Mesh
from autopar.ir.reduced import is_parameter_cast
from autopar.verification import verify_plan
from random_plans import random_plan

MESH = Mesh((("a", 2), ("b", 2)))


class Mixed(nn.Module):
    """What is assisted: embedding, norms, attention, softmax, dropout, loss, extremum, mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.project, self.statistics = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.embed(ids))
        q = self.project(h).view(4, 6, 2, 4).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        gate = torch.softmax(self.project(h), -1)
        h = self.drop(h + attended.transpose(1, 2).reshape(4, 6, 8) * gate)
        scores = self.head(self.statistics(h.reshape(24, 8)))
        loss = nn.functional.cross_entropy(scores, labels.view(-1))
        return loss, scores, scores.amax(-1), scores.mean(-1)


def test_random_plans_under_autocast() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Mixed()
    call = (torch.randint(16, (4, 6)), torch.randint(12, (4, 6)))
    request = Request.make(MESH, None, None, None, "sharded")
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace_model(model, call, {}, request)
        assert any(is_parameter_cast(node) for node in traced.graph.calls)
        for seed in range(4):
            plan = random_plan(traced, request, seed)
            report = verify_plan(model, call, {}, traced, plan, request, 5e-2)
            assert report.ok, report


def test_the_loss_is_computed_in_single_precision() -> None:
    """Eager autocast casts the loss's operands up; in half precision it would be off by 1e-3."""
    from autopar.runtime.simulate import simulate

    torch.manual_seed(0)
    model, call = Mixed().eval(), (torch.randint(16, (4, 6)), torch.randint(12, (4, 6)))
    request = Request.make(MESH, None, None, None, "sharded")
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace_model(model, call, {}, request)
        expected = model(*call)[0]
    losses = [node for node in traced.graph.calls if "cross_entropy" in node.op]
    assert losses and losses[0].results[0].dtype == torch.float32 == expected.dtype
    from autopar.compiler import lower_plan

    for seed in range(3):
        plan = random_plan(traced, request, seed)
        graph = lower_plan(traced, plan, request)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        inputs = iter(call)
        sources = {
            n.name: next(inputs) if n.op == "input" else state[n.target].detach()
            for n in graph.nodes
            if n.is_source
        }
        got = simulate(graph, plan.assignment.mesh, sources, [None] * len(graph.outputs))
        assert got.outputs[0].dtype == torch.float32
