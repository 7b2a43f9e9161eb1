"""Llama, fully automatic: no hints, the search chooses every split.

Run it alone, or with `torchrun --nproc-per-node 4 examples/llama_auto.py`.
"""

import os

import torch
from data import text_batch, text_tokens
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

BATCH, LENGTH, STEPS = 8, 64, 10

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192, hidden_size=128, intermediate_size=352, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip
model = LlamaForCausalLM(config)

world = int(os.environ.get("WORLD_SIZE", "1"))
mesh = {"dp": 2, "tp": world // 2} if world > 1 else 1

tokens = text_tokens(config.vocab_size)
ids = text_batch(tokens, 0, BATCH, LENGTH)
parallel = autopar.autoparallelize(
    model, kwargs={"input_ids": ids, "labels": ids}, mesh=mesh, mode="auto"
)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
for step in range(STEPS):
    ids = text_batch(tokens, step, BATCH, LENGTH)
    loss = parallel(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    optimizer.step()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
if int(os.environ.get("RANK", "0")) == 0:
    print(parallel.plan)
