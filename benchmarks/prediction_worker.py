"""One rank of `prediction.py`: calibrate, plan, train all plans in turn, write the figures."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from prediction_operators import format_operators, operator_times

import autopar
from autopar.calibration import measure_device
from autopar.compiler import Request, Traced, describe_plan, trace_model
from autopar.passes.baselines import baseline_assignments
from autopar.passes.device import Device
from autopar.passes.overlap import Hiding
from autopar.passes.place_hints import Placed
from autopar.passes.prices import DevicePrices
from live_bytes import LiveBytes

Example = tuple[nn.Module, dict[str, Any]]


class Mlp(nn.Module):
    """Layers of growing and shrinking width, with the mean square error."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.gelu(up(x)))
        return torch.nn.functional.mse_loss(x, target)


def gpt2(quick: bool) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers = (256, 2) if quick else (384, 4)
    config = GPT2Config(
        vocab_size=4096, n_positions=128, n_embd=width, n_layer=layers, n_head=width // 32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    ids = torch.randint(4096, (8, 128))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def mlp(quick: bool) -> Example:
    width, batch, layers = (512, 256, 2) if quick else (768, 512, 4)
    return Mlp(width, layers), {"x": torch.randn(batch, width), "target": torch.randn(batch, width)}


MODELS: dict[str, Callable[[bool], Example]] = {"gpt2": gpt2, "mlp": mlp}
#: Hints that make a bad plan: every product is split along what it sums.
ROWS = {"gpt2": ("*.c_attn", "*.c_proj", "*.c_fc"), "mlp": ("up.*", "down.*")}


#: The baselines that are measured on two axes; others are those of one axis over again, or the
#: same with the axes swapped, which run over one link here.
MIXTURES = (
    "data parallel on x, tensor parallel on y",
    "data parallel on x, tensor + sequence parallel on y",
    "FSDP on x, tensor parallel on y",
    "FSDP on x, tensor + sequence parallel on y",
    "data parallel on x, FSDP on y",
)

#: Rounds before those that count: until then the C library's heap has not settled, and most of what
#: FSDP gathers lies in memory that is mapped anew.
WARM_UP = 3


@dataclass
class Running:
    """One plan, ready to train."""

    name: str
    plan: autopar.Plan
    step: Callable[[], None]
    live: Callable[[], int]


def plans_of(
    name: str, example: Example, traced: Traced, mesh: dict[str, int], device: Device
) -> dict[str, autopar.Plan]:
    """The plans of one model on one mesh; the same on every rank, as planning is deterministic."""
    model, call = example
    request = Request.make(autopar.Mesh.of(mesh), "auto", None, device, "auto")
    prices = DevicePrices(request.mesh, device)
    found = baseline_assignments(Placed(traced.graph), traced.rules, request.mesh, prices).found
    plans = {
        scheme: describe_plan(
            traced,
            request,
            each.assignment,
            "auto",
            each.solution.cost,
            each.solution.bound,
            each.hiding,
        )
        for scheme, each in found.items()
        if len(mesh) == 1 or scheme in MIXTURES
    }
    plans["searched"] = autopar.plan(model, (), call, mesh=mesh, device=device)
    if len(mesh) == 1:
        (ranks,) = mesh.values()
        weight = (1, ranks) if name == "mlp" else (ranks, 1)
        hints = dict.fromkeys(ROWS[name], ((1, ranks), weight))
        bad = {
            "the same on every rank": {"mode": "stand_alone"},
            "every product by rows": {"mode": "auto", "hints": hints},
        }
        for title, options in bad.items():
            made = autopar.plan(model, (), call, mesh=mesh, device=device, **options)
            # The plan's decisions on the graph without hints, on which all plans run.
            hiding = Hiding(made.gradients, made.hidden)
            plans[title] = describe_plan(
                traced, request, made.assignment, "auto", made.seconds, made.bound, hiding
            )
    return plans


def start(name: str, example: Example, plan: autopar.Plan) -> Running:
    """Compile a plan, and what trains it."""
    model, call = example
    parallel = autopar.autoparallelize(model, kwargs=call, mesh=plan.mesh, plan=plan)
    optimizer = torch.optim.Adam(parallel.parameters(), 1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        out = parallel(**call)
        (out if isinstance(out, Tensor) else out["loss"]).backward()
        optimizer.step()

    def live() -> int:
        held = [*parallel.parameters(), *parallel.buffers(), *call.values()]
        held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        optimizer.zero_grad()
        with LiveBytes(held) as bytes_:
            step()
        return bytes_.peak

    return Running(name, parallel.plan, step, live)


def slowest(seconds: float) -> float:
    """The largest of all ranks' numbers."""
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def measure(running: list[Running], repeats: int) -> dict[str, list[float]]:
    """Seconds of every step of every plan; the plans take turns."""
    times: dict[str, list[float]] = {one.name: [] for one in running}
    for _ in range(WARM_UP):
        for one in running:
            one.step()
    for _ in range(repeats):
        for one in running:
            dist.barrier()
            began = time.perf_counter()
            one.step()
            times[one.name].append(slowest(time.perf_counter() - began))
    return times


def meshes(world: int) -> list[dict[str, int]]:
    """One axis over all ranks, and for four of them two axes of two."""
    return [{"x": world}] + ([{"x": 2, "y": world // 2}] if world > 2 else [])


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", default="gpt2,mlp")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--repeats", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    calibration = measure_device()
    if rank == 0:
        print(calibration, flush=True)
    repeats = options.repeats or (3 if options.quick else 7)
    found = {}
    for name in options.models.split(","):
        torch.manual_seed(0)
        example = MODELS[name](options.quick)
        request = Request.make(autopar.Mesh.of(world), "auto", None, None, "auto")
        traced = trace_model(example[0], (), example[1], request)
        running = []
        for mesh in meshes(world):
            plans = plans_of(name, example, traced, mesh, calibration.device)
            running += [
                start(f"{title} ({plan.mesh})", example, plan) for title, plan in plans.items()
            ]
        times = measure(running, repeats)
        rows = []
        for one in running:
            median = statistics.median(times[one.name])
            rows.append(
                {
                    "plan": one.name.rpartition(" (")[0],
                    "mesh": str(one.plan.mesh),
                    "predicted": one.plan.seconds,
                    "measured": median,
                    "spread": (max(times[one.name]) - min(times[one.name])) / median,
                    "memory": one.plan.memory("adam").peak,
                    "live": int(slowest(one.live())),
                }
            )
        found[f"{name} on {world} ranks"] = rows
        for one in running if options.operators else ():
            operators = operator_times(traced, one.plan)
            if rank == 0:
                print(format_operators(f"{name}, {one.name}", operators), flush=True)
    if rank == 0:
        options.output.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
