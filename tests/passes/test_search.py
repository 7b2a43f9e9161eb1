"""What the search finds, and that both ways of solving agree on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.compiler import Request, Traced, trace_model
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.communication import Collective, collectives_of
from autopar.passes.search import Searched
from zoo import ZOO, build

#: GPT-2 XL's width and batch; two of its blocks are enough to see what every block does.
WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 1600, 25, 2, 64, 1024


def _request(mesh: dict[str, int], hints: dict | None = None) -> Request:
    return Request.make(Mesh.of(mesh), None, hints, "h100", "auto")


def _search(traced: Traced, request: Request, mode: str, method: str = "auto") -> Searched:
    return pipeline.decide(
        traced.placed,
        request.mesh,
        request.device,
        mode=mode,  # type: ignore[arg-type]
        outputs="auto",
        method=method,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", sorted(ZOO))
def test_reduced_and_whole_solves_have_the_same_objective(name: str) -> None:
    model, call = build(name)
    request = _request({"dp": 2, "tp": 2})
    traced = trace_model(model, (), call, request)
    reduced = _search(traced, request, "auto", "auto").solution
    whole = _search(traced, request, "auto", "ilp").solution
    assert reduced.status == whole.status == "optimal"
    assert reduced.cost == pytest.approx(whole.cost, rel=1e-9)


def _gpt2_xl(request: Request) -> Traced:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(
                n_embd=WIDTH,
                n_layer=BLOCKS,
                n_head=HEADS,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return trace_model(model, (), {"input_ids": ids, "labels": ids}, request)


def _block_collectives(
    traced: Traced, request: Request, assignment: Assignment, block: int
) -> list[Collective]:
    """The large collectives that one block runs (biases and norms move a few kilobytes)."""
    graph = pipeline.partitioned(traced.graph, assignment, request.device)
    inside = {
        n.name
        for n in traced.graph.calls
        if n.origin.module.startswith(f"transformer.h.{block}.")
        or n.origin.module == f"transformer.h.{block}"
    }
    found = collectives_of(graph, traced.rules, assignment)
    return [c for c in found if c.at in inside and c.nbytes > 2**20]


def test_gpt2_xl_gathers_weights_on_the_fast_axis_and_only_pieces_of_them_on_the_slow_one() -> None:
    """At batch 64 most of a block's weights are smaller than its activations: gathering them wins.

    Megatron's column and row split would move four activations of 8 x 1024 x 1600 per block over
    the fast axis. Nothing may overlap here: what gradients take beside the backward pass is free.
    """
    request = _request({"slow": 8, "fast": 8})
    request = replace(request, device=replace(request.device, overlap=0.0))
    traced = _gpt2_xl(request)
    searched = _search(traced, request, "auto")
    assert searched.solution.status == "optimal"
    found = _block_collectives(traced, request, searched.assignment, 1)
    weights = {4 * WIDTH * n for n in (3 * WIDTH, WIDTH, 4 * WIDTH)}
    for kind, backward in (("all_gather", False), ("reduce_scatter", True)):
        mine = [c for c in found if (c.kind, c.axes, c.backward) == (kind, ("fast",), backward)]
        assert len([c for c in mine if c.nbytes in weights]) >= 3, (kind, found)
    for c in found:
        assert c.axes in (("slow",), ("fast",))
        assert c.axes == ("fast",) or c.nbytes in {w // 8 for w in weights}, c


def test_gradients_that_are_summed_beside_the_backward_pass_cost_nothing() -> None:
    """With overlap all sums of gradients are hidden, so that no activation travels any more."""
    request = _request({"slow": 8, "fast": 8})
    traced = _gpt2_xl(request)
    searched = _search(traced, request, "auto")
    assert 0 < searched.hiding.gradients == searched.hiding.hidden
    found = _block_collectives(traced, request, searched.assignment, 1)
    weights = {4 * WIDTH * n for n in (3 * WIDTH, WIDTH, 4 * WIDTH)}
    assert found and {c.nbytes for c in found} <= weights | {w // 8 for w in weights}
    # What is not hidden, the gathers, is on the fast axis.
    assert all(c.axes == ("fast",) for c in found if not c.backward)
    serial = replace(request, device=replace(request.device, overlap=0.0))
    assert searched.solution.cost < _search(traced, serial, "auto").solution.cost


MEGATRON = {
    "transformer.h.*.mlp.c_fc": (("slow", None, None), (None, "fast")),
    "transformer.h.*.mlp.c_proj": (("slow", None, "fast"), ("fast", None)),
}


def test_the_search_is_never_dearer_than_megatrons_split() -> None:
    request = _request({"slow": 8, "fast": 8})
    hinted = _request({"slow": 8, "fast": 8}, MEGATRON)
    free = _search(_gpt2_xl(request), request, "auto").solution
    megatron = _search(_gpt2_xl(hinted), hinted, "auto").solution
    assert free.cost < megatron.cost


def test_megatrons_split_is_found_where_activations_are_the_smaller_ones() -> None:
    """With one short sequence per slow rank a block's weights outweigh its activations."""
    from transformers import GPT2Config, GPT2LMHeadModel

    request = _request({"slow": 2, "fast": 4})
    with torch.device("meta"):
        model = GPT2LMHeadModel(
            GPT2Config(
                n_embd=WIDTH,
                n_layer=BLOCKS,
                n_head=20,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        ids = torch.zeros(2, 256, dtype=torch.long)
    traced = trace_model(model, (), {"input_ids": ids, "labels": ids}, request)
    assignment = _search(traced, request, "auto").assignment
    by_module = {n.origin.module: n for n in traced.graph.calls if n.op == "autopar.addmm_nd"}
    for block in range(BLOCKS):
        up = assignment.strategies[by_module[f"transformer.h.{block}.mlp.c_fc"].name]
        down = assignment.strategies[by_module[f"transformer.h.{block}.mlp.c_proj"].name]
        assert up.role["fast"] == "o" and down.role["fast"] == "i", (str(up), str(down))
        found = _block_collectives(traced, request, assignment, block)
        assert not [c for c in found if "fast" in c.axes and c.nbytes >= 4 * WIDTH * WIDTH]
