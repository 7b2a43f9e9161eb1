"""One rank of `step_time.py`: build some ways to train one model, take turns, write the times.

    python step_time_worker.py OUTPUT SIZE ROUNDS WAY [WAY …]

Rank and world come from the environment. A way is one of the names in `WAYS`.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_time_models import (
    SIZES,
    Decoder,
    Size,
    Step,
    data_parallel,
    stepping,
    tensor_parallel,
)
from torch import Tensor, nn

#: Seconds after which a rank gives up waiting for another.
WAIT_S = 60
#: Rounds before those that count: memory of all ways has to find its place.
WARM_UP = 2
#: Largest difference between the first losses of two ways.
CLOSE = 1e-3


@dataclass(frozen=True)
class Task:
    """The model and one batch, whole and this rank's part of it; `device` is what autopar plans
    for: this machine as it measured it, a preset where a rank is alone."""

    size: Size
    model: Decoder
    ids: Tensor
    labels: Tensor
    rank: int
    world: int
    device: Any = "cpu"

    @staticmethod
    def of(size: Size, rank: int, world: int, device: Any = "cpu") -> Task:
        torch.manual_seed(0)
        model = Decoder(size)
        ids, labels = torch.randint(size.vocabulary, (2, size.batch, size.length)).unbind()
        return Task(size, model, ids, labels, rank, world, device)

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.labels

    @property
    def mine(self) -> tuple[Tensor, Tensor]:
        return self.ids.chunk(self.world)[self.rank], self.labels.chunk(self.world)[self.rank]

    def fresh(self) -> Decoder:
        return copy.deepcopy(self.model)


def _searched(task: Task) -> nn.Module:
    import autopar

    mesh = {"x": task.world}
    return autopar.autoparallelize(task.fresh(), task.whole, mesh=mesh, device=task.device)


def _planned(scheme: str) -> Callable[[Task], nn.Module]:
    """autopar with the plan that is known under this name."""

    def build(task: Task) -> nn.Module:
        import autopar
        from autopar.compiler import Request, describe_plan, trace_model
        from autopar.passes.baselines import baseline_assignments
        from autopar.passes.prices import DevicePrices

        mesh, model = autopar.Mesh.of({"x": task.world}), task.fresh()
        request = Request.make(mesh, None, None, task.device, "auto")
        traced = trace_model(model, task.whole, {}, request)
        prices = DevicePrices(mesh, request.device)
        found = baseline_assignments(traced.placed, traced.rules, mesh, prices).found[scheme]
        cost, bound = found.solution.cost, found.solution.bound
        plan = describe_plan(traced, request, found.assignment, "auto", cost, bound, found.hiding)
        return autopar.autoparallelize(model, task.whole, mesh=mesh, plan=plan)

    return build


def _ddp(task: Task) -> nn.Module:
    return nn.parallel.DistributedDataParallel(task.fresh())


def _fsdp2(task: Task) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = task.fresh()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _dtensor(task: Task) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", (task.world,)), task.fresh()
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    rows = dict.fromkeys(("out", "down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**columns, **rows})
    return model


def calibrated(ways: Sequence[str], world: int) -> Any:
    """What autopar's ways are planned for."""
    if world == 1 or not any(way.startswith("autopar") for way in ways):
        return "cpu"
    import autopar

    return autopar.calibrate()


def _on_whole(build: Callable[[Task], nn.Module]) -> Callable[[Task], Step]:
    return lambda task: stepping(build(task), *task.whole)


def _on_mine(build: Callable[[Task], nn.Module]) -> Callable[[Task], Step]:
    return lambda task: stepping(build(task), *task.mine)


WAYS: dict[str, Callable[[Task], Step]] = {
    "autopar": _on_whole(_searched),
    "eager": _on_whole(Task.fresh),
    "autopar data": _on_whole(_planned("data parallel")),
    "data by hand": lambda task: data_parallel(task.fresh(), *task.mine),
    "DDP": _on_mine(_ddp),
    "autopar sharded": _on_whole(_planned("FSDP")),
    "FSDP2": _on_mine(_fsdp2),
    "autopar tensor": _on_whole(_planned("tensor parallel")),
    "tensor by hand": _on_whole(lambda task: tensor_parallel(task.fresh(), task.size)),
    "DTensor": _on_whole(_dtensor),
}


def take_turns(steps: dict[str, Step], rounds: int, pause: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of every step of every way, which come in another order in every round."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    order, mix = list(steps), random.Random(0)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        mix.shuffle(order)
        for way in order:
            pause()
            start = time.perf_counter()
            steps[way]()
            pause()
            times[way].append(1e3 * (time.perf_counter() - start))
        gc.collect()
    gc.enable()
    return times


def same_losses(steps: dict[str, Step], world: int) -> None:
    """Run each way's first step; the losses, on average over the ranks, must be the same."""
    expected = None
    for way, step in steps.items():
        loss = torch.tensor(step(), dtype=torch.float64)
        if world > 1:
            dist.all_reduce(loss)
        mean = loss.item() / world
        expected = mean if expected is None else expected
        if not abs(mean - expected) < CLOSE:
            raise AssertionError(f"{way}: first loss {mean}, others have {expected}")


def main() -> None:
    output, name, rounds, ways = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    task = Task.of(SIZES[name], rank, world, calibrated(ways, world))
    steps = {way: WAYS[way](task) for way in ways}
    same_losses(steps, world)
    pause = dist.barrier if world > 1 else lambda: None
    take_turns(steps, WARM_UP, pause)
    times = take_turns(steps, rounds, pause)
    if rank == 0:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        output.write_text(json.dumps({"times": times, "peak": peak}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
