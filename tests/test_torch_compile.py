"""`torch.compile` of a parallel module: one graph, and the values and gradients of the module.

`mixed_worker.py` does the same among real processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.errors import TraceError
from autopar.module import ParallelModule


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.second = nn.Dropout(dropout), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        scores = self.second(self.drop(torch.relu(self.norm(self.first(x)))))
        return {"loss": nn.functional.mse_loss(scores, target), "scores": scores}


def call(rows: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=random), torch.randn(rows, 8, generator=random)


def parallel(dropout: float = 0.0, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    return autopar.autoparallelize(Net(dropout), call(), mesh=1, **options)


def compiled(module: ParallelModule) -> Any:
    return torch.compile(module, fullgraph=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(one: ParallelModule, run_one: Any, other: ParallelModule, rows: int = 4) -> None:
    """A training step of both: outputs, gradients and buffers."""
    for module in (one, other):
        module.zero_grad()
    got, want = run_one(*call(rows)), other(*call(rows))
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value)
    if want["loss"].requires_grad:
        got["loss"].backward()
        want["loss"].backward()
    for name, parameter in other.named_parameters():
        mine = one.get_parameter(name)
        assert (mine.grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(mine.grad, parameter.grad)
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(one.get_buffer(name), buffer)


def refusal(run: Any, rows: int = 4) -> str:
    """The TraceError behind what `torch.compile` raises."""
    with pytest.raises(Exception, match="nonstrict_trace") as raised:
        run(*call(rows))
    error: BaseException | None = raised.value
    while error is not None and not isinstance(error, TraceError):
        error = error.__cause__ or error.__context__
    return str(error)


def test_training_evaluation_and_what_is_trained() -> None:
    mine, plain = (parallel(mixed_precision="bf16") for _ in range(2))
    run = compiled(mine)
    for module in (mine, plain):
        module.eval()(*call())  # its graph exists, then
        module.train()
    for _ in range(2):
        same(mine, run, plain)
    for module in (mine, plain):
        module.eval()
    same(mine, run, plain)
    for module in (mine, plain):
        module.train()
        module.get_parameter("first.weight").requires_grad_(False)
        module(*call())
    same(mine, run, plain)
    with torch.no_grad():
        torch.testing.assert_close(run(*call())["loss"], plain(*call())["loss"])


def test_other_shapes_after_a_call_of_them() -> None:
    mine, plain = parallel(), parallel()
    run = compiled(mine)
    same(mine, run, plain)
    assert "no graph for such a call yet" in refusal(run, 6)
    mine.eval()(*call(6))
    plain.eval()(*call(6))
    for rows in (6, 4):
        mine(*call(rows))
        plain(*call(rows))
        same(mine, run, plain, rows)


def test_random_numbers() -> None:
    """Every call draws anew, and what the module itself draws after the same seed."""
    mine, plain = parallel(0.5), parallel(0.5)
    run = compiled(mine)
    losses = []
    for seed in (0, 1, 1):
        got, want = [], []
        for module, values in ((run, got), (plain, want)):
            torch.manual_seed(seed)
            for _ in range(2):
                loss = module(*call())["loss"]
                loss.backward()
                values.append(loss.item())
        assert got == want and got[0] != got[1]
        losses.append(got)
    assert losses[0] != losses[1] == losses[2]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine.get_parameter(name).grad, parameter.grad)


def test_what_a_compiled_graph_does_not_do_is_refused() -> None:
    module = parallel()
    run = compiled(module)
    run(*call())["loss"].backward()
    with module.no_sync():
        assert "inside of it" in refusal(run)
        module(*call())["loss"].backward()
        with torch.no_grad():
            run(*call())
    run(*call())["loss"].backward()
    policed = parallel(memory_policy="recompute")
    assert "memory policy would not be followed" in refusal(compiled(policed))
    policed.eval()(*call())
    with torch.no_grad():
        compiled(policed)(*call())


def test_exact_random_numbers_are_refused() -> None:
    module = parallel(0.5, exact_rng=True)
    assert "exact_rng" in refusal(compiled(module))
