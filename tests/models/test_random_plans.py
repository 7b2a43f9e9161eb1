"""Whole models under plans drawn at random: right whatever the plan, if every piece is right.

Loss, logits, every gradient, every buffer, and agreement between ranks that hold copies.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from autopar.compiler import Request, Traced, trace_model
from autopar.ir.mesh import Mesh
from autopar.verification import verify_plan
from random_plans import VERIFIED, random_plan
from zoo import Example, build

MESHES = (Mesh((("dp", 2), ("tp", 2))), Mesh((("x", 4),)))
#: The largest error that passes. Llama's RMS norm and GPT-2's loss compute in float32 by their
#: own code; everything else is float64 throughout.
TOLERANCES = {"gpt2": 1e-6, "llama": 1e-6, "bert": 1e-9, "vit": 1e-9, "resnet": 1e-9}
CASES = [(name, mesh) for name in TOLERANCES for mesh in MESHES]
#: Plans per model and mesh: in the quick run, in the whole one, and in a thorough one.
QUICK = 2
FULL = 6
THOROUGH = 22


def _request(mesh: Mesh) -> Request:
    return Request.make(mesh, None, None, None, "sharded")


@lru_cache(maxsize=1)
def _traced(name: str) -> tuple[Example, Traced]:
    """One trace serves every mesh: the graph does not depend on it where there are no hints."""
    torch.set_num_threads(1)
    model, call = build(name)
    return (model, call), trace_model(model, (), call, _request(MESHES[0]))


def check_plans(name: str, mesh: Mesh, seeds: range) -> None:
    (model, call), traced = _traced(name)
    request = _request(mesh)
    drawn = set()
    for seed in seeds:
        plan = random_plan(traced, request, seed)
        drawn.add(str(plan.assignment))
        report = verify_plan(model, (), call, traced, plan, request, TOLERANCES[name])
        assert report.ok, f"seed {seed} of {name} on {mesh}:\n{report}"
        kinds = {check.kind for check in report.checks}
        assert kinds == {"output", "gradient", *(["buffer"] if name == "resnet" else [])}
        VERIFIED[name] += 1
    assert len(drawn) == len(seeds), "the same plan was drawn twice"


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=lambda v: str(v))
def test_a_few_random_plans(name: str, mesh: Mesh) -> None:
    check_plans(name, mesh, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=lambda v: str(v))
def test_many_random_plans(name: str, mesh: Mesh, thorough: bool) -> None:
    check_plans(name, mesh, range(QUICK, QUICK + (THOROUGH if thorough else FULL)))
