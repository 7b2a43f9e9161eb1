"""A host's memory apart from the device's, on a machine that has one memory for both.

What is moved is copied, and where it was is filled with NaN: whoever reads state that was not
brought back, or changes a copy that nobody puts away, gives other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from autopar import optimizer_offload
from autopar.optimizer_offload import HostMemory


class PretendHost(HostMemory):
    """Counts the bytes that were brought to the device since `most` was set to 0 for each part."""

    def __init__(self) -> None:
        self.held: Any = WeakIdKeyDictionary()
        self.on_device = self.most = 0

    def put(self, x: Tensor, room: Tensor | None) -> Tensor:
        kept = x.clone() if room is None else room.copy_(x)
        if room is not None:
            self.on_device -= x.nbytes
        x.fill_(torch.nan)
        self.held[kept] = True
        return kept

    def take(self, x: Tensor, device: torch.device) -> Tensor:
        taken = x.clone()
        x.fill_(torch.nan)
        self.on_device += x.nbytes
        self.most = max(self.most, self.on_device)
        return taken

    def holds_all(self, optimizer: Optimizer) -> bool:
        """Whether every tensor of state that is no counter is on the host."""
        found = [x for x in pytree.tree_leaves(list(optimizer.state.values()))
                 if isinstance(x, Tensor) and x.dim()]  # fmt: skip
        local = [x._local_tensor if isinstance(x, DTensor) else x for x in found]
        return all(x in self.held for x in local)


@contextmanager
def pretend_host(step_bytes: int) -> Iterator[PretendHost]:
    """State is kept on a pretended host, that of so many bytes of parameters at a time off it."""
    host = PretendHost()
    with (
        mock.patch.object(optimizer_offload, "HOST", host),
        mock.patch.object(optimizer_offload, "STEP_BYTES", step_bytes),
    ):
        yield host
