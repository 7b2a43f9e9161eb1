"""The search over meshes: one trace, every candidate, the best plan."""

from __future__ import annotations

from pathlib import Path
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
from ranks import run_ranks
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


# -- a count of ranks and a topology in one call ---------------------------------------------------


def _plan(mesh: Any, topology: Any, **options: Any) -> autopar.Plan:
    torch.set_num_threads(1)
    model, call = build("mlp")
    return autopar.plan(
        model, (), call, mesh=mesh, topology=topology, device=slow_device(), **options
    )


def test_a_count_and_a_topology_are_planned_in_one_call(tmp_path: Path) -> None:
    topology = Topology(2, 4)
    plan = _plan(8, topology)
    assert plan == _plan(None, topology)
    found = _search("mlp", topology, device=slow_device())
    assert plan.mesh == found.mesh and plan.seconds == found.plan.seconds
    assert plan.device.devices_per_host == 4
    assert {option.mesh.sizes for option in plan.meshes} == {(8,), (2, 4), (4, 2), (2, 2, 2)}
    best, *others = plan.meshes
    assert best.mesh == plan.mesh and best.seconds == plan.seconds
    assert all(o.seconds is not None and o.seconds >= best.seconds * (1 - 1e-6) for o in others)
    links = {option.mesh.sizes: option.links for option in plan.meshes}
    assert links[2, 4] == ("inter", "intra") and links[8,] == ("inter",)
    assert "meshes:" in str(plan) and "x=2 (inter) y=4 (intra)" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    assert plan.compare().mesh == plan.mesh


def test_a_given_mesh_is_priced_where_it_stands() -> None:
    """The same mesh within one host and across hosts of two, over a network of its own."""
    network = Link("network", tuple((kind, (Measure(2, 1e-3, 1e5),)) for kind in COLLECTIVES))
    mesh = {"dp": 2, "tp": 2}
    here, there = _plan(mesh, Topology(1, 4)), _plan(mesh, Topology(2, 2, inter=network))
    assert here.mesh == there.mesh == autopar.Mesh.of(mesh)
    assert here.seconds < there.seconds and not here.meshes


@pytest.mark.parametrize(
    ("mesh", "topology", "message"),
    [
        (8, Topology(3, 2), r"8 ranks, but the topology has 6 devices \(3 hosts of 2 devices\)"),
        ({"dp": 2, "tp": 2}, Topology(2, 4), "4 ranks, but the topology has 8 devices"),
        (8, 8, "topology: expected an autopar.Topology, got int 8"),
        (None, None, "give the mesh to plan for, or a topology"),
    ],
)
def test_a_topology_that_does_not_fit_is_refused(mesh: Any, topology: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        _plan(mesh, topology)


def test_choosing_a_mesh_takes_an_example_call() -> None:
    model, _ = build("mlp")
    with pytest.raises(MeshError, match="takes an example call"):
        autopar.autoparallelize(model, topology=Topology(1, 1))


@pytest.mark.slow
def test_ranks_agree_on_the_mesh_and_train_on_it() -> None:
    run_ranks(Path(__file__).with_name("topology_worker.py"), 4, "train", "refuse", limit_s=240)
