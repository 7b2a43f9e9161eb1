"""The memory that a training step really uses: every storage alive at one time, in bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.compiler import Traced
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.runtime.emit import emit
from autopar.runtime.groups import RankContext
from autopar.runtime.pieces import piece

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-6),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-6, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-6),
}


class LiveBytes(TorchDispatchMode):
    """Counts the storages of the given tensors and of all that operators make; `peak` in bytes."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in existing:
            self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):  # a wrapper has no memory of its own
            tensor = tensor._local_tensor
        if tensor.is_meta:  # only the shape of something
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self._storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._storages.pop(key)

    def _give_back(self) -> None:
        """What storages gave back while something still held them."""
        for key, held in list(self._storages.items()):
            storage = held()
            if storage is not None:
                self.live -= self._sizes[key] - storage.nbytes()
                self._sizes[key] = storage.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        if self.live > self.peak:
            self._give_back()
            self.peak = max(self.peak, self.live)
        return made


def peak_of_step(
    traced: Traced, model: torch.nn.Module, call: dict[str, Any], graph: Graph, optimizer: str,
    mesh: Mesh, context: RankContext,
) -> int:  # fmt: skip
    """Train two steps of a graph on one rank; the most bytes alive in the second one."""
    sources = _local_sources(traced, model, call, graph, mesh, context)
    parameters = [x for x in sources if x.requires_grad]
    optimize = OPTIMIZERS[optimizer](parameters)
    run = emit(graph)

    def step() -> tuple[Any, ...]:
        with context.active():
            outputs, _ = run(*sources)
        outputs[0].backward()
        return outputs

    step()
    optimize.step()
    optimize.zero_grad()
    state = [v for s in optimize.state.values() for v in s.values() if isinstance(v, Tensor)]
    with LiveBytes([*sources, *state]) as live:
        kept = step()
        optimize.step()
    del kept
    return live.peak


def _local_sources(
    traced: Traced, model: torch.nn.Module, call: dict[str, Any], graph: Graph, mesh: Mesh,
    context: RankContext,
) -> list[Tensor]:  # fmt: skip
    """This rank's pieces of what the graph takes, in its order."""
    inputs = iter(traced.program.signature.bind((), call))
    found = []
    for node in graph.nodes:
        if node.op == "param":
            whole = model.get_parameter(node.target).detach()
        elif node.op == "buffer":
            whole = model.get_buffer(node.target)
        elif node.op == "constant":
            whole = traced.program.constants[node.target]
        elif node.op == "input":
            whole = next(inputs)
        else:
            continue
        (value,) = node.results
        if value.layout is not None:
            whole = piece(whole, value.layout, mesh, context.coordinates)
        found.append(whole.clone().requires_grad_(node.op == "param" and value.grad))
    return found
