"""The search over meshes: one trace, every candidate, the best plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar import compiler, mesh_search
from autopar.ir.errors import MeshError, PlanError
from autopar.mesh_search import MeshSearch, search_meshes
from autopar.passes.device import COLLECTIVES, Link, Measure
from autopar.passes.topology import Topology
from devices import slow_device
from zoo import Mlp, build


def _search(name: str, devices: int | Topology, **options: Any) -> MeshSearch:
    torch.set_num_threads(1)
    model, call = build(name)
    return search_meshes(model, (), call, devices=devices, **options)


def test_the_best_candidate_is_what_planning_each_mesh_gives() -> None:
    torch.set_num_threads(1)
    topology = Topology(2, 2)
    found = _search("mlp", topology, device=slow_device())
    model, call = build("mlp")
    seconds = {
        candidate.mesh: autopar.plan(
            model, (), call, mesh=candidate.mesh, device=found.device
        ).seconds
        for candidate in found.candidates
    }
    assert set(seconds.values()) == {c.plan.seconds for c in found.candidates if c.plan}
    assert found.plan.seconds == pytest.approx(min(seconds.values()))
    assert found.plan.mesh == found.mesh
    assert found.plan.device == found.device and found.device.devices_per_host == 2


def test_the_model_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []

    def trace(*args: Any) -> Any:
        traces.append(args)
        return original(*args)

    original = compiler.trace
    monkeypatch.setattr(compiler, "trace", trace)
    found = _search("mlp", 8, device="h100")
    assert len(found.candidates) == 4 and len(traces) == 1


def test_equal_times_prefer_fewer_axes() -> None:
    """On one host of free links a second axis gains nothing."""
    found = _search("mlp", 4, device="h100")
    assert found.mesh.sizes == (4,)
    assert found.candidates[1].plan is not None
    assert found.plan.seconds == pytest.approx(found.candidates[1].plan.seconds)


def test_a_slow_network_makes_the_hosts_an_axis_of_their_own() -> None:
    """Splitting over all ranks alike would send everything over the slow link."""
    network = Link("network", tuple((kind, (Measure(2, 0.0, 2e7),)) for kind in COLLECTIVES))
    topology = Topology(2, 2, inter=network)
    found = _search("llama", topology, device=slow_device())
    by_sizes = {c.mesh.sizes: c.plan.seconds for c in found.candidates if c.plan}
    assert found.mesh.sizes == (2, 2)
    assert by_sizes[2, 2] < by_sizes[4,]


def test_hints_that_a_mesh_cannot_meet_leave_it_without_a_plan() -> None:
    found = _search("mlp", 4, device="h100", hints={"fc1": ((2, 1), (2, 1))})
    assert found.mesh.sizes == (2, 2)
    without = [c for c in found.candidates if c.plan is None]
    assert [c.mesh.sizes for c in without] == [(4,)] and "fc1" in without[0].reason
    assert "fc1" in str(found) and "ms per step" in str(found)


def test_shard_marks_of_the_model_are_placed_on_every_mesh() -> None:
    torch.set_num_threads(1)
    model, call = build("mlp")
    assert isinstance(model, Mlp)
    autopar.shard(model.fc1, (("y", None), (None, None)))
    found = search_meshes(model, (), call, devices=4, device="h100")
    assert [c.mesh.sizes for c in found.candidates if c.plan] == [(2, 2)]


def test_no_mesh_with_a_plan_is_an_error_with_the_reasons() -> None:
    with pytest.raises(PlanError, match=r"no mesh of 1 host of 2 devices has a plan: .*nowhere"):
        _search("mlp", 2, hints={"nowhere": ((1, 1),)})


def test_devices_that_fit_no_hosts_are_refused() -> None:
    with pytest.raises(MeshError, match="9 devices do not fill hosts of 8"):
        _search("mlp", 9, device="h100")
    with pytest.raises(MeshError, match="expected a count or a Topology"):
        _search("mlp", "eight")  # type: ignore[arg-type]


def test_the_plan_runs_on_its_mesh() -> None:
    """One device: the candidate is the trivial mesh, and its plan is used as it is."""
    torch.set_num_threads(1)
    model, call = build("mlp")
    found = mesh_search.search_meshes(model, (), call, devices=1)
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=found.mesh, plan=found.plan)
    torch.testing.assert_close(parallel(**call)[0], build("mlp")[0](**call)[0])
