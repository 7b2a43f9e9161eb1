"""Python that depends on the values of tensors, and custom functions: what the tracer keeps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.errors import InputError, TraceError
from autopar.ir.trace import trace
from trace_check import check_same, ops, run

torch.set_num_threads(1)


def example(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Apply(nn.Module):
    """A model whose forward is a given function of itself and its input."""

    def __init__(self, forward: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.function = forward
        self.fc = nn.Linear(8, 8)
        for name, module in modules.items():
            self.add_module(name, module)
        self.double()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


# --- decisions --------------------------------------------------------------------------------


def clamped(m, x):
    h = m.fc(x)
    if not torch.isfinite(h).all():
        h = h.clamp(-10, 10)
    return h.sum()


def test_decision_is_frozen_and_checked_on_every_call():
    model = Apply(clamped)
    program = check_same(model, example())
    assert "checked" in ops(program)[-1]
    bad = example()
    bad[0, 0] = float("inf")
    with pytest.raises(InputError, match=r"isfinite.*came out True .* is False"):
        run(program, model, (bad,), {})


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: bool(x.sum() > 100),
        lambda x: (x > 100).any().item(),
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.is_nonzero(x.sum() > 100),
    ],
)
def test_every_way_to_ask_for_a_truth_is_seen(decide):
    def forward(m, x):
        h = m.fc(x)
        return h * 2 if decide(h) else h

    program = check_same(Apply(forward), example())
    assert ops(program).count("autopar.checked") == 1


def test_decisions_at_one_line_keep_their_order():
    def forward(m, x):
        h = m.fc(x)
        for bound in (-100.0, 100.0, -1e9):
            if h.sum() > bound:
                h = h + bound
        return h

    program = check_same(Apply(forward), example())
    node = list(program.graph.calls)[-1]
    assert node.args[2] == [True, False, True]


def test_decision_by_chance_is_refused():
    def forward(m, x):
        h = m.fc(x)
        return h if torch.rand([]) < 0.5 else h * 2

    with pytest.raises(TraceError, match="made by a random number"):
        trace(Apply(forward), (example(),))


def test_without_data_a_decision_is_refused():
    with pytest.raises(TraceError, match="depends on the values of a tensor"):
        trace(Apply(clamped).to("meta"), (example(),))


# --- shapes out of data -----------------------------------------------------------------------


def masked_mean(m, x):
    h = m.fc(x)
    return h[x[:, 0] > 0].pow(2).mean() + h.mean()


def number(m, x):
    return m.fc(x) * x.sum().item()


def scattered(m, x):
    h = m.fc(x)
    rows = (x[:, 0] > 0).nonzero().squeeze(-1)
    kept = torch.zeros_like(h)
    kept[rows] = h[rows] * 2
    return kept + h


def accumulated(m, x):
    h = m.fc(x)
    picked = x[:, 0] > 0
    h[picked] += F.relu(h[picked])
    return h * 3


@pytest.mark.parametrize("forward", [masked_mean, number, scattered, accumulated])
def test_shapes_out_of_data_stay_inside_one_call(forward):
    model = Apply(forward)
    program = check_same(model, example(), tolerance=1e-15)
    assert sum(op.startswith("autopar_whole.") for op in ops(program)) == 1
    other = example(seed=5)
    got, _ = run(program, model, (other,), {})
    assert torch.allclose(got, model(other), rtol=1e-14)


def test_a_loss_of_connectionist_kind_has_one_result():
    def forward(m, x):
        scores = m.fc(x).log_softmax(-1).unsqueeze(1).expand(4, 2, 8)
        targets = torch.tensor([1, 2, 1])
        lengths = torch.full((2,), 4), torch.tensor([2, 1])
        return F.ctc_loss(scores, targets, *lengths)

    check_same(Apply(forward), example())


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean"},
        {"mode": "max"},
        {"mode": "mean", "padding_idx": 3},
        {"mode": "sum", "padding_idx": -2},
    ],
)
def test_equal_bags_are_a_look_up_and_a_reduction(options):
    bags = nn.EmbeddingBag(8, 4, **options)
    indices = torch.tensor([[1, 3, 3], [6, 2, 3], [3, 3, 3], [0, 6, 6]])
    model = Apply(lambda m, x: m.bags(x), bags=bags)
    program = check_same(model, indices, tolerance=1e-15)
    assert "embedding.default" in ops(program)
    assert not any("embedding_bag" in op for op in ops(program))


def test_weighted_and_unequal_bags():
    indices, weights = torch.tensor([[1, 3, 3], [6, 2, 3]]), example()[:2, :3]
    bags = nn.EmbeddingBag(8, 4, mode="sum")

    def weighted(m, x, w):
        return m.bags(x, per_sample_weights=w)

    check_same(Apply(weighted, bags=bags), indices, weights.requires_grad_(), tolerance=1e-15)

    def unequal(m, x):
        return m.bags(x.flatten(), torch.tensor([0, 1]))

    program = check_same(Apply(unequal, bags=bags), indices)
    assert any("embedding_bag" in op for op in ops(program))


# --- modules kept whole -----------------------------------------------------------------------


class Experts(nn.Module):
    """Visits only the experts that some row chose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8) * 0.2)

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, str]:
        made = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero().squeeze(-1)
            made = made.index_add(0, rows, x[rows] @ self.weight[expert])
        return made, "experts"


def routed(m, x):
    h = m.fc(x)
    made, kind = m.experts(h, h.detach().abs().sum(-1).long() % 3)
    return made + h if kind == "experts" else h


