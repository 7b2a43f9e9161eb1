"""Traffic goes where it is fast: on a mesh with one fast and one slow axis, in either order."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from autopar.compiler import Request, Traced, trace_model
from autopar.ir.mesh import Mesh
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.baselines import baseline_assignments
from autopar.passes.communication import collectives_of
from autopar.passes.device import COLLECTIVES, Device, Link, Measure, device_for
from autopar.passes.overlap import hidden_by
from autopar.passes.place_hints import Placed
from autopar.passes.prices import DevicePrices
from autopar.passes.search import Searched
from autopar.passes.solver import evaluate

#: The inner axis has ten times the outer one's bandwidth.
FAST, SLOW = 100e9, 10e9
MESHES = [{"outer": 2, "inner": 8}, {"outer": 4, "inner": 4}]


def _device(mesh: Mesh, bandwidth: dict[str, float]) -> Device:
    """An H100 on which each axis has a link of its own."""
    device = device_for("h100", mesh)
    links = tuple(
        Link(axis, tuple((kind, (Measure(2, 1e-5, rate),)) for kind in COLLECTIVES))
        for axis, rate in bandwidth.items()
    )
    fields = {**device.__dict__, "links": (*device.links, *links)}
    fields = {name: value for name, value in fields.items() if name in Device.__annotations__}
    return device_for(Device(**fields), mesh, {axis: axis for axis in bandwidth})


def _request(sizes: dict[str, int], *, swapped: bool = False) -> Request:
    mesh = Mesh.of(sizes)
    outer, inner = mesh.names
    rates = {outer: FAST, inner: SLOW} if swapped else {outer: SLOW, inner: FAST}
    return Request.make(mesh, None, None, _device(mesh, rates), "auto")


@cache
def _traced() -> Traced:
    """Two blocks of GPT-2 medium, with a vocabulary that divides."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    with torch.device("meta"):
        config = GPT2Config(
            vocab_size=50304, n_embd=1024, n_layer=2, n_head=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(16, 1024, dtype=torch.long)
    request = _request(MESHES[0])
    return trace_model(model, (), {"input_ids": ids, "labels": ids}, request)


def _decide(request: Request) -> Searched:
    return pipeline.decide(
        _traced().placed, request.mesh, request.device, mode="auto", outputs="auto"
    )


def _bytes_in_blocks(request: Request, assignment: Assignment) -> Counter[str]:
    """Bytes of the tensors that the blocks' collectives work on, by axis."""
    graph = pipeline.partitioned(_traced().graph, assignment, request.device)
    blocks = {n.name for n in _traced().graph.calls if ".h." in n.origin.module}
    found: Counter[str] = Counter()
    for c in collectives_of(graph, _traced().rules, assignment):
        if c.at in blocks:
            found.update(dict.fromkeys(c.axes, c.nbytes))
    return found


#: Whether the figures are swapped, the axis that is fast then, and the other.
FIGURES = pytest.mark.parametrize(
    ("swapped", "fast", "slow"), [(False, "inner", "outer"), (True, "outer", "inner")]
)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@FIGURES
def test_most_bytes_move_on_the_fast_axis(
    sizes: dict[str, int], swapped: bool, fast: str, slow: str
) -> None:
    """The slow one may split products, too: what is summed over it is a piece by then."""
    request = _request(sizes, swapped=swapped)
    moved = _bytes_in_blocks(request, _decide(request).assignment)
    assert moved[fast] > 2 * moved[slow], moved


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@FIGURES
def test_megatrons_split_is_cheaper_on_the_fast_axis(
    sizes: dict[str, int], swapped: bool, fast: str, slow: str
) -> None:
    request, traced = _request(sizes, swapped=swapped), _traced()
    prices = DevicePrices(request.mesh, request.device)
    free = _decide(request)
    found = baseline_assignments(
        Placed(traced.graph), traced.rules, request.mesh, prices, built=free.built
    ).found
    seconds = {
        axis: min(
            found[f"data parallel on {other}, {scheme} on {axis}"].solution.cost
            for scheme in ("tensor parallel", "tensor + sequence parallel")
        )
        for axis, other in ((fast, slow), (slow, fast))
    }
    assert free.solution.cost <= seconds[fast] < seconds[slow], seconds


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_under_the_true_figures_no_plan_for_other_figures_is_faster(
    sizes: dict[str, int], swapped: bool
) -> None:
    true = _decide(_request(sizes, swapped=swapped))
    other = _decide(_request(sizes, swapped=not swapped))
    problem, parts = true.built.problem, true.built.parts
    choice = true.built.choice(other.assignment)
    cost = evaluate(problem, choice)[0] - hidden_by(problem, parts, choice).hidden
    assert true.solution.cost < cost
