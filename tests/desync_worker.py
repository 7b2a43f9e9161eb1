"""One of two ranks of `test_bad_input.py`: what happens where ranks do not agree.

Every check must end on both ranks with an error of ours, and leave the process group usable.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import compiled as compiled_file
from autopar import muster
from devices import slow_device
from ranks import main
from zoo import build

MESH = {"dp": 2}


def mlp() -> nn.Module:
    return build("mlp")[0]


def call() -> dict[str, Tensor]:
    return build("mlp")[1]


def parallelize(model: nn.Module | None = None, **options: Any) -> autopar.ParallelModule:
    options = {"kwargs": call(), "mesh": MESH, "device": slow_device(), **options}
    return autopar.autoparallelize(model or mlp(), **options)


def raised(run: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """Check that `run` raises exactly this kind of error, with these words in it."""
    try:
        run()
    except autopar.AutoparError as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}"
        for word in words:
            assert word in str(error), f"{word!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"no error; expected {kind.__name__} {words}")


def check_mesh(rank: int, world: int) -> None:
    """A mesh that does not fit the world is refused before a process group is made."""
    raised(lambda: parallelize(mesh=4), autopar.MeshError, "4 ranks", "2 processes", "torchrun")
    raised(lambda: parallelize(mesh={"dp": 2, "tp": 2}), autopar.MeshError, "{dp=2, tp=2}")
    assert not dist.is_initialized()


def check_plans(rank: int, world: int) -> None:
    """Each rank has a plan file of its own; they differ, and one may even be invalid."""
    plan = autopar.plan(mlp(), kwargs=call(), mesh=MESH)
    for role in ("o", "no such factor"):
        data = plan.to_json()
        if rank == 1:
            data["operators"]["linear"]["roles"]["dp"] = role
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            path.write_text(json.dumps(data))
            raised(
                lambda path=path: parallelize(plan=path),  # type: ignore[misc]
                autopar.DesyncError,
                "the plan differs",
                "[0]",
                "[1]",
                "same plan file",
            )


def check_models(rank: int, world: int) -> None:
    """Another architecture, and the same one with other weights."""
    model = mlp()
    if rank == 1:
        model.fc2 = nn.Linear(16, 24).double()
    raised(
        lambda: parallelize(model), autopar.DesyncError, "the traced model differs", "same model"
    )
    model = mlp()
    if rank == 1:
        with torch.no_grad():
            model.fc2.weight += 1e-9
    raised(lambda: parallelize(model), autopar.DesyncError, "'fc2.weight'", "rank 1", "seed")


def check_inputs(rank: int, world: int) -> None:
    """Ranks that need the same piece of an input are given different ones."""
    other = call()
    if rank == 1:
        other["target"] = (other["target"] + 1) % 12
    raised(lambda: parallelize()(**other), autopar.DesyncError, "'target'", "ranks 0 and 1")

    whole = parallelize(mode="stand_alone", inputs="local")
    other = call()
    if rank == 1:
        other["x"] = other["x"] + 1
    raised(lambda: whole(**other), autopar.DesyncError, "input 'x'", "input_layouts")


def check_binding(rank: int, world: int) -> None:
    """One rank calls the module wrongly; the other one is told, and does not wait."""
    wrong = call()
    if rank == 1:
        wrong["x"] = wrong["x"][:4]
    parallel = parallelize(shapes="error")
    if rank == 1:
        raised(lambda: parallel(**wrong), autopar.InputError, "x: expected shape (8, 8)", "(4, 8)")
    else:
        raised(lambda: parallel(**wrong), autopar.DesyncError, "rank 1 failed", "(4, 8)")
    loss, _ = parallel(**call())
    torch.testing.assert_close(loss, mlp()(**call())[0])

    words = ("x", "rank 0", "float64[8, 8]", "rank 1", "float64[4, 8]")
    raised(lambda: parallelize()(**wrong), autopar.DesyncError, *words)
    parallel = parallelize(check="every")
    for _ in range(2):
        loss, _ = parallel(**call())
        raised(lambda: parallel(**wrong), autopar.DesyncError, *words)
        swapped = call() if rank else {**call(), "x": call()["x"].flip(0)}
        raised(lambda: parallel(**swapped), autopar.DesyncError, "'x'", "ranks 0 and 1")  # noqa: B023
    torch.testing.assert_close(loss, mlp()(**call())[0])

    lazy = autopar.autoparallelize(mlp(), mesh=MESH)
    if rank == 1:
        raised(lambda: lazy(call()["x"]), autopar.InputError, "target")
    else:
        raised(lambda: lazy(**call()), autopar.DesyncError, "rank 1 failed", "target")


def check_shapes(rank: int, world: int) -> None:
    """After the first call, with kinds of call that are compiled already or not: one rank has
    another shape, or both have; that is known before anything is sent."""
    small, smaller = ({name: x[:n] for name, x in call().items()} for n in (6, 4))
    for compiled in (False, True):
        parallel = parallelize()
        parallel(**call())
        if compiled:
            for each in (small, smaller, call()):
                parallel(**each)
        if rank == 1:
            with mock.patch.object(muster, "PATIENCE", 0.5 / 600):
                words = ("rank 0 did not call it", "unlike the one before")
                raised(lambda: parallel(**small), autopar.DesyncError, *words)  # noqa: B023
        dist.barrier()
        mine = small if rank else smaller
        words = ("x: rank 0 was called with float64[4, 8], rank 1 with float64[6, 8]",)
        raised(lambda: parallel(**mine), autopar.DesyncError, *words)  # noqa: B023
        for each in (call(), small, smaller):
            torch.testing.assert_close(parallel(**each)[0], mlp()(**each)[0])


def check_planning(rank: int, world: int) -> None:
    """Planning happens on the first rank; its failure reaches all."""
    one = {name: x[:1] for name, x in call().items()}
    raised(
        lambda: parallelize(kwargs=one, mode="data_parallel"),
        autopar.PlanError,
        "batch of 1",
        "2 ranks",
    )

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with mock.patch.object(compiled_file, "make_plan", fail):
        if rank == 1:
            raised(parallelize, autopar.DesyncError, "planning", "rank 0", "MemoryError: no room")
        else:
            try:
                parallelize()
            except MemoryError:
                pass
            else:
                raise AssertionError("the first rank lost its own error")


def check_alone(rank: int, world: int) -> None:
    """What all ranks must call is called by one of them, or by each for something else."""
    parallel = parallelize()
    with tempfile.TemporaryDirectory() as folder:
        lonely: list[Callable[[], Any]] = [
            lambda: autopar.full_state_dict(parallel),
            lambda: autopar.save_checkpoint(Path(folder) / "run", parallel),
            lambda: autopar.load_checkpoint(Path(folder) / "run", parallel),
        ]
        if rank == 0:
            # Half a second of the ten minutes that the process group waits.
            with mock.patch.object(muster, "PATIENCE", 0.5 / 600):
                for call_alone in lonely:
                    raised(call_alone, autopar.DesyncError, "rank 1 did not call it")
        dist.barrier()
        differing = lonely[rank]
        raised(differing, autopar.DesyncError, "rank 0 has called full", "rank 1 save_checkpoint")
    state = autopar.full_state_dict(parallel, everywhere=True)
    assert torch.equal(state["fc2.weight"], mlp().fc2.weight)


def check_no_sync(rank: int, world: int) -> None:
    """One rank accumulates gradients and the other does not."""
    parallel = parallelize()
    with parallel.no_sync() if rank else contextlib.nullcontext():
        raised(
            lambda: parallel(**call()), autopar.DesyncError, "no_sync", "rank 1", "rank 0 outside"
        )


def check_still_works(rank: int, world: int) -> None:
    """After all that, the same processes can train."""
    single, parallel = mlp(), parallelize()
    loss, expected = parallel(**call())[0], single(**call())[0]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in single.named_parameters():
        got = parallel.get_parameter(name).grad
        assert got is not None
        torch.testing.assert_close(got.full_tensor(), parameter.grad)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ranks inherit what is loaded here: the compiler that tracing needs.
    autopar.plan(mlp(), kwargs=call(), mesh=1)
    main(CHECKS)
