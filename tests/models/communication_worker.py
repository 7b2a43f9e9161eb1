"""One rank of `test_communication.py`: what real processes send, and that training is unchanged."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from training_worker import adamw, assert_close, assert_same_state

import autopar
from autopar.compiler import Request, Traced, describe_plan, trace_model
from autopar.ir.fused import FUSED
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.module import ParallelModule
from autopar.passes.baselines import baseline_assignments
from autopar.passes.bucket_size import SMALLEST
from autopar.passes.communication import collectives_of
from autopar.passes.prices import DevicePrices
from autopar.passes.search import Searched
from autopar.plans import Plan
from autopar.runtime.counting import Sent, count_communication
from devices import slow_device
from ranks import main
from zoo import build

STEPS = 3
SLOW = slow_device()
HYBRID = "data parallel on dp, FSDP on tp"

#: (kind, axes, bytes) of collectives, how many of each.
Counts = Counter[tuple[str, tuple[str, ...], int]]


@cache
def baselines_of(
    name: str, mesh: tuple[tuple[str, int], ...], device: Any
) -> tuple[Traced, Request, Mapping[str, Searched]]:
    """A model of the zoo, and the plans that people write by hand for it by their names."""
    model, call = build(name)
    request = Request.make(Mesh(mesh), None, None, device, "auto")
    traced = trace_model(model, (), call, request)
    placed, rules = traced.placed, traced.rules
    prices = DevicePrices(request.mesh, request.device)
    return traced, request, baseline_assignments(placed, rules, request.mesh, prices).found


def plan_of(name: str, mesh: tuple[tuple[str, int], ...], scheme: str, device: Any) -> Plan:
    """The plan that people write by hand under this name."""
    traced, request, found = baselines_of(name, mesh, device)
    return describe_plan(traced, request, found[scheme].assignment, "auto", 1.0, 1.0)


def parallelised(
    name: str, mesh: dict[str, int], scheme: str, device: Any = SLOW
) -> tuple[ParallelModule, nn.Module, dict[str, Any]]:
    """A model of the zoo under such a plan, the model itself, and a call."""
    single, call = build(name)
    if getattr(single, "config", None) is not None:
        single.config.use_cache = False
    plan = plan_of(name, tuple(mesh.items()), scheme, device)
    model, _ = build(name)
    return autopar.autoparallelize(model, kwargs=call, mesh=mesh, plan=plan), single, call


def loss_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result.loss


def counted(sent: Iterable[Sent]) -> Counts:
    return Counter((each.kind, each.axes, each.nbytes) for each in sent)


def predicted(parallel: ParallelModule, *, backward: bool) -> Counts:
    compiled = parallel._current("the graph")
    found = collectives_of(compiled.graph, compiled.traced.rules, compiled.plan.assignment)
    return Counter((c.kind, c.axes, c.nbytes) for c in found if c.backward == backward)


def totals(counts: Counts) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes by kind and axes."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for (kind, axes, nbytes), times in counts.items():
        found[kind, axes] += times * nbytes
    return dict(found)


def is_split_loss(parallel: ParallelModule) -> bool:
    strategies = parallel.plan.assignment.strategies
    return any("c" in s.role.values() for name, s in strategies.items() if "loss" in name)


def train(parallel: ParallelModule, single: nn.Module, call: dict[str, Any], what: str) -> None:
    """Steps of both; loss and state agree, and each step sends what the plan says."""
    mine, theirs = adamw(parallel), adamw(single)
    loss_of(parallel(**call))  # before the first step the ranks compare what they hold
    for step in range(STEPS):
        with count_communication() as forward:
            got = loss_of(parallel(**call))
        want = loss_of(single(**call))
        assert_close(got, want, f"{what}: loss of step {step}")
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
        with count_communication() as backward:
            got.backward()
        want.backward()
        for optimizer in (mine, theirs):
            optimizer.step()
        for sent, is_backward in ((forward.sent, False), (backward.sent, True)):
            expected = predicted(parallel, backward=is_backward)
            got_bytes, want_bytes = totals(counted(sent)), totals(expected)
            assert got_bytes == want_bytes, f"{what}: sent {got_bytes}, planned {want_bytes}"
            # With its classes split a loss sends in one collective what is planned as two.
            assert is_split_loss(parallel) or counted(sent) == expected, what
    assert_same_state(parallel, single)


def check_schemes(rank: int, world: int) -> None:
    """The known schemes train as one device does and send what they are known to send."""
    mesh = {2: {"dp": 2}, 4: {"dp": 2, "tp": 2}}[world]
    tried = ["data parallel", "FSDP", "tensor parallel", "tensor + sequence parallel"]
    if len(mesh) > 1:
        tried = [
            HYBRID,
            "FSDP",
            "data parallel on dp, tensor parallel on tp",
            "FSDP on dp, tensor parallel on tp",
            "FSDP on dp, tensor + sequence parallel on tp",
        ]
    for name in ("gpt2", "llama"):
        for scheme in tried if name == "gpt2" or world == 2 else tried[-1:]:
            parallel, single, call = parallelised(name, mesh, scheme)
            train(parallel, single, call, f"{name} on {mesh}, {scheme}")


def nbytes_of(parallel: ParallelModule) -> int:
    return sum(p.numel() * p.element_size() for p in parallel.parameters())


def check_known_figures(rank: int, world: int) -> None:
    """Data parallel sends its gradients once, FSDP three times its parameters."""
    mesh = {"dp": world}
    parallel, _, call = parallelised("gpt2", mesh, "data parallel", "cpu")
    total = nbytes_of(parallel)
    loss = loss_of(parallel(**call))
    with count_communication() as backward:
        loss.backward()
    assert [s.kind for s in backward.sent] == ["all_reduce"]
    assert backward.nbytes == total < SMALLEST

    parallel, _, call = parallelised("gpt2", mesh, "FSDP", "cpu")
    loss_of(parallel(**call))
    split = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in parallel.named_parameters()
        if parallel.plan.parameter_layouts[name].split_axes
    )
    assert split > 0.9 * nbytes_of(parallel)
    with count_communication() as step:
        loss_of(parallel(**call)).backward()
    gathered = sum(s.nbytes for s in step.of("all_gather", "dp"))
    scattered = sum(s.nbytes for s in step.of("reduce_scatter", "dp"))
    # An all-gather of all parameters forward, a reduce-scatter backward: half an all-reduce each.
    assert gathered == scattered == split, (gathered, scattered, split, step.sent)
    assert len(step.of("all_gather")) == len(step.of("reduce_scatter")) == 1


def check_accumulation(rank: int, world: int) -> None:
    """Micro-batches under `no_sync` give the gradients of the whole batch, summed once."""
    schemes = {
        2: [({"dp": 2}, "data parallel"), ({"dp": 2}, "FSDP")],
        4: [
            ({"dp": 4}, "data parallel"),
            ({"dp": 2, "tp": 2}, HYBRID),
            ({"dp": 2, "tp": 2}, "data parallel on dp, tensor parallel on tp"),
        ],
    }[world]
    for mesh, scheme in schemes:
        parallel, single, call = parallelised("gpt2", mesh, scheme, "cpu")
        mine, theirs = adamw(parallel), adamw(single)
        for step in range(STEPS):
            batches = [shifted(call, 3 * step + k) for k in range(3)]
            sums = []
            for k, batch in enumerate(batches):
                loss = loss_of(parallel(**batch)) / len(batches)
                with count_communication() as backward:
                    if k < len(batches) - 1:
                        with parallel.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
                sums.append(len(backward.of("all_reduce", "dp")))
                (loss_of(single(**batch)) / len(batches)).backward()
            once = predicted(parallel, backward=True)
            of_gradients = sum(n for (kind, axes, _), n in once.items() if (kind, axes) == SUM)
            assert sums == [0, 0, of_gradients], (scheme, sums)
            for name, parameter in single.named_parameters():
                grad = parallel.get_parameter(name).grad
                assert grad.placements == parallel.get_parameter(name).placements
                assert_close(grad, parameter.grad, f"{scheme}: gradient of {name}")
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(parallel, single)


SUM = ("all_reduce", ("dp",))


def shifted(call: dict[str, Any], by: int) -> dict[str, Any]:
    """Another batch of the same shapes."""
    ids = (call["input_ids"] + by) % 64
    labels = call["labels"]
    return {**call, "input_ids": ids, "labels": torch.where(labels < 0, labels, ids)}


def check_terms_are_right_to_read(rank: int, world: int) -> None:
    """Whoever looks at gradients before they are summed sees the right ones."""
    mesh = {"dp": world}
    parallel, single, call = parallelised("gpt2", mesh, "data parallel")
    mine, theirs = adamw(parallel), adamw(single)

    def both(batch: dict[str, Any], *, sync: bool) -> None:
        loss = loss_of(parallel(**batch))
        if sync:
            loss.backward()
        else:
            with parallel.no_sync():
                loss.backward()
        loss_of(single(**batch)).backward()

    # A step in the middle, and one on terms only; gradients kept from one step to the next.
    for k, sync in enumerate((True, False, False, True, False)):
        both(shifted(call, k), sync=sync)
        terms = [p for p in parallel.parameters() if Partial() in p.grad.placements]
        assert bool(terms) != sync
        norm = nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        assert_close(norm, nn.utils.clip_grad_norm_(single.parameters(), 0.5), "norm of terms")
        for name, parameter in single.named_parameters():
            grad = parallel.get_parameter(name).grad
            assert isinstance(grad, DTensor)
            assert_close(grad, parameter.grad, f"{k}: gradient of {name}")
        mine.step()
        theirs.step()
        if k == 2:
            mine.zero_grad()
            theirs.zero_grad()
    assert_same_state(parallel, single)

    with parallel.no_sync():
        try:
            with parallel.no_sync():
                raise SystemError("not reached")
        except autopar.AutoparError as error:
            assert "inside one already" in str(error)
    with parallel.no_sync():
        pass


def check_many_small_parameters(rank: int, world: int) -> None:
    """24 layers of a tiny GPT-2: their gradients go in a few buckets, and nothing changes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64, n_positions=16, n_embd=64, n_layer=24, n_head=2, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).double().train()

    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "labels": ids}
    single = make()
    parallel = autopar.autoparallelize(
        make(), kwargs=call, mode="data_parallel", device=slow_device()
    )
    buckets = [n for n in parallel.partitioned_graph().nodes if n.op == FUSED]
    limit = math.ceil(nbytes_of(parallel) / SMALLEST) + 2
    assert 2 < len(buckets) <= limit, (len(buckets), limit)
    train(parallel, single, call, "24 layers")


