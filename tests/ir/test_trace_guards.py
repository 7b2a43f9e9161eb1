"""The model comes out as it went in, and what a trace would change silently is refused or said."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from autopar.ir.errors import InputError, TraceError
from autopar.ir.trace import trace
from trace_check import check_same, ops, run

torch.set_num_threads(1)


class Apply(nn.Module):
    """A linear layer and a function of (module, inputs)."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=torch.float64)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def example():
    torch.manual_seed(0)
    return torch.randn(4, 8, dtype=torch.float64)


def refusal(function, *args, prepare=lambda model: None) -> str:
    model = Apply(function)
    prepare(model)
    before = dict(vars(model))
    with pytest.raises(TraceError) as raised:
        trace(model, args or (example(),))
    assert {k: v for k, v in vars(model).items() if not k.startswith("_")} == {
        k: v for k, v in before.items() if not k.startswith("_")
    }
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(raised.value)


# Python state.


def counter(m, x):
    m.step += 1
    return m.fc(x) * m.step


def silent_counter(m, x):
    m.step += 1
    return m.fc(x)


def appended(m, x):
    m.history.append(len(m.history))
    return m.fc(x)


def late_flag(m, x):
    if getattr(m, "seen", False):
        return m.fc(x) * 2
    m.seen = True
    return m.fc(x)


def state(model):
    model.step, model.history = 0, []


@pytest.mark.parametrize(
    ("function", "name"),
    [(counter, "step"), (silent_counter, "step"), (appended, "history"), (late_flag, "seen")],
)
def test_python_state_that_matters_is_refused(function, name):
    says = refusal(function, prepare=state)
    assert says.startswith(f"the model itself (Apply): forward changes the attribute '{name}'")
    assert "register_buffer" in says


def test_flag_that_changes_nothing_is_accepted_and_put_back():
    def forward(m, x):
        m.seen = True
        return m.fc(x)

    model = Apply(forward)
    assert trace(model, (example(),)).notes == () and not hasattr(model, "seen")


def test_tensor_kept_on_the_model_is_noted_and_not_leaked():
    def forward(m, x):
        m.last = m.fc(x)
        m.kept.append(m.last)
        return m.last.sum()

    model = Apply(forward)
    model.last, model.kept = None, []
    program = trace(model, (example(),))
    assert model.last is None and model.kept == []
    assert "the model itself (Apply): forward sets the attribute 'last'" in program.notes[0]
    assert "'kept'" in program.notes[1]


def test_model_is_unchanged_by_a_trace_and_by_a_failed_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).double()
    model[0].weight.grad = torch.ones(8, 8, dtype=torch.float64)
    kept, grad = copy.deepcopy(model.state_dict()), model[0].weight.grad
    x = example()
    random = torch.get_rng_state()
    trace(model, (x,))
    with pytest.raises(TraceError):
        trace(model, (x[:, :3],))
    assert model.training and model[0].weight.grad is grad
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    assert not model._forward_hooks


def test_trace_under_no_grad_still_knows_gradients():
    with torch.no_grad():
        program = trace(Apply(lambda m, x: m.fc(x)), (example(),))
    assert program.graph.outputs[0].grad


# Checkpointing.


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_module_is_traced_and_marked(reentrant):
    def forward(m, x):
        h = m.fc(x)
        return torch.utils.checkpoint.checkpoint(m.inner, h, use_reentrant=reentrant).sum()

    model = Apply(forward)
    model.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    # Reentrant checkpoints only work with backward(), so compare by that.
    program = trace(model, (example(),))
    got, _ = run(program, model, (example(),), {})
    grads = []
    for loss in (got, model(example())):
        model.zero_grad()
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    marks = [(n.origin.module, n.attrs.get("recompute")) for n in program.graph.calls]
    assert marks == [("fc", None), ("inner.0", "inner"), ("inner.1", "inner"), ("", None)]
    assert program.notes == ("inner: checkpointed, computed again in the backward pass",)


def test_reentrant_checkpoint_without_a_gradient_gives_none():
    def forward(m, x):
        return torch.utils.checkpoint.checkpoint(m.fc, x, use_reentrant=True) + x

    program = check_same(Apply(forward), example())
    assert not program.graph.outputs[0].grad


def test_checkpointed_function_is_noted():
    def forward(m, x):
        return torch.utils.checkpoint.checkpoint(lambda h: m.fc(h).exp(), x, use_reentrant=False)

    assert "checkpointed" in check_same(Apply(forward), example()).notes[0]


def test_checkpointing_of_a_library_marks_each_layer():
    from zoo import build

    model, call = build("gpt2")
    model.gradient_checkpointing_enable()
    program = trace(model, (), call)
    marks = {n.attrs["recompute"] for n in program.graph.calls if "recompute" in n.attrs}
    assert marks == {"transformer.h.0", "transformer.h.1"}


