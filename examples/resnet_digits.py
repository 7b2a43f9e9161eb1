"""A ResNet with batch norm on handwritten digits, data parallel with whole-batch statistics.

Run it alone, or with `torchrun --nproc-per-node 4 examples/resnet_digits.py`.
"""

import os

import torch
from data import digits
from transformers import ResNetConfig, ResNetForImageClassification

import autopar

BATCH, STEPS = 64, 20

torch.manual_seed(0)
images, labels = digits()
config = ResNetConfig(
    num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
    layer_type="basic", downsample_in_first_stage=False, num_labels=10,
)  # fmt: skip
model = ResNetForImageClassification(config)

example = {"pixel_values": images[:BATCH], "labels": labels[:BATCH]}
parallel = autopar.autoparallelize(model, kwargs=example, mode="data_parallel")
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
speaks = int(os.environ.get("RANK", "0")) == 0
parallel.train()
for step in range(STEPS):
    at = BATCH * (step % 20)
    x, y = images[at : at + BATCH], labels[at : at + BATCH]
    loss = parallel(pixel_values=x, labels=y).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if speaks and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.4f}")

parallel.eval()
with torch.no_grad():
    at = BATCH * 20
    out = parallel(pixel_values=images[at : at + BATCH], labels=labels[at : at + BATCH])
if speaks:
    print(f"held-out loss {out.loss.item():.4f}")
    print(parallel.plan)
