"""A training script as a user writes it: it does not know how it was launched."""

from __future__ import annotations

import sys

import torch
import torch.multiprocessing

import autopar
from recompile_worker import Net, batch


def train() -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parallel = autopar.autoparallelize(Net().double(), batch(8), exact_rng=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = parallel(*batch(8, seed=step))[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def spawned(rank: int, world: int, port: int) -> None:
    """A process of `torch.multiprocessing.spawn`, which sets nothing in the environment."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    report(train())


def report(losses: list[float]) -> None:
    alone = not torch.distributed.is_initialized()
    rank = 0 if alone else torch.distributed.get_rank()
    world = 1 if alone else torch.distributed.get_world_size()
    # One write: the lines of several processes must not be mixed up.
    print(f"rank {rank} of {world}: {' '.join(f'{loss:.10f}' for loss in losses)}\n", end="")
    sys.stdout.flush()
    if not alone:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.multiprocessing.spawn(spawned, (2, int(sys.argv[1])), nprocs=2)
    else:
        report(train())
