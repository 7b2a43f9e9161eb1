"""One small model in the hands of users who get something wrong, and what has to come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from zoo import build

GRID = {"dp": 2, "tp": 2}
CALL: dict[str, Tensor] = build("mlp")[1]


def mlp() -> nn.Module:
    return build("mlp")[0]


def make_plan(model: nn.Module | None = None, **options: Any) -> autopar.Plan:
    return autopar.plan(model or mlp(), **{"kwargs": CALL, "mesh": GRID, **options})


def parallelize(model: nn.Module | None = None, **options: Any) -> autopar.ParallelModule:
    return autopar.autoparallelize(model or mlp(), **{"kwargs": CALL, **options})


def check(run: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """`run` raises this kind of error with all these words; nothing was started."""
    with pytest.raises(kind) as caught:
        run()
    assert isinstance(caught.value, autopar.AutoparError)
    for word in words:
        assert word in str(caught.value)
    assert not dist.is_initialized()
