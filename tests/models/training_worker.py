"""One rank of `test_gloo_training.py`: training over real processes against one device.

Every check makes the single-device model beside the parallel one, trains both, and compares.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.module import ParallelModule
from autopar.passes.communication import collectives_of
from devices import slow_device
from ranks import main
from zoo import Mlp, build

MODELS = ("gpt2", "llama", "bert", "vit", "resnet")
GRID = {"dp": 2, "tp": 2}
STEPS = 5
TOLERANCE = 1e-5
#: Random operators draw from here on both sides.
SEED = 11


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


def assert_same_state(parallel: ParallelModule, single: nn.Module) -> None:
    """Every parameter and buffer, under the same names."""
    expected = dict(single.named_parameters())
    got = dict(parallel.named_parameters())
    assert list(got) == list(expected)
    for name, parameter in expected.items():
        assert_close(got[name], parameter, name)
    buffers = dict(parallel.named_buffers())
    for name, buffer in single.named_buffers():
        assert_close(buffers[name], buffer, name)


def communication(parallel: ParallelModule) -> list[str]:
    compiled = next(iter(parallel._compiled.values()))
    found = collectives_of(compiled.graph, compiled.traced.rules, compiled.plan.assignment)
    return [str(c) for c in found]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def train_together(
    parallel: ParallelModule, single: nn.Module, call: dict[str, Any], steps: int
) -> None:
    """Step both, with dropout drawing the same numbers, and compare loss, state and outputs."""
    mine, theirs = adamw(parallel), adamw(single)
    torch.manual_seed(SEED)
    parallel._context.use_exact_rng(SEED)
    for step in range(steps):
        got, want = parallel(**call), single(**call)
        assert type(got) is type(want)
        loss, expected = (got[0], want[0]) if isinstance(got, tuple) else (got.loss, want.loss)
        assert not isinstance(loss, DTensor)
        assert_close(loss, expected, f"loss of step {step}")
        for optimizer, value in ((mine, loss), (theirs, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert_same_state(parallel, single)


def check_models(rank: int, world: int) -> None:
    """The searched plan of every model on a grid, each of which communicates."""
    for name in MODELS:
        single, call = build(name)
        model, _ = build(name)
        if getattr(single, "config", None) is not None:
            single.config.use_cache = False
        parallel = autopar.autoparallelize(
            model, kwargs=call, mesh=GRID, mode="auto", device=slow_device()
        )
        runs = communication(parallel)
        assert runs, f"{name}: the plan does not communicate"
        split = [n for n, layout in parallel.plan.parameter_layouts.items() if layout.split_axes]
        assert split, f"{name}: the plan splits no parameter"
        train_together(parallel, single, call, STEPS)
        if rank == 0:
            print(f"{name}: {len(runs)} collectives, {len(split)} split parameters", flush=True)


def pair() -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    single, call = build("mlp")
    return build("mlp")[0], single, call


def check_data_parallel(rank: int, world: int) -> None:
    """The batch is split, parameters are whole; globally and locally given inputs are the same."""
    model, single, call = pair()
    parallel = autopar.autoparallelize(model, kwargs=call, mode="data_parallel")
    assert parallel.plan.input_layouts["x"].dims == (("dp",), ())
    assert not any(v.split_axes for v in parallel.plan.parameter_layouts.values())
    assert any("all_reduce" in each for each in communication(parallel))
    train_together(parallel, single, call, 3)

    model, single, call = pair()
    local = autopar.autoparallelize(model, kwargs=call, mode="data_parallel", inputs="local")
    here = {name: x.chunk(world)[rank] for name, x in call.items()}
    loss, scores = local(**here)
    want_loss, want_scores = single(**call)
    assert_close(loss, want_loss, "loss of local inputs")
    assert_close(scores, want_scores, "scores of local inputs")
    loss.backward()
    want_loss.backward()
    for name, parameter in single.named_parameters():
        assert_close(local.get_parameter(name).grad, parameter.grad, f"gradient of {name}")
    try:
        local(**call)
    except autopar.InputError as error:
        assert "x: expected shape (2, 8), got (8, 8)" in str(error)
    else:
        raise AssertionError("a whole batch was taken for a local one")


def check_outputs(rank: int, world: int) -> None:
    """`outputs`: whole, split as a DTensor, or by whether there is a loss."""
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 12).double(), torch.randn(8, 8, dtype=torch.float64)
    hint = {"": ((2, 1), (2, 1))}
    for outputs in ("full", "sharded", "auto"):
        torch.manual_seed(0)
        parallel = autopar.autoparallelize(
            nn.Linear(8, 12).double(),
            (x,),
            mesh=GRID,
            hints=hint,
            outputs=outputs,
            device=slow_device(),
        )
        y = parallel(x)
        assert isinstance(y, DTensor) == (outputs == "sharded"), outputs
        if isinstance(y, DTensor):
            assert any(isinstance(p, Shard) for p in y.placements)
            assert y.shape == (8, 12)
        assert_close(y, plain(x), outputs)
        y.sum().backward()
        plain.zero_grad()
        plain(x).sum().backward()
        assert_close(parallel.get_parameter("weight").grad, plain.weight.grad, outputs)

    model, single, call = pair()
    hints = {"fc2": ((2, 1), (2, 1))}
    parallel = autopar.autoparallelize(
        model, kwargs=call, mesh=GRID, hints=hints, device=slow_device()
    )
    loss, scores = parallel(**call)
    assert isinstance(scores, DTensor) and not isinstance(loss, DTensor)
    assert_close(scores, single(**call)[1], "scores beside a loss")


def check_lazy(rank: int, world: int) -> None:
    """Without an example the module compiles at its first call."""
    model, single, call = pair()
    parallel = autopar.autoparallelize(model, mesh=GRID, device=slow_device())
    try:
        adamw(parallel)
    except autopar.NotCompiledError as error:
        assert "first call" in str(error)
    else:
        raise AssertionError("parameters were given out before they were split")
    loss, _ = parallel(**call)
    assert_close(loss, single(**call)[0], "loss of the first call")
    train_together(parallel, single, call, 2)


class Noisy(nn.Module):
    """A convolution, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        scores = self.head(self.drop(features))
        return nn.functional.cross_entropy(scores, target), scores


