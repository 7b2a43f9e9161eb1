"""GPT-2 with three hints in MindSpore's form; propagation and the search do the rest.

Run it alone, or with `torchrun --nproc-per-node 4 examples/gpt2_semi_auto.py`.
"""

import os

import torch
from data import text_batch, text_tokens
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import shard

BATCH, LENGTH, STEPS = 8, 64, 10

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=8192, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPT2LMHeadModel(config)

world = int(os.environ.get("WORLD_SIZE", "1"))
dp, tp = (2, world // 2) if world > 1 else (1, 1)

# Megatron's split of the MLP in every block: columns of c_fc, rows of c_proj. The counts are
# pieces per dimension of the activation and of the weight; a pattern reaches all blocks.
shard(model.transformer.h[0].mlp.c_fc, ((dp, 1, 1), (1, tp)))
hints = {
    "transformer.h.1.mlp.c_fc": ((dp, 1, 1), (1, tp)),
    "transformer.h.*.mlp.c_proj": ((dp, 1, tp), (tp, 1)),
}

tokens = text_tokens(config.vocab_size)
ids = text_batch(tokens, 0, BATCH, LENGTH)
parallel = autopar.autoparallelize(
    model, kwargs={"input_ids": ids, "labels": ids}, mesh={"dp": dp, "tp": tp}, hints=hints
)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
for step in range(STEPS):
    ids = text_batch(tokens, step, BATCH, LENGTH)
    loss = parallel(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
if int(os.environ.get("RANK", "0")) == 0:
    print(parallel.plan)
