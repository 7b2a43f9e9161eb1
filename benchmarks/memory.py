"""What memory policies and ZeRO save: the peak of a training step, predicted and measured.

    torchrun --nproc-per-node 2 benchmarks/memory.py [--model mlp] [--full]

Every rank trains one model by data parallelism, with Adam, under each policy and each level of
ZeRO. Measured is the largest number of bytes of live tensors on any rank in the third step. A CPU's
memory is the host's: what `offload` copies there counts, in both. The last column is the largest
difference of a gradient from the first row's, relative to the gradient.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from prediction_worker import MODELS

import autopar
from live_bytes import LiveBytes

POLICIES = (
    "keep", "recompute", "recompute:sqrt", "offload", "compress", "compress8",
    "recompute+offload",
)  # fmt: skip
LEVELS = (0, 2, 3)
MIB = 1 << 20


def run(model: nn.Module, call: dict[str, Any], world: int, policy: str, zero: int) -> Row:
    """Two steps to warm up, one that is measured."""
    given = policy if zero != 3 or policy != "keep" else "regather"
    parallel = autopar.autoparallelize(
        model,
        kwargs=call,
        mesh=world,
        mode="data_parallel",
        memory_policy=given,
        zero=zero,
    )
    optimizer = torch.optim.Adam(parallel.parameters(), 1e-5)
    peak, grads = 0, {}
    for _ in range(3):
        optimizer.zero_grad()
        held = [*parallel.parameters(), *parallel.buffers(), *call.values()]
        held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        with LiveBytes(held) as live:
            out = parallel(**call)
            (out if isinstance(out, Tensor) else out["loss"]).backward()
            if not grads:
                grads = {n: _whole(p.grad) for n, p in parallel.named_parameters()}
                continue
            optimizer.step()
            del out
        peak = live.peak
    most = torch.tensor([peak])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    added = sum(row.seconds for row in parallel.plan.kept)
    return policy, zero, parallel.plan.memory("adam").peak, int(most), added, grads


Row = tuple[str, int, int, int, float, dict[str, Tensor]]


def _whole(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def difference(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to its norm."""
    return max(
        float((g - reference[n]).norm() / reference[n].norm().clamp(min=1e-12))
        for n, g in grads.items()
    )


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--full", action="store_true", help="the larger model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    reference: dict[str, Tensor] = {}
    if rank == 0:
        print(f"{options.model} on {world} ranks\n{'zero':>4}  {'policy':<18}", end="")
        print(f"{'predicted':>12}{'measured':>12}{'error':>8}{'costs':>10}  gradients")
    for zero in LEVELS:
        for policy in POLICIES:
            torch.manual_seed(0)
            model, call = MODELS[options.model](not options.full)
            _, _, predicted, measured, added, grads = run(model, call, world, policy, zero)
            reference = reference or grads
            if rank == 0:
                print(
                    f"{zero:>4}  {policy:<18}{predicted / MIB:>8.1f} MiB{measured / MIB:>8.1f} MiB"
                    f"{100 * (predicted / measured - 1):>6.1f} %{added * 1e3:>7.2f} ms  "
                    f"{difference(grads, reference):.1e}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