def check_ways_to_differentiate(rank: int, world: int) -> None:
    """`autograd.grad`, kept graphs, hooks, frozen parameters, half a model."""
    mesh = {"dp": world}
    for scheme in ("data parallel", "FSDP"):
        parallel, single, call = parallelised("gpt2", mesh, scheme, "cpu")
        mine, theirs = dict(parallel.named_parameters()), dict(single.named_parameters())

        got = torch.autograd.grad(loss_of(parallel(**call)), list(mine.values()))
        want = torch.autograd.grad(loss_of(single(**call)), list(theirs.values()))
        for name, g, w in zip(mine, got, want, strict=True):
            assert g.placements == mine[name].placements
            assert_close(g, w, f"{scheme}: autograd.grad of {name}")
        assert all(p.grad is None for p in mine.values())

        a, b = loss_of(parallel(**call)), loss_of(single(**call))
        for loss in (a, b):
            loss.backward(retain_graph=True)
            loss.backward()
        same_gradients(parallel, single, f"{scheme}: the same graph twice")

        seen: list[Tensor] = []

        def triple(grad: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(grad)
            return grad * 3

        hook = mine["transformer.wte.weight"].register_hook(triple)
        other = theirs["transformer.wte.weight"].register_hook(lambda g: g * 3)
        frozen = "transformer.h.0.mlp.c_fc.weight"
        for parameters in (mine, theirs):
            for parameter in parameters.values():
                parameter.grad = None
            parameters[frozen].requires_grad_(False)
        loss_of(parallel(**call)).backward()
        loss_of(single(**call)).backward()
        hook.remove()
        other.remove()
        assert len(seen) == 1 and mine[frozen].grad is None
        same_gradients(parallel, single, f"{scheme}: hooks and frozen parameters")


def check_frozen_parameters(rank: int, world: int) -> None:
    """Of a frozen parameter nothing is sent; one unfrozen later joins in."""
    single, call = build("gpt2")
    single.config.use_cache = False
    model, _ = build("gpt2")
    frozen = [name for name, _ in model.named_parameters() if ".mlp." in name]
    for part in (model, single):
        for name in frozen:
            part.get_parameter(name).requires_grad_(False)
    parallel = autopar.autoparallelize(model, kwargs=call, mode="data_parallel")
    for _ in range(2):
        loss_of(parallel(**call))  # before the first step the ranks compare what they hold
        loss = loss_of(parallel(**call))
        with count_communication() as backward:
            loss.backward()
        loss_of(single(**call)).backward()
        trained = [p for p in parallel.parameters() if p.requires_grad]
        assert backward.nbytes == sum(p.numel() * p.element_size() for p in trained)
        assert counted(backward.sent) == predicted(parallel, backward=True)
        same_gradients(parallel, single, "frozen parameters")
        for part in (parallel, single):
            for name in frozen:
                part.get_parameter(name).requires_grad_(True)


class Odd(nn.Module):
    """Layers whose parameters divide over no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 11)
        self.fc2 = nn.Linear(11, 7)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.fc2(torch.relu(self.fc1(x)))
        return nn.functional.cross_entropy(scores, target), scores


class ComplexRows(nn.Module):
    """A parameter of complex numbers beside one of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.turned).abs() * self.scale).pow(2).mean()


