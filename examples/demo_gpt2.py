"""GPT-2 on real text: one device against four processes, fully automatic.

    python examples/demo_gpt2.py

trains Hugging Face's GPT-2 (a small random configuration with the full vocabulary) for 20 AdamW
steps on one device, then starts four gloo processes on a 2 x 2 mesh that do the same under the
plan the search found, and prints the plan and both loss curves side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data import text_batch, text_tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

STEPS, BATCH, LENGTH = 20, 8, 64
MESH = {"dp": 2, "tp": 2}
#: The largest difference between the two loss curves that counts as the same training.
TOLERANCE = 1e-4
#: Seconds after which the four processes are stopped.
TIME_LIMIT = 300


def make_model() -> nn.Module:
    """GPT-2 with few, narrow layers; everything else as published."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_positions=LENGTH,
            n_embd=64,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def train(model: nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
    """The losses of 20 AdamW steps, and tokens per second after the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    began = time.perf_counter()
    for step in range(STEPS):
        if step == 1:
            began = time.perf_counter()
        ids = text_batch(tokens, step, BATCH, LENGTH)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    return {"losses": losses, "tokens_per_second": BATCH * LENGTH * (STEPS - 1) / seconds}


def worker(result: Path) -> None:
    """One of the four processes."""
    torch.set_num_threads(1)
    model = make_model()
    tokens = text_tokens(model.config.vocab_size)
    ids = text_batch(tokens, 0, BATCH, LENGTH)
    parallel = autopar.autoparallelize(
        model, kwargs={"input_ids": ids, "labels": ids}, mesh=MESH, mode="auto"
    )
    outcome = train(parallel, tokens)
    if int(os.environ["RANK"]) == 0:
        result.write_text(json.dumps({**outcome, "plan": str(parallel.plan)}))


def launch() -> dict[str, Any]:
    """Run the four processes under torchrun and read what the first one found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        ranks = MESH["dp"] * MESH["tp"]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), __file__, str(result),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, timeout=TIME_LIMIT, env=environment)
        return json.loads(result.read_text())


def main() -> int:
    model = make_model()
    print("one device ...", flush=True)
    single = train(model, text_tokens(model.config.vocab_size))
    print(f"{MESH['dp'] * MESH['tp']} processes on the mesh {MESH} ...", flush=True)
    parallel = launch()
    print(parallel["plan"])
    print(f"\n{'step':>4}  {'one device':>12}  {'2 x 2 ranks':>12}  difference")
    differences = []
    for step, (a, b) in enumerate(zip(single["losses"], parallel["losses"], strict=True), 1):
        differences.append(abs(a - b))
        print(f"{step:4}  {a:12.6f}  {b:12.6f}  {abs(a - b):.1e}")
    print(
        f"tokens/s: one device {single['tokens_per_second']:.0f}, "
        f"2 x 2 ranks {parallel['tokens_per_second']:.0f} "
        f"(all four share the {os.cpu_count()} cores of this machine)"
    )
    same = max(differences) < TOLERANCE
    print(f"largest difference {max(differences):.1e}: {'the same' if same else 'NOT the same'}")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(Path(sys.argv[1]))
    else:
        sys.exit(main())
