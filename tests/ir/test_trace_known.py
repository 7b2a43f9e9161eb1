"""What a model computes from its own constants, symbols and loops over pieces, traced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.errors import InputError
from autopar.ir.trace import trace
from trace_check import check_same, ops, run

torch.set_num_threads(1)


def rows(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Padded(nn.Module):
    """Pads by what it computes from sizes in buffers, as codecs of audio do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()
        self.register_buffer("stride", torch.tensor(3))
        self.register_buffer("width", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        total = self.width - self.stride
        frames = torch.ceil((x.shape[-1] - self.width + total) / self.stride + 1).long() - 1
        extra = frames * self.stride + self.width - total - x.shape[-1]
        if max(total, extra) > 1:
            x = F.pad(self.fc(x), (total, extra))
        return x[..., : x.shape[-1] - extra]


def test_numbers_in_buffers_are_taken_and_checked():
    model = Padded()
    program = check_same(model, rows())
    assert not any(op.startswith("autopar_whole") for op in ops(program))
    (checked,) = [n for n in program.graph.calls if n.op == "autopar.checked"]
    assert len(checked.args[1]) == 2
    model.width.fill_(7)
    with pytest.raises(InputError, match=r"the buffer 'width', whose numbers 5 were taken"):
        run(program, model, (rows(),), {})


class Counted(Padded):
    """Its buffer changes before it is used: no constant."""

    def forward(self, x: Tensor) -> Tensor:
        self.width.add_(0)
        return self.fc(x)[:, : int(self.width)].sum()


def test_a_buffer_that_is_written_is_not_known():
    program = trace(Counted(), (rows(),))
    assert any(op.startswith("autopar_whole") for op in ops(program))
    assert not any("checked" in op for op in ops(program))


class Places(nn.Module):
    """Lists the places of a mask that it makes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.ones_like(x).long().tril().nonzero()
        rows = [places[places[:, 0] == row] for row in places[:, 0].unique()]
        longest = max(len(r) for r in rows)
        picked = torch.cat([r[torch.multinomial(torch.ones(len(r)), 1)] for r in rows])
        return self.fc(x)[picked[:, 0], picked[:, 1]] * longest


def test_places_of_a_mask_of_constants_are_constants():
    program = check_same(Places(), rows())
    assert not any(op.startswith("autopar_whole") for op in ops(program))


class Rolled(nn.Module):
    """Shifts by a number that is found in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        delays = h.detach().sum(0).topk(2).indices
        return sum(h.roll(shifts=-int(delays[i]), dims=1) * (i + 1) for i in range(2))


def test_a_shift_out_of_data_is_a_look_up():
    program = check_same(Rolled(), rows())
    assert ops(program).count("index_select.default") == 2
    small = [n for n in program.graph.calls if n.op.startswith("autopar_whole")]
    assert all(v.shape == (8,) for n in small for v in n.results)
    model, other = Rolled(), rows(seed=4)
    assert torch.equal(run(trace(model, (rows(),)), model, (other,), {})[0], model(other))


class Grouped(nn.Module):
    """Experts as a loop of products over pieces."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 6, 8).double())

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.sort().indices
        sizes = F.one_hot(chosen, len(self.weight)).sum(0).tolist()
        pieces = x[order].split(sizes, dim=0)
        made = torch.cat([F.linear(p, self.weight[i]) for i, p in enumerate(pieces)], dim=0)
        return torch.zeros_like(made).index_add(0, order, made)


def test_a_loop_of_products_over_pieces_is_a_grouped_product():
    pytest.importorskip("transformers")
    model = Grouped()
    chosen = torch.tensor([0, 2, 2, 0, 2, 0, 0])
    program = check_same(model, rows(7).requires_grad_(), chosen, tolerance=1e-14)
    assert any("grouped_mm_fallback" in op for op in ops(program))
    assert not any(op.startswith("autopar_whole") for op in ops(program))
    for other in ([1, 1, 1, 1, 1, 1, 1], [2, 1, 0, 2, 1, 0, 2]):
        args = (rows(7, seed=2).requires_grad_(), torch.tensor(other))
        assert torch.allclose(run(program, model, args, {})[0], model(*args), rtol=1e-13)
