"""One rank of `test_awaited.py`: forward passes that go on without each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.awaited import Awaited
from ranks import main

#: Seconds after which a rank gives up waiting for another.
WAIT = timedelta(seconds=60)


class Shifted(nn.Module):
    """A language model's loss: the labels are the inputs, shifted, some of which do not count."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)
        self.register_buffer("weights", torch.linspace(0.5, 2, 7) if weighted else None)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:].reshape(-1)
        return F.cross_entropy(logits.flatten(0, 1), labels, weight=self.weights)


def check_forward(rank: int, world: int) -> None:
    """The second rank stands still before its loss until the first has left its forward pass."""
    for weighted in (False, True):
        torch.manual_seed(0)
        model = Shifted(weighted).double()
        ids = torch.randint(7, (2 * world, 5))
        parallel = autopar.autoparallelize(
            copy.deepcopy(model), (ids,), mesh=world, mode="data_parallel"
        )
        expected = model(ids)
        expected.backward()
        name, store = f"forward of {weighted}", dist.distributed_c10d._get_default_store()
        if rank == 1:
            _hold(parallel.graph_module, partial(store.wait, [name], WAIT))
        loss = parallel(ids)
        assert isinstance(loss, Awaited)
        if rank == 0:
            store.set(name, "left")
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.detach())
        for path, parameter in parallel.named_parameters():
            grad = parameter.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(grad, model.get_parameter(path).grad)


def _hold(run: torch.fx.GraphModule, wait: Callable[[], Any]) -> None:
    """Wait before the linear layer of a graph."""
    node = next(n for n in run.graph.nodes if n.target is torch.ops.aten.linear.default)

    def linear(*args: Any) -> Any:
        wait()
        return torch.ops.aten.linear.default(*args)

    node.target = linear
    run.recompile()


if __name__ == "__main__":
    main({"forward": check_forward})
