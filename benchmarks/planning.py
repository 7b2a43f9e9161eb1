"""How long planning takes, stage by stage, and how much memory it needs.

    python benchmarks/planning.py [--quick] [--memory SHARE]

With `--memory` every case is planned once more, in another process, under a limit on the memory of
one rank: a share of the peak of the plan without a limit. `within` is everything after tracing
until there is a plan that fits, with its rows, `costs` its predicted time over that of the plan
without a limit, `peak` its simulated peak over the limit.

Models are built on the meta device from published shapes; every case runs in a process of its
own, so that peak memory is that case's. Times are seconds of one run each.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

#: (model, layers, mesh)
CASES = [
    *(("llama-8b", layers, "8") for layers in (1, 4, 8, 16, 32)),
    *(("llama-8b", layers, "32,8") for layers in (1, 4, 8, 16, 32)),
    ("gpt3-175b", 8, "32,8"),
    ("gpt3-175b", 96, "32,8"),
    ("gpt3-175b", 8, "8,16,8"),
    ("gpt3-175b", 96, "8,16,8"),
]
QUICK = [("llama-8b", 1, "8"), ("llama-8b", 8, "32,8"), ("llama-8b", 32, "32,8")]
COLUMNS = ("model", "layers", "mesh", "operators", "trace", "build", "solve", "lower", "gap", "MiB")
LIMITED = (*COLUMNS, "limit", "within", "costs", "limit gap", "peak", "limit MiB")


def make_model(name: str, layers: int) -> tuple[object, dict[str, object]]:
    """A published shape on the meta device, with an example call of one global batch."""
    import torch

    with torch.device("meta"):
        if name == "llama-8b":
            from transformers import LlamaConfig, LlamaForCausalLM

            model: object = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=128256, hidden_size=4096, intermediate_size=14336,
                    num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
                    max_position_embeddings=8192,
                )
            )  # fmt: skip
            ids = torch.zeros(256, 2048, dtype=torch.long)
        else:
            from transformers import GPT2Config, GPT2LMHeadModel

            model = GPT2LMHeadModel(
                GPT2Config(
                    n_positions=2048, n_embd=12288, n_layer=layers, n_head=96,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                )
            )  # fmt: skip
            ids = torch.zeros(1024, 2048, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def run_case(name: str, layers: int, mesh: str, limit: int | None = None) -> dict[str, Any]:
    """Plan one model for H100s, within a limit in bytes if there is one, and time the stages."""
    import torch

    from autopar.compiler import Request, describe_plan, trace_model
    from autopar.dry_run import dry_operators
    from autopar.ir.errors import MemoryLimitError
    from autopar.ir.mesh import Mesh
    from autopar.passes import pipeline
    from autopar.passes.collector import no_collection
    from autopar.passes.memory.limit import MemoryLimit, timeline_of

    torch.set_num_threads(1)
    sizes = [int(n) for n in mesh.split(",")]
    shape = Mesh(tuple(zip(("a", "b", "c"), sizes, strict=False)))
    request = Request.make(shape, "auto", None, "h100", "auto")
    # What is imported once, and the first export in a process, are no part of any model's time.
    trace_model(torch.nn.Linear(2, 2), (torch.zeros(2, 2),), {}, request)
    model, call = make_model(name, layers)
    began = time.perf_counter()
    traced = trace_model(model, (), call, request)  # type: ignore[arg-type]
    traced_at = time.perf_counter()
    held = MemoryLimit(limit or 0, "adam", dry_operators)
    with no_collection():  # as `make_plan` has it
        try:
            searched = pipeline.decide(
                traced.placed,
                request.mesh,
                request.device,
                mode="auto",
                outputs="auto",
                limit=None if limit is None else held,
            )
        except MemoryLimitError:
            return {"within": time.perf_counter() - traced_at, "costs": "none fits"}
        decided_at = time.perf_counter()
        solution = searched.solution
        describe_plan(traced, request, searched.assignment, "auto", solution.cost, solution.bound)
        lowered_at = time.perf_counter()
    solving = sum(stage.seconds for stage in solution.stages)
    lowered = pipeline.lower(traced.graph, searched.assignment, request.device)
    return {
        "model": name,
        "layers": layers,
        "mesh": mesh,
        "operators": sum(1 for _ in traced.graph.calls),
        "trace": traced_at - began,
        "build": decided_at - traced_at - solving,
        "solve": solving,
        "lower": lowered_at - decided_at,
        "gap": solution.gap,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "within": lowered_at - traced_at,
        "costs": solution.cost,
        "peak": timeline_of(lowered, held).peak,
    }


def measured(case: tuple[str, int, str], limit: int | None = None) -> dict[str, Any]:
    """What `run_case` finds in a process of its own."""
    command = [sys.executable, __file__, "--case", *map(str, case)]
    if limit is not None:
        command += ["--limit", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def under_limit(case: tuple[str, int, str], free: dict[str, Any], share: float) -> dict[str, Any]:
    """The columns of a plan under a share of the peak of the plan without a limit."""
    limit = int(share * free["peak"])
    held = measured(case, limit)
    row = {"limit": f"{limit / 2**30:.2f} GiB", "within": held["within"], "costs": held["costs"]}
    if held["costs"] == "none fits":
        return row | {"peak": ""}
    return row | {
        "costs": held["costs"] / free["costs"],
        "limit gap": held["gap"],
        "peak": held["peak"] / limit,
        "limit MiB": held["MiB"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases")
    parser.add_argument("--memory", type=float, default=0.0, metavar="SHARE", help="such as 0.8")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        warnings.filterwarnings("ignore")
        name, layers, mesh = options.case
        print(json.dumps(run_case(name, int(layers), mesh, options.limit)))
        return
    columns = LIMITED if options.memory else COLUMNS
    print("  ".join(f"{column:>10}" for column in columns))
    for case in QUICK if options.quick else CASES:
        try:
            row = measured(case)
            if options.memory:
                row |= under_limit(case, row, options.memory)
        except RuntimeError as error:
            print(f"{case}: {error}", flush=True)
            continue
        values = [row.get(column, "") for column in columns]
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in values]
        print("  ".join(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
