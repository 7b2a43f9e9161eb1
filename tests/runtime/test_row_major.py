"""Random numbers of permuted tensors: drawn by index, not by memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import verify
from autopar.runtime.row_major import RowMajorDraws

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "feature_dropout": lambda x: F.dropout2d(x, 0.5),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "in place": lambda x: x.clone().uniform_(),
    "normal": lambda x: torch.normal(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_permuted_tensor_gets_the_numbers_of_a_contiguous_one(name: str) -> None:
    permuted = torch.randn(4, 3, 5, 6).permute(2, 0, 3, 1)
    with RowMajorDraws():
        torch.manual_seed(1)
        expected = DRAWS[name](permuted.contiguous())
        torch.manual_seed(1)
        got = DRAWS[name](permuted)
    torch.manual_seed(1)
    assert torch.equal(expected, DRAWS[name](permuted.contiguous()))
    assert torch.equal(expected, got)
    if name != "rrelu":  # whose noise is written, and whose result is as dense as what it was given
        assert got.stride() == DRAWS[name](permuted).stride()


class Drawing(nn.Module):
    """Dropout on a permuted tensor, on what nobody needs, and in a layer computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x).transpose(0, 1), 0.4).transpose(0, 1)
        F.dropout(self.unused(h), 0.3)
        again = torch.utils.checkpoint.checkpoint(self._again, h, use_reentrant=False)
        return (again * torch.rand_like(again.mT).mT).pow(2).mean()

    def _again(self, h: Tensor) -> Tensor:
        return F.dropout(self.second(h).transpose(0, 1), 0.4).transpose(0, 1)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"x": 3}], ids=str)
def test_a_model_draws_the_same_numbers_on_ranks_and_on_one_device(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    verify(Drawing().double(), (x,), mesh=mesh, mode="data_parallel").raise_if_failed()
    verify(Drawing().double(), (x,), mesh=mesh).raise_if_failed()