def check_complex_parameters(rank: int, world: int) -> None:
    """Gradients of complex numbers arrive like any others."""
    torch.manual_seed(0)
    single = ComplexRows()
    x = torch.randn(2 * world, 6, dtype=torch.complex128)
    for zero in (0, 3):
        model = copy.deepcopy(single)
        parallel = autopar.autoparallelize(model, (x,), mode="data_parallel", zero=zero)
        parallel(x).backward()
        single(x).backward()
        same_gradients(parallel, single, f"zero={zero}")
        single.zero_grad()


def check_uneven_parameters(rank: int, world: int) -> None:
    """Pieces of different sizes travel in one bucket, at the size of the largest."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Odd().double()

    random = torch.Generator().manual_seed(1)
    x = torch.randn(8, 5, dtype=torch.float64, generator=random)
    call = {"x": x, "target": torch.randint(7, (8,), generator=random)}
    request = Request.make(Mesh.of({"dp": world}), None, None, SLOW, "auto")
    traced = trace_model(make(), (), call, request)
    prices = DevicePrices(request.mesh, request.device)
    data = baseline_assignments(traced.placed, traced.rules, request.mesh, prices)
    assignment = data.found["data parallel"].assignment
    sources = dict(assignment.sources)
    for node in traced.graph.sources("param"):
        (value,) = node.results
        sources[node.name] = Layout.make([("dp",), *[()] * (len(value.shape) - 1)])
    relays = {
        name: Layout.make(layout.dims, ("dp",)) if name in sources else layout
        for name, layout in assignment.relays.items()
    }
    stored_split = replace(assignment, sources=sources, relays=relays)
    plan = describe_plan(traced, request, stored_split, "auto", 1.0, 1.0)
    parallel = autopar.autoparallelize(make(), kwargs=call, mesh={"dp": world}, plan=plan)
    (bucket,) = (n for n in parallel.partitioned_graph().nodes if n.op == FUSED)
    assert len(bucket.results) == 4
    train(parallel, make(), call, "uneven parameters")


def same_gradients(parallel: ParallelModule, single: nn.Module, what: str) -> None:
    for name, parameter in single.named_parameters():
        grad = parallel.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), f"{what}: {name}"
        if grad is not None:
            assert_close(grad, parameter.grad, f"{what}: {name}")


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    autopar.plan(build("gpt2")[0], kwargs=build("gpt2")[1], mesh=1)
    main(CHECKS)
