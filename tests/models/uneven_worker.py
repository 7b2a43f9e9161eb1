"""One rank of `test_uneven_plans.py`: sizes that three ranks do not divide, over gloo."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.compiler import Request, trace_model
from autopar.ir.local import is_uniform
from autopar.ir.mesh import Mesh
from autopar.runtime.groups import RankContext
from random_plans import random_plan
from ranks import main
from uneven_zoo import build

MESH = {"x": 3}
TOLERANCE = 1e-6


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_close(got: Any, want: Any, what: str) -> None:
    torch.testing.assert_close(
        whole(got).detach(),
        want.detach(),
        rtol=TOLERANCE,
        atol=TOLERANCE,
        msg=lambda text: f"{what}: {text}",
    )


def compare(parallel: nn.Module, single: nn.Module, call: dict[str, Any], steps: int = 2) -> None:
    """Losses, gradients and parameters of a few steps, each put together by `full_tensor`."""
    mine = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(single.parameters(), lr=1e-3)
    torch.manual_seed(0)
    parallel._context.use_exact_rng(0)
    for step in range(steps):
        got, want = parallel(**call), single(**call)
        loss, expected = (got[0], want[0]) if isinstance(got, tuple) else (got.loss, want.loss)
        assert_close(loss, expected, f"loss of step {step}")
        for optimizer, value in ((mine, loss), (theirs, expected)):
            optimizer.zero_grad()
            value.backward()
        for name, parameter in single.named_parameters():
            if parameter.grad is not None:
                assert_close(parallel.get_parameter(name).grad, parameter.grad, f"grad of {name}")
        mine.step()
        theirs.step()
    for name, parameter in single.named_parameters():
        assert_close(parallel.get_parameter(name), parameter, name)


def check_steps(rank: int, world: int) -> None:
    """Gathering, scattering and exchanging pieces of different sizes."""
    context = RankContext.from_process_group(Mesh.of(MESH), groups=[("x",)])
    group = context.group(("x",))
    for size in (7, 5, 2):
        most = -(-size // 3)
        sizes = tuple(max(0, min(most, size - most * k)) for k in range(3))
        value = torch.arange(size * 4, dtype=torch.float64).view(size, 4)
        mine = value.split(list(sizes))[rank]
        torch.testing.assert_close(group.all_gather(mine, 0, sizes), value)
        scattered = group.reduce_scatter(value.t(), 1, sizes)
        torch.testing.assert_close(scattered, 3 * mine.t())
        columns = group.all_to_all(mine, 1, 0, (2, 2, 0), sizes)
        torch.testing.assert_close(columns, value.split([2, 2, 0], 1)[rank])
        back = group.all_to_all(columns, 0, 1, sizes, (2, 2, 0))
        torch.testing.assert_close(back, mine)
    value = torch.arange(30).view(15, 2)
    before, after = (5, 5, 5), (6, 6, 3)
    moved = group.recut(value.split(list(before))[rank], 0, before, after)
    assert torch.equal(moved, value.split(list(after))[rank])


def check_mlp(rank: int, world: int) -> None:
    """Five hidden units by columns and rows; then the batch of seven."""
    hints = {"fc1": ((1, 1), (3, 1)), "fc2": ((1, 3), (1, 3))}
    for options in ({"hints": hints}, {"mode": "data_parallel"}):
        (model, call), (single, _) = build("mlp"), build("mlp")
        parallel = autopar.autoparallelize(model, kwargs=call, mesh=MESH, **options)
        compare(parallel, single, call)


def check_random_plans(rank: int, world: int) -> None:
    """Bad plans that split whatever they can, batch norm, dropout and attention heads with it."""
    for name, seeds in (("mlp", range(2)), ("conv", range(2)), ("gpt2", range(1))):
        for seed in seeds:
            (model, call), (single, _) = build(name), build(name)
            if getattr(single, "config", None) is not None:
                single.config.use_cache = False
            request = Request.make(Mesh.of(MESH), None, None, None, "auto")
            plan = random_plan(trace_model(model, (), call, request), request, seed)
            parallel = autopar.autoparallelize(model, kwargs=call, mesh=MESH, plan=plan)
            assert not is_uniform(parallel.partitioned_graph())
            compare(parallel, single, call, 1)


def check_local_inputs(rank: int, world: int) -> None:
    """Each rank gives its own part of a batch of seven: three, three and one."""
    (model, call), (single, _) = build("mlp"), build("mlp")
    parallel = autopar.autoparallelize(
        model, kwargs=call, mesh=MESH, mode="data_parallel", inputs="local"
    )
    here = {name: x.split([3, 3, 1])[rank] for name, x in call.items()}
    loss, scores = parallel(**here)
    want_loss, want_scores = single(**call)
    assert_close(loss, want_loss, "loss")
    assert isinstance(scores, DTensor) and scores.shape == (7, 3)
    assert scores.to_local().shape == (len(here["x"]), 3)
    assert_close(scores, want_scores, "scores")
    loss.backward()
    want_loss.backward()
    for name, parameter in single.named_parameters():
        assert_close(parallel.get_parameter(name).grad, parameter.grad, f"gradient of {name}")


def check_tools(rank: int, world: int) -> None:
    """Gradient clipping and a state dict of uneven shards."""
    hints = {"fc1": ((1, 1), (3, 1)), "fc2": ((1, 3), (1, 3))}
    (model, call), (single, _) = build("mlp"), build("mlp")
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=MESH, hints=hints)
    stored = parallel.get_parameter("fc1.weight")
    assert stored.shape == (5, 9) and stored.to_local().shape == ((2, 2, 1)[rank], 9)
    loss, expected = parallel(**call)[0], single(**call)[0]
    loss.backward()
    expected.backward()
    norm = nn.utils.clip_grad_norm_(parallel.parameters(), 0.01)
    assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 0.01), "gradient norm")
    state: dict[str, Tensor] = parallel.state_dict()
    for name, value in single.state_dict().items():
        assert_close(state[name], value, name)
    parallel.load_state_dict({name: value * 2 for name, value in state.items()})
    assert_close(parallel.get_parameter("fc1.weight"), 2 * single.fc1.weight, "loaded")


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    if "random_plans" in sys.argv:
        build("gpt2")
    autopar.plan(build("mlp")[0], kwargs=build("mlp")[1], mesh=1)
    main(CHECKS)
