"""How long gloo's collectives take, beside other ways to do the same.

    python benchmarks/collectives.py [--ranks 2 4] [--rounds 15]

Processes of this machine, one thread each. The ways take turns, so that whatever else the machine
does meets all of them; printed is the median in milliseconds. `runtime/transport.py` takes the
fastest way for each.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25)
_c10d = torch.ops._c10d_functional
Way = Callable[[Tensor], Tensor]


def ways(rank: int, world: int, group: str) -> dict[str, Way]:
    """Name -> what takes a tensor [world, n] and waits for its collective."""
    each = [1] * world
    wait = _c10d.wait_tensor

    def exchange(x: Tensor) -> Tensor:
        return wait(_c10d.all_to_all_single(x, each, each, group))

    return {
        "all-reduce": lambda x: wait(_c10d.all_reduce(x, "sum", group)),
        "  as exchange of copies": lambda x: exchange(x.repeat(world, 1, 1)).sum(0),
        "all-to-all": exchange,
        "reduce-scatter": lambda x: wait(_c10d.reduce_scatter_tensor(x, "sum", world, group)),
        "  as all-reduce": lambda x: wait(_c10d.all_reduce(x, "sum", group))[rank].clone(),
        "  as all-to-all": lambda x: exchange(x).sum(0),
        "all-gather": lambda x: wait(_c10d.all_gather_into_tensor(x[:1], world, group)),
        "  as all-to-all of copies": lambda x: exchange(x[:1].expand_as(x).contiguous()),
    }


def run(rank: int, world: int, port: int, rounds: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    measured: dict[str, list[float]] = {}
    for size in SIZES:
        x = torch.randn(world, size // 4 // world)
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, way in ways(rank, world, dist.group.WORLD.group_name).items():  # type: ignore[union-attr]
                dist.barrier()
                start = time.perf_counter()
                way(x)
                times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        for name, each in times.items():
            measured.setdefault(name, []).append(statistics.median(each))
    if rank == 0:
        print(f"{world} ranks; KiB:".ljust(28), *(f"{size >> 10:8}" for size in SIZES))
        for name, medians in measured.items():
            print(name.ljust(28), *(f"{median:8.2f}" for median in medians), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for world in options.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(run, args=(world, port, options.rounds), nprocs=world)


if __name__ == "__main__":
    main()