# Custom autograd functions.


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


bound_early = Straight.apply


@pytest.mark.parametrize("apply", [lambda h: Straight.apply(h), bound_early], ids=["now", "early"])
def test_custom_backward_is_kept(apply):
    program = check_same(Apply(lambda m, x: apply(m.fc(x))), example())
    (call,) = [n for n in program.graph.calls if n.op.startswith("autopar_whole.")]
    assert call.op.startswith("autopar_whole.Straight_")
    assert "test_trace_guards.py" in call.origin.file


def test_custom_function_without_gradient_is_traced():
    program = check_same(Apply(lambda m, x: m.fc(Straight.apply(x))), example())
    assert ops(program) == ["round.default", "linear.default"]


# What cannot be traced says where and why.


class Branch(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        if h.sum() > 0:  # here
            h = h * 2
        return h


class Indexed(nn.Linear):
    def forward(self, x):
        return super().forward(x)[x[:, 0] > 0]  # here


class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(torch.from_numpy(x.numpy()))  # here


class Shapes(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ torch.zeros(3, 3)  # here


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Branch, "a Python decision or a size depends on the values of a tensor"),
        (Indexed, "aten.index.Tensor depends on the values of tensors, and so does what the model"),
        (Numpy, "a tensor leaves PyTorch for numpy"),
        (Shapes, "torch.export failed with RuntimeError: "),
    ],
)
def test_failure_names_module_line_and_reason(kind, says):
    with pytest.raises(TraceError) as raised:
        # On the meta device there is no data by which a decision could be frozen.
        device = "meta" if kind is Branch else "cpu"
        trace(nn.Sequential(kind(8, 8)).to(device), (example().float(),))
    message = str(raised.value)
    lines = inspect.getsource(kind).splitlines()
    line = inspect.getsourcelines(kind)[1] + next(i for i, t in enumerate(lines) if "# here" in t)
    assert message.startswith(f"0 ({__file__}:{line}") and says in message
    assert "\n" not in message and "pytree" not in message


def test_object_in_the_output_is_named():
    class Box:
        pass

    says = refusal(lambda m, x: {"box": (m.fc(x), Box())})
    assert says.startswith("output['box'][1]: a Box cannot be returned from a traced model")


def test_control_flow_operator_is_named():
    def forward(m, x):
        return torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h * 3, (m.fc(x),))

    assert "the control-flow operator 'cond' is not supported" in refusal(forward)


def test_packed_sequence_is_named():
    def forward(m, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return m.rnn(packed)[0].data.sum()

    def recurrent(model):
        model.rnn = nn.LSTM(8, 8, batch_first=True, dtype=torch.float64)

    x = torch.randn(2, 5, 8, dtype=torch.float64)
    says = refusal(forward, x, torch.tensor([5, 3]), prepare=recurrent)
    assert "pack_padded_sequence" in says


def test_cache_in_the_output_names_use_cache():
    from zoo import build

    model, call = build("llama")
    with pytest.raises(TraceError, match="use_cache=False"):
        trace(model, (), {**call, "use_cache": True})
    assert model.config.use_cache is True


def test_captured_tensor_with_gradient_is_refused():
    def captured(model):
        model.scale = torch.ones(8, dtype=torch.float64, requires_grad=True)

    says = refusal(lambda m, x: m.fc(x) * m.scale, prepare=captured)
    assert says.startswith("scale: ") and "nn.Parameter" in says


def test_call_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="does not fit forward"):
        trace(nn.Linear(8, 8), (), {"y": example()})


# The meta device.


@pytest.mark.parametrize("on_meta", ["model", "inputs", "both"])
def test_meta_tensors_are_enough(on_meta):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).double()
    x = example()
    if on_meta in ("model", "both"):
        model = model.to("meta")
    if on_meta in ("inputs", "both"):
        x = x.to("meta")
    program = trace(model, (x,))
    device = "cpu" if on_meta == "inputs" else "meta"
    assert program.device == torch.device(device)
    assert sorted(ops(program)) == ["add.Tensor", "autopar.batch_norm_train", "linear.default",
                                    "relu.default"]  # fmt: skip
    assert {p.device.type for p in model.parameters()} == {device}


def test_meta_model_of_a_library_traces():
    from zoo import build

    model, call = build("gpt2")
    with torch.device("meta"):
        empty, _ = build("gpt2")
    whole, meta = trace(model, (), call), trace(empty, (), call)
    assert ops(whole) == ops(meta)
    assert [n.results for n in whole.graph.nodes] == [n.results for n in meta.graph.nodes]
