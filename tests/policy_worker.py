"""One rank of `test_memory_policy.py`: policies and ZeRO on real processes, against one device."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from ranks import main


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, width)
        self.h = nn.ModuleList([Block(width, dropout) for _ in range(blocks)])
        self.head = nn.Linear(width, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.h:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int = 0, rows: int = 8, length: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (2, rows, length), generator=generator)
    return {"ids": ids[0], "labels": ids[1]}


def train(rank: int, world: int) -> None:
    """AdamW with clipping and two micro-batches a step."""
    torch.manual_seed(0)
    single = Net().double()
    parallel = autopar.autoparallelize(
        copy.deepcopy(single),
        kwargs=batch(),
        mesh={"dp": world},
        mode="data_parallel",
        zero=3,
        memory_policy={"*": "recompute", "h.1": "offload+regather", "h.2": "keep"},
    )
    assert "recompute h.0" in str(parallel.plan) and "zero=3" in str(parallel.plan)
    weight = parallel.get_parameter("h.0.up.weight")
    assert isinstance(weight, DTensor) and weight.to_local().numel() * world == weight.numel()
    models = (single, parallel)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.1) for m in models]
    for seed in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with model.no_sync() if model is parallel else contextlib.nullcontext():
                model(**batch(10 + seed)).backward()
            losses.append(model(**batch(20 + seed)))
            losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert torch.allclose(*losses, atol=1e-11), losses
    for name, parameter in parallel.named_parameters():
        whole = parameter.full_tensor()
        assert torch.allclose(whole, single.get_parameter(name), atol=1e-11), name


if __name__ == "__main__":
    main({"train": train})
