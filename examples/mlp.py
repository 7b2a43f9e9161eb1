"""An MLP in 30 lines.

Run it alone, or with `torchrun --nproc-per-node 4 examples/mlp.py`.
"""

import os

import torch
from data import digits
from torch import nn

import autopar

torch.manual_seed(0)
images, labels = digits()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

batch = images[:256]
speaks = int(os.environ.get("RANK", "0")) == 0
parallel = autopar.autoparallelize(model, (batch,))
optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
for step in range(30):
    start = 256 * (step % 7)
    x, y = images[start : start + 256], labels[start : start + 256]
    loss = nn.functional.cross_entropy(parallel(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9 and speaks:
        print(f"step {step + 1}: loss {loss.item():.4f}")
if speaks:
    print(parallel.plan)
