"""In-place writes come out functional, with the values and gradients of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.errors import TraceError
from autopar.ir.trace import trace
from trace_check import check_same, ops

torch.set_num_threads(1)


class Net(nn.Module):
    """A linear layer, then `write(h, x, self)`."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.write = write

    def forward(self, x):
        h = self.linear(x).clone()
        return self.write(h, x, self)


def example():
    torch.manual_seed(0)
    return torch.randn(4, 8, dtype=torch.float64)


def slices(h, x, net):
    h[:, 0] = 0
    h[:2] *= 2
    h.masked_fill_(h > 1, 1.0)
    h[:, 1:3].add_(h[:, 3:5].detach())
    return h


def alias_sees_write(h, x, net):
    row, block = h[1], h.view(2, 2, 8)
    h.mul_(2)
    row.add_(1)
    return row * 3 + block[1, 0], h


def write_through_chain(h, x, net):
    h.t()[1:4].transpose(0, 1).unsqueeze(0)[0, 2:].copy_(x[2:, 1:4])
    return h


def write_pieces(h, x, net):
    z = x.clone()
    a, b = z.chunk(2, dim=1)
    a.mul_(b)
    first, *_ = z.split([1, 3])
    first.fill_(2.0)
    rows = z.unbind(0)
    rows[3].zero_()
    return h + z, rows[3] * 2, b.sum()


def index_put(h, x, net):
    h[torch.tensor([0, 2])] = x[:2]
    h.index_add_(0, torch.tensor([1]), x[:1])
    return h


def diagonal(h, x, net):
    h[:4, :4].diagonal().fill_(1.0)
    return h


def permuted(h, x, net):
    h.view(2, 2, 8).permute(2, 0, 1)[3].neg_()
    return h


def broadcast_and_convert(h, x, net):
    h[:, 2:4] = x[0, 0].float()
    h.add_(torch.ones(8, dtype=torch.float32))
    return h


def metadata(h, x, net):
    y = h.unsqueeze_(0)
    y.mul_(2)
    return y.squeeze_(0).t_()


def relu_in_place(h, x, net):
    return torch.relu_(h * 1).mul(2)


def dropout_in_place(h, x, net):
    return torch.nn.functional.dropout(h, 0.5, True, inplace=True)


def buffer_add(h, x, net):
    net.count += 1
    return h * net.count


def buffer_slices(h, x, net):
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        net.mean[2:4] = 1.0
    return h - net.mean


def buffer_replaced(h, x, net):
    net.mean = net.mean * 0.5 + h.detach().mean(0)
    return h - net.mean


def buffer_before_and_after(h, x, net):
    before = h * (net.mean + 1)
    net.mean.add_(1)
    return before, h * net.mean


CASES = [
    slices,
    alias_sees_write,
    write_through_chain,
    write_pieces,
    index_put,
    diagonal,
    permuted,
    broadcast_and_convert,
    metadata,
    relu_in_place,
    dropout_in_place,
    buffer_add,
    buffer_slices,
    buffer_replaced,
    buffer_before_and_after,
]


@pytest.mark.parametrize("write", CASES, ids=lambda f: f.__name__)
def test_write_is_functional(write):
    check_same(Net(write), example())


def test_write_to_whole_value_is_a_rename():
    program = check_same(Net(relu_in_place), example())
    assert ops(program) == ["linear.default", "mul.Tensor", "relu.default", "mul.Tensor"]


def test_write_to_slice_is_a_scatter():
    program = check_same(Net(lambda h, x, net: h[:, 0].mul_(2) * 1 + h.sum()), example())
    assert "select_scatter.default" in ops(program)


def test_copy_is_not_an_alias():
    def write(h, x, net):
        kept = h.clone()
        h.zero_()
        return kept, h + x.sum() * net.linear.bias

    check_same(Net(write), example())


def strided(h, x, net):
    z = x.clone()
    z.as_strided((2, 2), (8, 1)).mul_(2)
    net.mean.as_strided((4,), (2,)).add_(1)
    return h + z * net.mean


def out_argument(h, x, net):
    with torch.no_grad():
        torch.div(h.sum(0), 2, out=net.mean)
        torch.add(x[0], 1, out=net.mean[:])
        torch.mean(x, 0, out=net.mean)
    return h * net.mean


@pytest.mark.parametrize("write", [strided, out_argument])
def test_write_to_buffer_is_an_update(write):
    program = check_same(Net(write), example())
    assert [name for name, _ in program.graph.updates] == ["mean"]


def test_spectral_norm_updates_its_vectors_without_gradient():
    torch.manual_seed(0)
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8).double())
    program = check_same(net, example())
    assert len(program.graph.updates) == 2


def strided_with_gradient(h, x, net):
    h.as_strided((2, 2), (8, 1)).mul_(2)
    return h


def several_outputs(h, x, net):
    torch.topk(x, 1, out=(net.mean[:4].unsqueeze(1), net.count.expand(4, 1).clone()))
    return h


def other_size(h, x, net):
    return x.clone().resize_(2, 2)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (strided_with_gradient, "aten.as_strided.default"),
        (several_outputs, "aten.topk.values"),
        (other_size, "aten.resize_.default"),
    ],
)
def test_write_that_cannot_be_followed_is_refused(write, names):
    with pytest.raises(TraceError) as raised:
        trace(Net(write), (example(),))
    assert names in str(raised.value) and "test_trace_writes.py:" in str(raised.value)


def write_to_input(h, x, net):
    x[:, 0] = 0
    return h


def write_to_parameter(h, x, net):
    with torch.no_grad():
        net.linear.weight.clamp_(-1, 1)
    return h


def write_to_captured(h, x, net):
    net.captured.add_(1)
    return h


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_to_input, "input 'x'. Write x = x.clone() first"),
        (write_to_parameter, "parameter 'linear.weight'. Change parameters outside of forward"),
        (write_to_captured, "tensor 'captured'. Register it with register_buffer"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_write_outside_the_graph_is_refused(write, says):
    net = Net(write)
    net.captured = torch.zeros(3)
    with pytest.raises(TraceError) as raised:
        trace(net, (example(),))
    assert says in str(raised.value) and "test_trace_writes.py:" in str(raised.value)


def test_write_without_gradient_to_a_tensor_with_gradient_is_refused():
    def write(h, x, net):
        with torch.no_grad():
            h[0] = 0
        return h

    with pytest.raises(TraceError, match="writes in place, without gradient"):
        trace(Net(write), (example(),))


@pytest.mark.parametrize("momentum", [0.1, 0.3])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_updates_are_explicit(momentum, training):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum)).double()
    net.train(training)
    program = check_same(net, torch.randn(2, 3, 6, 6, dtype=torch.float64))
    names = [name for name, _ in program.graph.updates]
    if training:
        assert sorted(names) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
        (norm,) = [n for n in program.graph.calls if n.op == "autopar.batch_norm_train"]
        assert len(norm.results) == 3 and norm.args[5:] == (momentum, 1e-05)
    else:
        assert names == [] and "batch_norm.default" in ops(program)


def test_batch_norm_without_running_statistics():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)).double()
    program = check_same(net, example())
    assert program.graph.updates == ()