def noisy_pair() -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Noisy().double()
    images = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    return copy.deepcopy(model), model, {"x": images, "target": torch.randint(4, (8,))}


def check_eval(rank: int, world: int) -> None:
    """Evaluation runs a second graph on the same parameters and the running statistics."""
    model, single, call = noisy_pair()
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=GRID, device=slow_device())
    train_together(parallel, single, call, 2)
    before = {name: (id(p), p.placements) for name, p in parallel.named_parameters()}
    for _ in range(2):
        statistics = {name: b.clone() for name, b in parallel.named_buffers()}
        parallel.eval()
        single.eval()
        with torch.no_grad():
            got, want = parallel(**call), single(**call)
        assert_close(got[0], want[0], "loss in evaluation")
        assert_close(got[1], want[1], "scores in evaluation")
        for name, buffer in parallel.named_buffers():
            assert torch.equal(buffer, statistics[name]), name
        parallel.train()
        single.train()
        train_together(parallel, single, call, 1)
    assert {name: (id(p), p.placements) for name, p in parallel.named_parameters()} == before
    assert len(parallel._compiled) == 2


def check_dropout(rank: int, world: int) -> None:
    """Without exact numbers: copies drop alike, whatever the seeds; no two steps are alike."""
    model, _, call = noisy_pair()
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=GRID, device=slow_device())
    torch.manual_seed(100 + rank)
    losses = [parallel(**call)[0].item() for _ in range(2)]
    everywhere: list[Any] = [None] * world
    torch.distributed.all_gather_object(everywhere, losses)
    assert all(each == losses for each in everywhere), everywhere
    assert losses[0] != losses[1]


def check_tools(rank: int, world: int) -> None:
    """Gradient clipping, `state_dict` and `load_state_dict`, on a user's `DeviceMesh`."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, single, call = pair()
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=device_mesh, device=slow_device())
    assert communication(parallel)
    assert parallel.get_parameter("fc1.weight").device_mesh == device_mesh
    loss, expected = parallel(**call)[0], single(**call)[0]
    loss.backward()
    expected.backward()
    norm = nn.utils.clip_grad_norm_(parallel.parameters(), 0.01)
    want = nn.utils.clip_grad_norm_(single.parameters(), 0.01)
    assert_close(norm, want, "gradient norm")
    for name, parameter in single.named_parameters():
        assert_close(parallel.get_parameter(name).grad, parameter.grad, f"clipped {name}")
    state, expected_state = parallel.state_dict(), single.state_dict()
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        assert_close(state[name], value, name)
    parallel.load_state_dict({name: value * 2 for name, value in state.items()})
    single.load_state_dict({name: value * 2 for name, value in expected_state.items()})
    train_together(parallel, single, call, 1)
    # A step as long as the weight is, as LAMB's: norms are of whole tensors, not of pieces.
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            for p in (parameter, parallel.get_parameter(name)):
                p.sub_(p.grad * (0.1 * float(p.norm() / p.grad.norm())))
            assert_close(parallel.get_parameter(name), parameter, f"{name} after a scaled step")


def check_meshes(rank: int, world: int) -> None:
    """Axes of size one, a plain count, and a mesh from the number of processes."""
    for mesh in ({"one": 1, "dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, 4, None):
        model, single, call = pair()
        parallel = autopar.autoparallelize(model, kwargs=call, mesh=mesh, device=slow_device())
        assert communication(parallel), mesh
        assert parallel.mesh.size == world
        loss, expected = parallel(**call)[0], single(**call)[0]
        assert_close(loss, expected, f"loss on {mesh}")
        loss.backward()
        expected.backward()
        for name, parameter in single.named_parameters():
            assert_close(parallel.get_parameter(name).grad, parameter.grad, f"{name} on {mesh}")


def check_shared_names(rank: int, world: int) -> None:
    """A weight under two names stays one parameter; one that nothing uses is kept whole."""

    class Tied(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.fc1
            self.spare = nn.Parameter(torch.ones(3))

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Tied().double())
    model, single = models
    call = build("mlp")[1]
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=GRID, device=slow_device())
    assert list(parallel.state_dict()) == list(single.state_dict())
    assert parallel.get_parameter("again.weight") is parallel.get_parameter("fc1.weight")
    train_together(parallel, single, call, 2)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ranks inherit what is loaded here: the models, and the compiler that tracing needs.
    if "models" in sys.argv:
        for name in MODELS:
            build(name)
    autopar.plan(build("mlp")[0], kwargs=build("mlp")[1], mesh=1)
    main(CHECKS)
