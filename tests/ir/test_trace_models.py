"""Whole models: the traced program gives the model's outputs, gradients and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.ir.trace import trace
from trace_check import check_same, ops
from zoo import ZOO, build

torch.set_num_threads(1)

#: Grouped key/value heads sum their gradients in another order.
ROUNDING = 1e-13


def without_caches(model: nn.Module) -> nn.Module:
    """The model as the trace sees it, so that the eager call has the same outputs."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", list(ZOO))
def test_model_of_the_zoo_gives_its_own_values(name, training):
    model, call = build(name)
    program = check_same(without_caches(model).train(training), **call, tolerance=ROUNDING)
    assert program.training is training and program.notes == ()


def test_gpt2_keeps_leading_dimensions_and_both_names_of_the_tied_weight():
    model, call = build("gpt2")
    program = trace(model, (), call)
    found = ops(program)
    assert found.count("autopar.addmm_nd") == 8 and "addmm.default" not in found
    assert found.count("scaled_dot_product_attention.default") == 2
    assert "cross_entropy_loss.default" in found and "layer_norm.default" in found
    tied = program.params["transformer.wte.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight") and tied.requires_grad
    assert "lm_head.weight" not in program.params
    assert [n.target for n in program.graph.sources("param")].count("transformer.wte.weight") == 1
    assert not any("view" in op or "dropout" in op or "contiguous" in op for op in found)


def test_default_llama_is_traced_without_its_cache():
    model, call = build("llama")
    program = trace(model, (), call)
    assert program.notes == ("config.use_cache was switched off while tracing",)
    assert model.config.use_cache is True
    assert set(program.unflatten(program.graph.outputs)) == {"loss", "logits"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attention_implementations_trace(attention):
    model, call = build("llama")
    model.set_attn_implementation(attention)
    program = check_same(without_caches(model), **call, tolerance=ROUNDING)
    whole = "scaled_dot_product_attention.default"
    assert (whole if attention == "sdpa" else "softmax.int") in ops(program)


def test_t5_shares_one_embedding_and_switches_every_cache_off():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=32,
                      dropout_rate=0, decoder_start_token_id=0)  # fmt: skip
    model = without_caches(T5ForConditionalGeneration(config).double())
    call = {"input_ids": torch.randint(2, 32, (2, 6)), "labels": torch.randint(2, 32, (2, 4))}
    program = check_same(model, **call, tolerance=ROUNDING)
    assert len(program.params["shared.weight"].names) == 4


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_mixtral_traces_with_its_custom_operator(experts):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
                           num_local_experts=4, num_experts_per_tok=2, use_cache=False,
                           router_jitter_noise=0.0, experts_implementation=experts)  # fmt: skip
    ids = torch.randint(2, 32, (2, 6))
    # The grouped product has no double precision.
    program = check_same(MixtralForCausalLM(config), input_ids=ids, labels=ids, tolerance=1e-5)
    custom = [op for op in ops(program) if op.startswith("transformers.")]
    assert bool(custom) is (experts == "grouped_mm")


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.rnn = kind(8, 8, num_layers=2, batch_first=True)

    def forward(self, ids):
        return self.rnn(self.embed(ids))[0].pow(2).mean()


@pytest.mark.parametrize(("kind", "op"), [(nn.LSTM, "lstm.input"), (nn.GRU, "gru.input")])
def test_recurrent_layer_is_one_operator(kind, op):
    program = check_same(Recurrent(kind).double(), torch.randint(0, 16, (4, 6)))
    assert op in ops(program) and program.notes == ()


class TiedTwice(nn.Module):
    """One module at two places, and a weight used as it is and transposed."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList([shared, nn.Linear(8, 8), shared])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.layers[0].weight.t()).pow(2).mean()


def test_module_called_twice_keeps_its_paths_and_has_one_weight():
    program = check_same(TiedTwice().double(), torch.randn(4, 8, dtype=torch.float64))
    assert program.params["layers.0.weight"].names == ("layers.0.weight", "layers.2.weight")
    linears = [n for n in program.graph.calls if n.op == "aten.linear.default"]
    assert [n.origin.module for n in linears] == ["layers.0", "layers.1", "layers.2"]
    assert linears[0].args[1] == linears[2].args[1]
