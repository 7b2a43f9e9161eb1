"""One rank of `test_data.py`: batches that are divided as the plan says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import autopar
from devices import slow_device
from ranks import main
from recompile_worker import Net, batch, close, step, whole

ROWS = 21


class Samples(Dataset[Any]):
    """Rows of a fixed table; remembers which were loaded."""

    def __init__(self) -> None:
        self.x, self.labels = batch(ROWS)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        self.loaded.append(i)
        return {"x": self.x[i], "labels": self.labels[i]}


def parallelize(mesh: Any, **options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    options = {"device": slow_device(), "exact_rng": True, "outputs": "full", **options}
    return autopar.autoparallelize(Net().double(), batch(8), mesh=mesh, **options)


def check_training(rank: int, world: int) -> None:
    """Two shuffled epochs with a smaller last batch, as one device trains on the whole batches."""
    for inputs in ("global", "local"):
        parallel = parallelize(world, inputs=inputs, mode="data_parallel")
        torch.manual_seed(0)
        single = Net().double()
        mine, theirs = Samples(), Samples()
        ours = autopar.DistributedBatches(mine, 8, parallel, shuffle=True, seed=4)
        wholes = autopar.DistributedBatches(theirs, 8, shuffle=True, seed=4)
        for _ in range(2):
            assert len(ours) == len(wholes) == 3
            for piece, full in zip(ours, wholes, strict=True):
                step(parallel, single, lambda m: m(**(piece if m is parallel else full))[0])  # noqa: B023
                for name, value in full.items():
                    if full["x"].shape[0] != 8 or inputs == "global":
                        close(whole(piece[name]), value)
                    else:
                        close(piece[name], value.chunk(world)[rank])
        assert sorted(theirs.loaded) == sorted([*range(ROWS), *range(ROWS)])
        assert len(mine.loaded) < len(theirs.loaded)


def check_layouts(rank: int, world: int) -> None:
    """Inputs that are divided along other dimensions, or not at all."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.fc(x).sum() + labels.sum()

    torch.manual_seed(0)
    single = Two().double()
    hints = {"fc": ((1, world), (1, world))}
    call = batch(8)
    parallel = autopar.autoparallelize(
        single, call, mesh=world, hints=hints, device=slow_device(), inputs="local"
    )
    split = parallel.plan.input_layouts["x"]
    for piece in autopar.DistributedBatches(Samples(), 8, parallel):
        rows = 8 if piece["x"].shape[0] == 8 else 5
        assert whole(piece["x"]).shape[0] in (8, rows // world, -(-rows // world), rows)
        parallel(**piece)
    seen = [whole(p["x"]) for p in autopar.DistributedBatches(Samples(), 8, parallel)]
    if split.dims == ((), ("dp",)):
        close(seen[0], batch(ROWS)[0][:8].chunk(world, 1)[rank])


def check_resume(rank: int, world: int) -> None:
    """An epoch that is left in the middle goes on, under another plan as well."""
    parallel = parallelize(world, mode="data_parallel")
    first = autopar.DistributedBatches(Samples(), 4, parallel, shuffle=True, seed=2)
    list(first)
    seen = []
    for piece in first:
        seen.append(whole(piece["x"]))
        if len(seen) == 2:
            break
    state = first.state_dict()
    assert state == {"epoch": 1, "batches": 2, "seed": 2, "batch_size": 4}
    for other in (parallelize(world, mode="stand_alone"), None):
        later = autopar.DistributedBatches(Samples(), 4, other, shuffle=True)
        later.load_state_dict(state)
        rest = [whole(piece["x"]) for piece in later]
        order = torch.cat([*seen, *rest])
        expected = autopar.DistributedBatches(Samples(), ROWS, shuffle=True, seed=3)
        close(order, next(iter(expected))["x"])
        assert later.epoch == 2 and len(rest) == 4


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ranks inherit what is loaded here: the compiler that tracing needs.
    autopar.plan(Net().double(), batch(8), mesh=1)
    main(CHECKS)