def test_module_that_loops_over_data_is_one_call():
    model = Apply(routed, experts=Experts())
    program = check_same(model, example(), tolerance=1e-14)
    (call,) = [n for n in program.graph.calls if n.op.startswith("autopar_whole.Experts_")]
    assert [v.name for v in call.operands][-1] == "experts_weight"
    assert program.notes == (
        "experts (Experts): its Python depends on the values of tensors, so it runs whole on "
        "every rank",
    )
    other = example(seed=3)
    assert torch.allclose(run(program, model, (other,), {})[0], model(other), rtol=1e-13)
    assert "forward" not in vars(model.experts)


class Longest(nn.Module):
    """As many columns as the largest count says: fixed for the example, not for other inputs."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        columns = []
        for column in range(int(counts.max().item())):
            columns.append(x[:, column] * (counts > column))
        return torch.stack(columns, 1)


def test_result_whose_shape_changes_is_named():
    model = Apply(lambda m, x, counts: m.longest(m.fc(x), counts).sum(), longest=Longest())
    counts = torch.tensor([1, 3, 2, 0])
    program = check_same(model, example(), counts, tolerance=1e-15)
    with pytest.raises(InputError, match=r"'longest' \(Longest\): gave .* compiled for \(4, 3\)"):
        run(program, model, (example(), counts + 1), {})


@pytest.mark.parametrize("double", [True, False])
def test_looping_experts_are_traced_in_another_implementation(double):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
                           num_local_experts=4, use_cache=False,
                           experts_implementation="eager")  # fmt: skip
    model = MixtralForCausalLM(config)
    model = model.double() if double else model
    program = check_same(model, torch.randint(2, 32, (2, 6)), tolerance=1e-5)
    name = "batched_mm" if double else "grouped_mm"
    assert f"experts_implementation='{name}'" in program.notes[-1]
    assert model.config._experts_implementation == "eager"


# --- custom functions -------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Two results; a gradient of its own; a constant argument."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor, y + x

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * ctx.factor * 3 + x, second * 5, None


class Setup(torch.autograd.Function):
    """The other form: a context set up apart, keyword arguments."""

    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * 7, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: sum(Scaled.apply(m.fc(x), x, 2.0)),
        lambda m, x: Setup.apply(m.fc(x), power=3),
        lambda m, x: Noisy.apply(m.fc(x)),
        lambda m, x: Scaled.apply(Setup.apply(m.fc(x)), m.fc(x), 0.5)[1],
    ],
)
def test_custom_function_keeps_its_own_backward(forward):
    check_same(Apply(forward), example())


def test_functions_of_one_name_stay_apart():
    def made(factor):
        class Local(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, grad):
                return grad * factor * 10

        return Local

    first, second = made(2.0), made(3.0)
    program = check_same(Apply(lambda m, x: first.apply(m.fc(x)) + second.apply(x)), example())
    program = check_same(
        Apply(lambda m, x: first.apply(m.fc(x)) + second.apply(m.fc(x))), example()
    )
    names = {op for op in ops(program) if op.startswith("autopar_whole.")}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda m, x: InPlace.apply(m.fc(x)), "'InPlace' writes to its arguments in place"),
        (lambda m, x: Scaled.apply(m.fc(x), x, object())[0], "argument 2 .* 'Scaled' is a object"),
    ],
)
def test_custom_function_that_cannot_be_kept_is_named(forward, says):
    with pytest.raises(TraceError, match=says):
        trace(Apply(forward), (example(),))


# --- random numbers that are no operators -----------------------------------------------------


@pytest.mark.parametrize(
    "draw", [lambda: random.random(), lambda: np.random.rand(), lambda: random.uniform(0, 1)]
)
def test_python_random_number_is_refused_with_its_line(draw):
    def forward(m, x):
        return m.fc(x) * draw()

    with pytest.raises(TraceError, match=r"test_trace_data.py:.*would freeze it"):
        trace(Apply(forward), (example(),))
    assert 0 <= draw() < 1


def test_conversion_in_forward_is_refused_where_it_changes_something():
    def same(m, x):
        return m.fc.to(torch.float64)(x)

    def other(m, x):
        return m.fc.to(torch.float32)(x.float())

    check_same(Apply(same), example())
    with pytest.raises(TraceError, match="forward converts 'weight' of a Linear"):
        trace(Apply(other), (example(),))


# --- example inputs that are one tensor, or the model's ------------------------------------------


def _difference(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (m.fc(x) - y).square().mean()


def _same_twice() -> tuple[Tensor, Tensor]:
    return (x := example()), x


def _parts_of_one() -> tuple[Tensor, Tensor]:
    x = example(rows=5)
    return x[:4], x[1:]


def _inference() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return _same_twice()


@pytest.mark.parametrize("given", [_same_twice, _parts_of_one, _inference])
def test_an_input_is_not_taken_for_another(given: Any) -> None:
    """Labels may be the inputs in the example, and something else later."""
    model = Apply(_difference)
    program = trace(model, given())
    assert len(program.graph.sources("input")) == 2
    assert all(program.graph.consumers[n.name] for n in program.graph.sources("input"))
    x, y = example(seed=1), example(seed=2)
    assert torch.equal(run(program, model, (x, y), {})[0], model(x, y))


def test_an_input_is_not_taken_for_a_tensor_of_the_model() -> None:
    model = Apply(_difference)
    model.register_buffer("offset", torch.ones(8, 8, dtype=torch.float64))
    x, y = example(8, seed=1), example(8, seed=2)
    for held in (model.fc.weight, model.fc.weight.data, model.offset):
        program = trace(model, (example(8), held))
        later = y.clone().requires_grad_(held.requires_grad)
        assert torch.equal(run(program, model, (x, later), {})[0], model(x, y))
