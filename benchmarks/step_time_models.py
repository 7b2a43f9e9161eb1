"""The decoder that `step_time.py` trains, and its plans written by hand.

What is written by hand communicates by the functional collectives of `torch.distributed`, as few
and as large ones as the plan allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

Map = Callable[[Tensor], Tensor]
Step = Callable[[], float]


@dataclass(frozen=True)
class Size:
    """Widths of the decoder, and the shape of a batch of tokens."""

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
    """GPT-2's shape, with the loss; `part`: among how many ranks heads and MLP are split."""

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


def data_parallel(model: Decoder, ids: Tensor, labels: Tensor) -> Step:
    """Data parallel: each rank has a part of the batch, one all-reduce sums all gradients."""
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    world = dist.get_world_size()

    def step() -> float:
        loss = model(ids, labels) / world
        loss.backward()
        flat = torch.cat([p.grad.view(-1) for p in parameters if p.grad is not None])
        for p, grad in zip(parameters, _summed(flat).split(sizes), strict=True):
            p.grad = grad.view_as(p)
        optimizer.step()
        optimizer.zero_grad()
        return _summed(loss.detach()).item()

    return step


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
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


def tensor_parallel(model: Decoder, size: Size) -> Decoder:
    """Tensor parallel: heads and the MLP's middle are split, two all-reduces in either pass."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = Decoder(size, world)
    dims = {"q": 0, "k": 0, "v": 0, "up": 0, "out": 1, "down": 1}
    state = {}
    for name, whole in model.state_dict().items():
        dim = next((d for part, d in dims.items() if f".{part}." in name), None)
        state[name] = whole if dim is None else whole.chunk(world, dim)[rank].contiguous()
    local.load_state_dict(state)
    for block in local.blocks:
        block.enter, block.leave = _Enter.apply, _Leave.apply
    return local
