"""One rank of `test_training_matrix.py`: ways to train put together, against one device."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from devices import slow_device
from ranks import main
from zoo import build

MODELS = ("gpt2", "llama", "bert", "vit", "resnet")
OPTIMIZERS = ("adamw", "momentum", "adafactor")
PRECISIONS = ("fp32", "bf16")
LEVELS = (1, 2, 3)
ACCUMULATE = (1, 4)
POLICIES = ("keep", "recompute", "offload", "compress")
FACTORS = (MODELS, OPTIMIZERS, PRECISIONS, LEVELS, ACCUMULATE, POLICIES)

STEPS, SEED = 10, 11
GRID = {"dp": 2, "tp": 2}
#: How far a loss in float32 may be off.
TOLERANCE = 1e-5
#: In bfloat16 products in parts are rounded before they are summed: how far a loss may be from that
#: in float32, as a multiple of the single device's own distance.
LOW = 4

Row = tuple[str, str, str, int, int, str]


def pairwise() -> list[Row]:
    """Few rows in which every two settings of different kinds meet."""
    rows: list[Row] = list(itertools.product(*FACTORS))  # type: ignore[arg-type]
    open_pairs = {pair for row in rows for pair in _pairs(row)}
    found = []
    while open_pairs:
        best = max(rows, key=lambda row: len(open_pairs & set(_pairs(row))))
        open_pairs -= set(_pairs(best))
        found.append(best)
    return found


def _pairs(row: Row) -> Iterator[tuple[Any, ...]]:
    return itertools.combinations(enumerate(row), 2)


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=1e-3)
    if name == "momentum":
        return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    return torch.optim.Adafactor(module.parameters(), lr=1e-3)


def single(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model, call = build(name)
    if getattr(model, "config", None) is not None:
        model.config.use_cache = False
    floats = {k: v.float() if v.is_floating_point() else v for k, v in call.items()}
    return model.float(), floats


def batches(call: dict[str, Any], step: int, count: int) -> list[dict[str, Any]]:
    """Other rows of the same shapes in every step."""
    return [
        {k: v.roll(step * count + n, 0) if v.dim() else v for k, v in call.items()}
        for n in range(count)
    ]


def losses(
    module: nn.Module, optimizer: torch.optim.Optimizer, call: Any, count: int, low: bool
) -> list[float]:
    """Train; the losses of all micro-batches."""
    torch.manual_seed(SEED)
    found = []
    for step in range(STEPS):
        for n, batch in enumerate(batches(call, step, count)):
            last = n == count - 1
            apart = getattr(module, "no_sync", contextlib.nullcontext)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss: Tensor = module(**batch).loss
            with contextlib.nullcontext() if last else apart():
                (loss / count).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def check(row: Row) -> None:
    name, optimizer, precision, level, count, policy = row
    low = precision == "bf16"
    model, call = single(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        parallel = autopar.autoparallelize(
            model, kwargs=call, mesh=GRID, mode="auto", device=slow_device(),
            zero=level, memory_policy=policy,
        )  # fmt: skip
    parallel._context.use_exact_rng(SEED)
    got = losses(parallel, optimizer_of(optimizer, parallel), call, count, low)
    want = losses(model, optimizer_of(optimizer, model), call, count, low)
    pairs = list(zip(got, want, strict=True))
    if not low:
        assert all(abs(a - b) <= TOLERANCE * max(1, abs(b)) for a, b in pairs), (row, pairs)
        return
    other, _ = single(name)
    exact = losses(other, optimizer_of(optimizer, other), call, count, False)
    own = max(abs(b - c) for b, c in zip(want, exact, strict=True))
    off = max(abs(a - c) for a, c in zip(got, exact, strict=True))
    assert off <= LOW * own + TOLERANCE, (row, off, own)


def check_rows(rank: int, world: int) -> None:
    every, offset = (int(n) for n in sys.argv[2].split(":")[1].split("/"))
    rows = pairwise()[offset::every]
    for row in rows:
        check(row)
        if rank == 0:
            print(*row, flush=True)


class _Checks(dict[str, Any]):
    """`rows:<n>/<k>` is every n-th row from the k-th."""

    def __missing__(self, name: str) -> Any:
        return check_rows


if __name__ == "__main__":
    for model_name in MODELS:
        build(model_name)
    main(_Checks())
