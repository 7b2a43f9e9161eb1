"""What every rank checks of a mesh that is chosen for a topology; see `test_mesh_search.py`."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import autopar
from autopar.passes.device import COLLECTIVES, Link, Measure
from devices import slow_device
from ranks import main
from zoo import build

#: So slow that ranks of one host should share what they have before they send anything.
NETWORK = Link("network", tuple((kind, (Measure(2, 0.0, 2e7),)) for kind in COLLECTIVES))


def check_train(rank: int, world: int) -> None:
    """One plan on every rank, on a mesh that none of them was given, and one step as alone."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, call = build("mlp")
    alone = copy.deepcopy(model)
    parallel = autopar.autoparallelize(
        model,
        kwargs=call,
        mesh=world,
        topology=autopar.Topology(2, world // 2, inter=NETWORK),
        device=slow_device(),
    )
    plan = parallel.plan
    assert {option.mesh.size for option in plan.meshes} == {world} and len(plan.meshes) > 1
    assert plan.meshes[0].mesh == plan.mesh == parallel.mesh
    held: list[object] = [None] * world
    dist.all_gather_object(held, plan.to_json())
    assert all(other == held[0] for other in held)
    loss, expected = parallel(**call)[0], alone(**call)[0]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in alone.named_parameters():
        grad = parallel.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, parameter.grad)


def check_refuse(rank: int, world: int) -> None:
    """What has no plan on any mesh is refused on every rank, with the reasons."""
    model, call = build("mlp")
    try:
        autopar.autoparallelize(
            model,
            kwargs=call,
            topology=autopar.Topology(1, world),
            hints={"nowhere": ((1, 1),)},
        )
    except autopar.PlanError as error:
        assert "no mesh" in str(error) and "nowhere" in str(error), error
    else:
        raise AssertionError("no error")


CHECKS = {"train": check_train, "refuse": check_refuse}

if __name__ == "__main__":
    main(CHECKS)
