"""What a traced graph looks like: origins, names, regions, outputs, one spelling per call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.graph import Value
from autopar.ir.trace import trace
from trace_check import check_same, ops

torch.set_num_threads(1)


class Apply(nn.Module):
    """A linear layer and a function of (module, input)."""

    def __init__(self, function, width=8):
        super().__init__()
        self.fc = nn.Linear(width, width, dtype=torch.float64)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def example(*shape, **kwargs):
    torch.manual_seed(0)
    return torch.randn(*(shape or (4, 8)), dtype=torch.float64, **kwargs)


# Origins and names.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return torch.relu(self.fc(x))


def test_node_knows_its_module_and_line():
    model = nn.Sequential(Block(), Block())
    program = trace(model, (example(),))
    linear, relu = list(program.graph.calls)[2:]
    assert (linear.origin.module, linear.origin.kind) == ("1.fc", "Linear")
    assert (relu.origin.module, relu.origin.kind) == ("1", "Block")
    assert relu.origin.code == linear.origin.code == "return torch.relu(self.fc(x))"
    assert relu.origin.file == __file__
    assert __file__ in str(relu.origin)


def test_sources_are_named_after_their_paths_and_come_first():
    program = trace(nn.Sequential(Block(), Block()), (example(),))
    nodes = program.graph.nodes
    assert [n.op for n in nodes] == ["param"] * 4 + ["input"] + [
        "aten.linear.default", "aten.relu.default"] * 2  # fmt: skip
    assert [n.name for n in nodes[:5]] == [
        "p_0_fc_weight", "p_0_fc_bias", "p_1_fc_weight", "p_1_fc_bias", "input"]  # fmt: skip
    assert nodes[0].target == "0.fc.weight"
    assert [n.name for n in program.graph.calls] == ["linear", "relu", "linear_1", "relu_1"]


def test_unused_state_is_listed_without_nodes():
    model = Apply(lambda m, x, y: m.fc(x))
    model.unused = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    program = check_same(model, example(), example())
    assert program.params["unused"].shape == (3,) and not program.params["unused"].requires_grad
    assert not program.buffers["scratch"].persistent
    assert [n.target for n in program.graph.sources("param")] == ["fc.weight", "fc.bias"]
    assert [n.target for n in program.graph.sources("input")] == ["args[0]", "args[1]"]


def test_tied_buffers_are_one():
    def forward(m, x):
        m.a.add_(1)
        return m.fc(x) * m.b

    model = Apply(forward)
    model.register_buffer("a", torch.zeros(8, dtype=torch.float64))
    model.register_buffer("b", model.a)
    program = check_same(model, example())
    assert program.buffers["a"].names == ("a", "b") and "b" not in program.buffers


def test_constants_are_lifted():
    model = Apply(lambda m, x: m.fc(x) * torch.tensor(m.numbers) + m.captured)
    model.numbers = [1.0, 2.0] * 4
    model.captured = torch.full((8,), 2.0)
    program = check_same(model, example())
    assert "captured" in program.constants and len(program.constants) == 2


# Gradients.


def test_gradient_is_known_for_every_value():
    def forward(m, x, y):
        h = m.fc(x)
        top = h.argmax(-1)
        return h * torch.zeros_like(h) + h.detach(), top, h > 0, y * 2, torch.where(h > 0, h, y)

    x, y = example(requires_grad=True), example()
    program = check_same(Apply(forward), x, y)
    grads = {n.op: n.results[0].grad for n in program.graph.calls}
    assert grads["aten.linear.default"] and grads["aten.where.self"]
    for op in ("argmax.default", "zeros_like.default", "detach.default", "gt.Scalar"):
        assert not grads[f"aten.{op}"]
    assert program.signature.order[0].requires_grad and not program.signature.order[1].requires_grad


def test_no_grad_region_is_inlined_and_cuts_the_gradient():
    def forward(m, x):
        h = m.fc(x)
        with torch.no_grad():
            scale = h.exp().sum() + h.sum()
        return h / scale

    program = check_same(Apply(forward), example())
    assert ops(program) == ["linear.default", "detach.default", "exp.default", "sum.default",
                            "sum.default", "add.Tensor", "div.Tensor"]  # fmt: skip


def test_decorated_no_grad_and_views_inside():
    @torch.no_grad()
    def stop(h):
        return h[:, :4].t(), h.detach()

    def forward(m, x):
        h = m.fc(x)
        a, b = stop(h)
        with torch.no_grad(), torch.enable_grad():
            c = h * 2
        return h.sum() * a.sum() + b, c

    check_same(Apply(forward), example())


def test_frozen_parameter_carries_no_gradient():
    model = Apply(lambda m, x: m.fc(x))
    model.fc.bias.requires_grad_(False)
    program = check_same(model, example())
    assert [n.results[0].grad for n in program.graph.sources("param")] == [True, False]


# Autocast.


def test_autocast_region_marks_its_nodes():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.fc(x).relu()
            with torch.autocast("cpu", enabled=False):
                h = h.float() + 1
        return m.fc(h).pow(2).mean()

    model = Apply(forward).float()
    program = check_same(model, example().float())
    marked = {n.op: n.attrs.get("autocast") for n in program.graph.calls}
    assert marked["aten.relu.default"] == ("cpu", torch.bfloat16)
    assert marked["aten.add.Tensor"] is None and marked["aten.mean.default"] is None
    first = next(program.graph.calls)
    assert first.results[0].dtype == torch.bfloat16


def test_autocast_around_the_trace_is_kept_with_the_nodes():
    model, x = Apply(lambda m, x: m.fc(x)).float(), example().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = trace(model, (x,))
    (linear,) = program.graph.calls
    assert linear.attrs == {"autocast": ("cpu", torch.bfloat16)}
    assert linear.results[0].dtype == torch.bfloat16


# Outputs.


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    scores: torch.Tensor | None = None
    extra: dict | None = None


def structures(m, x):
    h = m.fc(x)
    return [Result(h.sum(), None, {"h": h, "n": 3}), (None, "text", x, m.fc.weight)]


@pytest.mark.parametrize(
    "function",
    [
        structures,
        lambda m, x: m.fc(x),
        lambda m, x: {"b": m.fc(x), "a": (x, [2.5, True, None])},
        lambda m, x: (m.fc.weight.clone(), x.clone(), m.fc(x)),
        lambda m, x: (m.fc(x),) * 2,
    ],
)
def test_output_structure_is_kept(function):
    check_same(Apply(function), example())


def test_copy_of_a_parameter_is_no_alias_of_it():
    model, x = Apply(lambda m, x: (m.fc.weight.clone(), m.fc.weight)), example()
    copied, same = trace(model, (x,)).graph.outputs
    assert copied != same and same.name == "fc_weight"


def test_nested_inputs_and_constants():
    def forward(m, batch, *, scale, mode="sum"):
        h = m.fc(batch["x"][0]) * scale
        return h.sum() if mode == "sum" else h + batch["y"]

    batch = {"x": [example(), None], "y": example(4, 1)}
    check_same(Apply(forward), batch, scale=2.0, mode="add")


# One spelling.


def spelled(function, *shape):
    program = check_same(Apply(function), example(*shape))
    return [n for n in program.graph.calls if n.op != "aten.linear.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x).view(2, -1),
        lambda m, x: m.fc(x).unflatten(0, (2, -1)).flatten(1),
        lambda m, x: m.fc(x).reshape(-1).contiguous().view(2, 16),
        lambda m, x: m.fc(x).view_as(torch.zeros(2, 16)),
    ],
)
def test_reshapes_are_one_reshape_with_true_sizes(function):
    (node,) = spelled(function)
    assert node.op == "aten.reshape.default" and node.args[1] == [2, 16]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x).to(torch.float64).contiguous().clone(),
        lambda m, x: F.dropout(m.fc(x), 0.0),
        lambda m, x: F.dropout(m.fc(x), 0.5, training=False),
        lambda m, x: m.fc(x)[:, :100].expand(-1, 8).view(4, 8),
        lambda m, x: m.fc(x).reshape(2, 16).reshape(4, 8),
        lambda m, x: m.fc(x.detach()),
        lambda m, x: m.fc(x).squeeze(0),
    ],
)
def test_calls_that_change_nothing_are_dropped(function):
    assert spelled(function) == []


def test_slices_and_expands_have_true_sizes():
    (node,) = spelled(lambda m, x: m.fc(x)[:, -3:])
    assert node.args[1:] == (1, 5, 8, 1)
    (node,) = spelled(lambda m, x: m.fc(x).narrow(-1, 2, 3))
    assert (node.op, node.args[1:]) == ("aten.slice.Tensor", (1, 2, 5, 1))
    (node,) = spelled(lambda m, x: m.fc(x)[-1])
    assert node.args[1:] == (0, 3)
    _, expand = spelled(lambda m, x: m.fc(x)[:, None].expand(-1, 2, -1))
    assert expand.args[1] == [4, 2, 8]


def test_conversions_say_only_the_dtype():
    (node,) = spelled(lambda m, x: m.fc(x).to("cpu", torch.float32))
    assert (node.op, node.args[1:], node.kwargs) == ("aten.to.dtype", (torch.float32,), {})


def test_conjugates_are_computed():
    """A lazy one is a flag of its tensor, which no collective sends."""
    calls = spelled(lambda m, x: torch.fft.rfft(m.fc(x)).conj().abs())
    assert calls[1].op == "aten._conj_physical.default"


def test_factories_do_not_hang_on_a_tensor():
    ones, _ = spelled(lambda m, x: m.fc(x) + x.new_ones(8))
    assert (ones.op, ones.args) == ("aten.ones.default", ([8],))
    assert ones.kwargs == {"dtype": torch.float64, "device": torch.device("cpu")}


def test_random_dropout_is_kept_whole():
    (node,) = spelled(lambda m, x: F.dropout(m.fc(x), 0.5))
    assert node.op == "aten.dropout.default" and node.args[1:] == (0.5, True)


# Products over flattened dimensions.


def conv1d(m, x):
    flat = torch.addmm(m.fc.bias, x.view(-1, 8), m.fc.weight)
    return flat.view(*x.shape[:-1], 8)


def flat_mm(m, x):
    return torch.mm(x.reshape(-1, 8), m.fc.weight).reshape(x.shape)


def flat_linear(m, x):
    return m.fc(x.flatten(0, 1)).unflatten(0, (2, 4))


@pytest.mark.parametrize(
    ("function", "op"),
    [(conv1d, "autopar.addmm_nd"), (flat_mm, "aten.matmul.default"),
     (flat_linear, "aten.linear.default")],
)  # fmt: skip
def test_flattened_product_keeps_its_leading_dimensions(function, op):
    program = check_same(Apply(function), example(2, 4, 8), tolerance=1e-14)
    (node,) = program.graph.calls
    assert node.op == op and node.results[0].shape == (2, 4, 8)
    assert node.origin.line in range(1, 1000) and node.origin.file == __file__


def used_twice(m, x):
    flat = torch.addmm(m.fc.bias, x.view(-1, 8), m.fc.weight)
    return flat.view(x.shape), flat.sum()


def other_dimensions(m, x):
    return torch.addmm(m.fc.bias, x.view(-1, 8), m.fc.weight).view(4, 2, 8)


def scaled(m, x):
    return torch.addmm(m.fc.bias, x.view(-1, 8), m.fc.weight, alpha=2).view(x.shape)


@pytest.mark.parametrize("function", [used_twice, other_dimensions, scaled])
def test_flattened_product_that_does_not_fit_stays(function):
    program = check_same(Apply(function), example(2, 4, 8))
    assert "addmm.default" in ops(program)


# Operators nobody knows.


@torch.library.custom_op("autopar_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: grad * 2)


def test_custom_operator_is_an_ordinary_node():
    program = check_same(Apply(lambda m, x: double(m.fc(x))), example())
    assert ops(program) == ["linear.default", "autopar_test.double.default"]


def test_results_of_one_call_are_its_values():
    program = check_same(Apply(lambda m, x: m.fc(x).split([3, 5], 1)), example())
    split = list(program.graph.calls)[-1]
    assert [v.shape for v in split.results] == [(4, 3), (4, 5)]
    assert all(isinstance(o, Value) for o in program.graph.outputs)
