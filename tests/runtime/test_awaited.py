"""Sums that are returned before they have arrived, and what begins before it is reached."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.awaited import Awaited, all_reduce_returned
from autopar.runtime.groups import Group, Landing, RankContext
from ranks import run_ranks


class Pair(Group):
    """One of two ranks, the other of which has the same term."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        super().__init__(axes, 2, 0)
        self.waits = 0

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        self.waits += 1
        return 2 * x

    def _start_all_reduce(self, x: Tensor) -> Landing:
        return lambda: self._all_reduce(x, "sum")


class Pairs:
    def prepare(self, axes_list: Any) -> None:
        pass

    def connect(self, axes: tuple[str, ...]) -> Group:
        return Pair(axes)


@pytest.fixture
def context() -> RankContext:
    return RankContext(Mesh.of({"x": 2}), 0, Pairs())


def returned(context: RankContext, x: Tensor) -> tuple[Tensor, Pair]:
    """Twice a tensor, through the sum of two ranks."""
    with context.active():
        made = all_reduce_returned(x, ("x",), "I")
    group = context.group(("x",))
    assert isinstance(group, Pair)
    return made, group


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.item(),
    "float": lambda x: float(x.detach()),
    "format": lambda x: float(f"{x:.2f}"),
    "str": lambda x: float(str(x).split("(")[1].split(",")[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "data": lambda x: x.data,
    "clone": lambda x: x.clone(),
    "copy": lambda x: torch.zeros(()).copy_(x),
    "to": lambda x: x.to(torch.float64),
    "cpu": lambda x: x.cpu(),
    "product": lambda x: x * 1,
    "in place": lambda x: x.mul_(1).item(),
    "stack": lambda x: torch.stack([x, x])[0],
    "comparison": lambda x: 6.0 if x == 6 else 0.0,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "memory": lambda x: (x.data_ptr(), x.item())[1],
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_it_waits(context: RankContext, read: str) -> None:
    loss, group = returned(context, torch.tensor(3.0, requires_grad=True) * 1)
    assert isinstance(loss, Awaited) and loss.requires_grad and not group.waits
    assert (loss.shape, loss.dtype, loss.device.type, group.waits) == ((), torch.float32, "cpu", 0)
    assert float(READS[read](loss)) == 6.0
    assert group.waits == 1


def test_backward_does_not_wait_before_it_is_over(context: RankContext) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    waits = []
    x.register_hook(lambda grad: waits.append(group.waits))
    loss, group = returned(context, x * 5)
    loss.backward()
    assert waits == [0] and group.waits == 1
    assert x.grad is not None and x.grad.item() == 5.0  # of its own term
    assert loss.item() == 30.0 and group.waits == 1


def test_gradients_do_not_depend_on_how_they_are_asked_for(context: RankContext) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    (found,) = torch.autograd.grad(returned(context, x * x)[0], x, create_graph=True)
    assert found.item() == 6.0
    assert torch.autograd.grad(found, x)[0].item() == 2.0
    loss, _ = returned(context, x * x)
    loss /= 4
    loss.backward()
    assert x.grad is not None and x.grad.item() == 1.5 and loss.item() == 4.5
    x.grad = None
    loss, _ = returned(context, x * x)
    (loss + loss).backward(torch.tensor(0.5))
    assert x.grad is not None and x.grad.item() == 6.0


def test_scaling_a_loss_does_not_wait_for_it(context: RankContext) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    loss, group = returned(context, x * x)
    scale, more = torch.tensor(8.0, dtype=torch.float64), torch.tensor(1.0)
    total = (loss / 4 + more - 2) * scale
    with torch.no_grad():
        more.fill_(100.0)
    assert not group.waits and total.dtype == torch.float64
    total.backward()
    assert group.waits == 1 and total.item() == (18 / 4 + 1 - 2) * 8
    assert x.grad is not None and x.grad.item() == 6 / 4 * 8
    twice, _ = returned(context, x * x)
    (twice + twice).backward()
    assert x.grad.item() == 6 / 4 * 8 + 12


def test_what_is_made_of_a_loss_does_not_see_later_writes(context: RankContext) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    loss, _ = returned(context, x * 1)
    half, other = loss / 2, returned(context, x * 2)[0]
    both = loss + other
    seen = loss.detach()
    seen.mul_(10)
    assert (half.item(), both.item(), loss.item()) == (3.0, 18.0, 60.0)
    after = loss / 2
    with torch.no_grad():
        loss.zero_()
    assert (after.item(), loss.item()) == (30.0, 0.0)


def test_what_nobody_reads_is_waited_for_with_the_next(context: RankContext) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    first, group = returned(context, x * 1)
    second, _ = returned(context, x * 2)
    assert group.waits == 1 and first.item() == 6.0 and group.waits == 1
    assert second.item() == 12.0 and group.waits == 2


def test_without_gradients_it_is_there_at_once(context: RankContext) -> None:
    made, group = returned(context, torch.tensor(3.0))
    assert type(made) is Tensor and group.waits == 1
    with torch.no_grad():
        made, group = returned(context, torch.tensor(3.0, requires_grad=True))
    assert type(made) is Tensor and made.item() == 6.0


def test_ranks_do_not_wait_for_each_other_in_the_forward_pass() -> None:
    run_ranks(Path(__file__).with_name("awaited_worker.py"), 2, "forward")
