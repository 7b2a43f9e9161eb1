"""The time of a training step beside PyTorch's own ways to split the same model.

    python benchmarks/step_time.py [--size tiny small large] [--rounds 15]

Two gloo processes of this machine, one thread each. All ways train the same decoder and take
turns, step by step, so that whatever else the machine does meets all of them. Printed are the
median step in milliseconds, and the median over rounds of the ratio to autopar's step of the same
kind; above 1 autopar is the faster one. The first losses of all ways are compared.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]
Step = Callable[[], float]


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    batch: int
    length: int
    vocabulary: int = 1024


SIZES = {
    "tiny": Size(32, 2, 4, 4, 16, 64),
    "small": Size(512, 4, 8, 8, 256),
    "large": Size(1024, 4, 16, 8, 256),
}


def _same(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """Attention and MLP; `enter` and `leave` stand where tensor parallel by hand communicates."""

    def __init__(self, hidden: int, heads: int, part: int = 1) -> None:
        super().__init__()
        self.size = hidden // heads
        inner = hidden // part
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * inner, bias=False)
        self.down = nn.Linear(4 * inner, hidden, bias=False)
        self.enter: Map = _same
        self.leave: Map = _same

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(self.norm1(x))
        q, k, v = (
            y.view(*y.shape[:2], -1, self.size).transpose(1, 2)
            for y in (self.q(h), self.k(h), self.v(h))
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.out(h.transpose(1, 2).flatten(2)))
        return x + self.leave(self.down(F.gelu(self.up(self.enter(self.norm2(x))))))


class Decoder(nn.Module):
    def __init__(self, size: Size, part: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(size.vocabulary, size.hidden)
        self.place = nn.Parameter(torch.randn(size.length, size.hidden) * 0.02)
        blocks = (Block(size.hidden, size.heads, part) for _ in range(size.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids) + self.place
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def stepping(module: nn.Module, ids: Tensor, labels: Tensor) -> Step:
    """Forward, backward and an SGD step; the loss."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> float:
        loss = module(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# --- the ways ------------------------------------------------------------------------------------


def planned(model: nn.Module, ids: Tensor, labels: Tensor, scheme: str) -> nn.Module:
    """autopar with the plan that people write by hand under this name."""
    import autopar
    from autopar.compiler import Request, describe_plan, trace_model
    from autopar.ir.mesh import Mesh
    from autopar.passes.baselines import baseline_assignments
    from autopar.passes.prices import DevicePrices

    mesh = Mesh.of({"dp": dist.get_world_size()})
    request = Request.make(mesh, None, None, "cpu", "auto")
    traced = trace_model(model, (ids, labels), {}, request)
    prices = DevicePrices(mesh, request.device)
    found = baseline_assignments(traced.placed, traced.rules, mesh, prices).found[scheme]
    plan = describe_plan(traced, request, found.assignment, "auto", 1.0, 1.0)
    return autopar.autoparallelize(model, (ids, labels), mesh=mesh, plan=plan)


def one_rank(model: nn.Module, ids: Tensor, labels: Tensor) -> nn.Module:
    """autopar without a plan to speak of: every rank computes everything."""
    import autopar

    mesh = {"dp": dist.get_world_size()}
    return autopar.autoparallelize(model, (ids, labels), mesh=mesh, mode="stand_alone")


def fsdp2(model: Decoder) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def dtensor(model: Decoder) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    rows = dict.fromkeys(("out", "down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**columns, **rows})
    return model


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _summed(grad)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _summed(x: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as functional

    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


def by_hand(model: Decoder, size: Size) -> nn.Module:
    """Tensor parallel with functional collectives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = Decoder(size, world)
    state = {}
    for name, whole in model.state_dict().items():
        dim = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}.get(name.split(".")[-2])
        state[name] = whole if dim is None else whole.chunk(world, dim)[rank].contiguous()
    local.load_state_dict(state)
    for block in local.blocks:
        block.enter, block.leave = _Enter.apply, _Leave.apply
    return local


def ways(size: Size) -> dict[str, Step]:
    """Name -> its step. A name of several words begins with that of autopar's it is compared to."""
    torch.manual_seed(0)
    model = Decoder(size)
    ids = torch.randint(size.vocabulary, (size.batch, size.length))
    labels = torch.randint(size.vocabulary, (size.batch, size.length))
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, answers = ids.chunk(world)[rank], labels.chunk(world)[rank]

    def fresh() -> Decoder:
        return copy.deepcopy(model)

    return {
        "alone": stepping(one_rank(fresh(), ids, labels), ids, labels),
        "alone: eager": stepping(fresh(), ids, labels),
        "data": stepping(planned(fresh(), ids, labels, "data parallel"), ids, labels),
        "data: DDP": stepping(nn.parallel.DistributedDataParallel(fresh()), mine, answers),
        "sharded": stepping(planned(fresh(), ids, labels, "FSDP"), ids, labels),
        "sharded: FSDP2": stepping(fsdp2(fresh()), mine, answers),
        "tensor": stepping(planned(fresh(), ids, labels, "tensor parallel"), ids, labels),
        "tensor: DTensor": stepping(dtensor(fresh()), ids, labels),
        "tensor: by hand": stepping(by_hand(fresh(), size), ids, labels),
    }


# --- taking turns --------------------------------------------------------------------------------


def run(rank: int, world: int, port: int, names: list[str], rounds: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        steps = ways(SIZES[name])
        _compare(steps, world)
        times: dict[str, list[float]] = {way: [] for way in steps}
        gc.collect()
        for turn in range(rounds + 1):
            for way, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                if turn:
                    times[way].append(1e3 * (time.perf_counter() - start))
        if rank == 0:
            _print(name, times)
    dist.destroy_process_group()


def _compare(steps: dict[str, Step], world: int) -> None:
    """All ways begin with the same loss; a batch that is split has it on average."""
    first = {way: torch.tensor(step(), dtype=torch.float64) for way, step in steps.items()}
    for loss in first.values():
        dist.all_reduce(loss)
    expected = first["alone: eager"].item() / world
    for way, loss in first.items():
        assert abs(loss.item() / world - expected) < 1e-3, (way, loss.item() / world, expected)


def _print(name: str, times: dict[str, list[float]]) -> None:
    print(f"{name}: {SIZES[name]}")
    for way, each in times.items():
        ours = times[way.partition(":")[0]]
        ratio = statistics.median(theirs / our for theirs, our in zip(each, ours, strict=True))
        print(f"  {way:20} {statistics.median(each):9.2f} ms  {ratio:5.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, args=(2, port, options.size, options.rounds), nprocs=2)


if __name__ == "__main__":
    main()
