"""Where the processes that a launcher started find themselves."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def world_size() -> int:
    """How many processes there are: of the process group, else what the launcher says.

    torchrun and `accelerate launch` say it in the environment. A process that nobody launched is
    alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def compute_device(mesh: object) -> torch.device:
    """Where this process computes, for a model that does not say it (on the meta device)."""
    if isinstance(mesh, DeviceMesh):
        kind = mesh.device_type
    elif dist.is_available() and dist.is_initialized():
        kinds = dist.group.WORLD._device_types if dist.group.WORLD is not None else []
        kind = "cuda" if torch.device("cuda") in kinds and torch.cuda.is_available() else "cpu"
    elif world_size() > 1:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        kind = torch.get_default_device().type
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    # A launcher says which device of its host a process has; without one it is chosen already.
    index = int(os.environ.get("LOCAL_RANK", module.current_device()))
    return torch.device(kind, index if index < module.device_count() else module.current_device())
