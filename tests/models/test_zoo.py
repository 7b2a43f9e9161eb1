"""The model zoo: every model is traced, planned, and equals itself on one device.

One trace of each mode serves all plans of it: the searched one and some drawn at random. Where
both modes have one graph it is checked once. With `--thorough` (`make zoo`, hours) that is every
model of the zoo, on 2x2 and on 3 ranks (hardly anything divides), with five random plans each.
"""

from __future__ import annotations

import pytest
import torch

from autopar.compiler import Request, Traced, make_plan, trace_model
from autopar.ir.mesh import Mesh
from autopar.ir.text import print_graph
from autopar.verification import verify_plan
from model_zoo import CHECKED, MODELS, QUICK, build_entry
from model_zoo.survey import survey
from random_plans import random_plan

MESH, UNEVEN = Mesh.of({"dp": 2, "tp": 2}), Mesh.of({"x": 3})
#: Plans drawn at random for each graph, beside the searched one.
RANDOM_PLANS, MANY_RANDOM_PLANS = 1, 5
#: Largest error of a model that computes in double precision throughout, of one that goes through
#: single precision somewhere, and of one that is in single precision.
EXACT, MIXED, SINGLE = 1e-9, 5e-6, 1e-4

#: The largest share of a model's work in calls that are never split.
LEFT_WHOLE = 0.01


def _request(mesh: Mesh) -> Request:
    return Request.make(mesh, None, None, None, "sharded")


def _tolerance(traced: Traced, double: bool) -> float:
    if not double:
        return SINGLE
    dtypes = {v.dtype for node in traced.graph.nodes for v in node.results}
    return MIXED if torch.float32 in dtypes or torch.complex64 in dtypes else EXACT


def check_model(name: str, mesh: Mesh, random_plans: int) -> None:
    """Train and eval mode of a model, under the searched plan and random ones."""
    entry, request = MODELS[name], _request(mesh)
    seen: set[str] = set()
    for mode in entry.modes:
        model, call = build_entry(entry, mode)
        traced = trace_model(model, (), call, request)
        text = print_graph(traced.graph)
        if text in seen:
            continue
        seen.add(text)
        share = 1 - survey(traced).split
        assert share <= LEFT_WHOLE, f"{share:.2%} of the work is never split"
        tolerance = _tolerance(traced, entry.double)
        plans = [make_plan(traced, request)]
        plans += [random_plan(traced, request, seed) for seed in range(random_plans)]
        for number, plan in enumerate(plans):
            report = verify_plan(model, (), call, traced, plan, request, tolerance)
            assert report.ok, f"plan {number} of {name} in {mode} mode:\n{report}"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", QUICK)
def test_a_few_models_equal_themselves(name: str) -> None:
    check_model(name, MESH, RANDOM_PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CHECKED if n not in QUICK])
def test_every_model_equals_itself(name: str) -> None:
    check_model(name, MESH, RANDOM_PLANS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "entry_name" in metafunc.fixturenames:
        thorough = metafunc.config.getoption("--thorough")
        metafunc.parametrize("mesh", [MESH, UNEVEN], ids=str)
        metafunc.parametrize("entry_name", MODELS if thorough else ())


@pytest.mark.slow
def test_every_plan_of_every_model(entry_name: str, mesh: Mesh) -> None:
    check_model(entry_name, mesh, MANY_RANDOM_PLANS)
