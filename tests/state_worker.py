"""One rank of `test_checkpoints.py` and `test_meta_models.py`."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from devices import slow_device
from pretend_host import pretend_host
from ranks import main
from recompile_worker import Net, batch, close, whole

#: Where the ranks of several runs meet; the test makes it.
FOLDER = Path(os.environ.get("AUTOPAR_TEST_FOLDER", "."))
GRID = {"dp": 2, "tp": 2}
STEPS = 5


def meshes(world: int) -> list[Any]:
    return [4, GRID] if world == 4 else [world]


def build(mesh: Any, **options: Any) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    """The net with other values than any checkpoint's, and its optimizer."""
    torch.manual_seed(99)
    options = {"device": slow_device(), "exact_rng": True, **options}
    parallel = autopar.autoparallelize(Net().double(), batch(12), mesh=mesh, **options)
    return parallel, optimizer_of(parallel)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "lr": 3e-3}], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Steps with dropout, each on a batch of its own."""
    losses = []
    for step in steps:
        x, labels = batch(12, seed=step)
        loss = model(x, labels)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def uninterrupted() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """One device, ten steps: the losses of the last five."""
    torch.manual_seed(3)
    model = Net().double()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(STEPS))
    return model, optimizer, train(model, optimizer, range(STEPS, 2 * STEPS))


def agrees(got: list[float], want: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-9, atol=1e-9)


def check_save(rank: int, world: int) -> None:
    """Five steps, saved, five more: as on one device."""
    _, _, want = uninterrupted()
    for asynchronous in (True, False):
        torch.manual_seed(3)
        model = Net().double()
        parallel = autopar.autoparallelize(
            model, batch(12), mesh=world, device=slow_device(), exact_rng=True
        )
        optimizer = optimizer_of(parallel)
        train(parallel, optimizer, range(STEPS))
        saving = autopar.save_checkpoint(
            FOLDER / "run", parallel, optimizer, step=STEPS, extra={"rank": rank},
            asynchronous=asynchronous,
        )  # fmt: skip
        agrees(train(parallel, optimizer, range(STEPS, 2 * STEPS)), want)
        if saving is not None:
            saving.wait()
    state = autopar.full_state_dict(parallel)
    assert bool(state) == (rank == 0)
    if rank == 0:
        torch.save(state, FOLDER / "whole.pt")


def check_offloaded(rank: int, world: int) -> None:
    """Optimizer state in shards, on the host between steps: trained, saved and gone on with."""
    _, _, want = uninterrupted()
    with pretend_host(step_bytes=256) as host:
        torch.manual_seed(3)
        options: dict[str, Any] = {
            "mesh": world, "device": slow_device(), "exact_rng": True, "offload_optimizer": True,
            "mode": "data_parallel", "zero": 2,
        }  # fmt: skip
        parallel = autopar.autoparallelize(Net().double(), batch(12), **options)
        optimizer = optimizer_of(parallel)
        train(parallel, optimizer, range(STEPS))
        assert host.holds_all(optimizer) and len(host.held)
        autopar.save_checkpoint(FOLDER / "offloaded", parallel, optimizer)
        agrees(train(parallel, optimizer, range(STEPS, 2 * STEPS)), want)
        other, again = build(**options)
        autopar.load_checkpoint(FOLDER / "offloaded", other, again)
        assert host.holds_all(again)
        agrees(train(other, again, range(STEPS, 2 * STEPS)), want)


def check_resume(rank: int, world: int) -> None:
    """Under other plans and numbers of ranks the run goes on as if nothing had happened."""
    _, _, want = uninterrupted()
    for mesh in meshes(world):
        parallel, optimizer = build(mesh)
        loaded = autopar.load_checkpoint(FOLDER / "run", parallel, optimizer)
        assert loaded.step == STEPS and loaded.extra == {"rank": 0}
        assert optimizer.param_groups[1]["lr"] == 3e-3
        agrees(train(parallel, optimizer, range(STEPS, 2 * STEPS)), want)


def check_whole_files(rank: int, world: int) -> None:
    """A file of one device is cut on loading, and put together again it is the same."""
    state = torch.load(FOLDER / "whole.pt")
    for mesh in meshes(world):
        for load in (
            lambda p: p.load_state_dict(state),
            lambda p: autopar.load_pretrained(p, FOLDER / "whole.pt"),
        ):
            parallel, _ = build(mesh)
            before = {name: id(p) for name, p in parallel.named_parameters()}
            load(parallel)
            assert before == {name: id(p) for name, p in parallel.named_parameters()}
            for name, value in autopar.full_state_dict(parallel, everywhere=True).items():
                assert torch.equal(value, state[name]), name


def check_damaged(rank: int, world: int) -> None:
    """A damaged checkpoint, or another model's, is refused everywhere and nothing changes."""
    parallel, optimizer = build(world)
    before = {name: whole(value).clone() for name, value in parallel.state_dict().items()}

    def refused(*words: str, folder: str = "run", **options: Any) -> None:
        try:
            autopar.load_checkpoint(FOLDER / folder, parallel, **options)
        except autopar.CheckpointError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError(f"loaded, expected an error with {words}")
        for name, value in parallel.state_dict().items():
            assert torch.equal(whole(value), before[name]), name

    refused("no such checkpoint", folder="nothing")
    other = torch.optim.AdamW(parallel.parameters())
    refused("groups", optimizer=other)
    part = sorted((FOLDER / "run").glob("*.distcp"))[-1]
    content = part.read_bytes()
    for damaged, word in ((content[:-1], "cut short"), (None, "missing")):
        dist.barrier()
        if rank == 0:
            part.unlink()
            if damaged is not None:
                part.write_bytes(damaged)
        dist.barrier()
        refused(part.name, word, optimizer=optimizer)
    dist.barrier()
    if rank == 0:
        part.write_bytes(content)
    dist.barrier()
    autopar.load_checkpoint(FOLDER / "run", parallel, optimizer)
    try:
        autopar.save_checkpoint(FOLDER, parallel)
    except autopar.CheckpointError as error:
        assert rank == 0 and "no checkpoint" in str(error)
    except autopar.DesyncError as error:
        assert rank != 0 and "rank 0 failed" in str(error)
    else:
        raise AssertionError("a folder with other files was taken for a checkpoint")


class Deep(nn.Module):
    """Layers of a kind, an embedding and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.norm(self.layers(self.embed(ids))))
        return nn.functional.cross_entropy(scores, labels)


def deep_call() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(24, (8,), generator=generator), torch.randint(
        12, (8,), generator=generator
    )


class Wide(nn.Module):
    """192 MB of weights in 48 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Peak:
    """The growth of this process' largest resident memory, in bytes."""

    def __enter__(self) -> Peak:
        gc.collect()
        # What earlier checks freed must not count as room that was there already.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._field("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.growth = self._field("VmHWM") - self.before

    @staticmethod
    def _field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def check_memory(rank: int, world: int) -> None:
    """Each rank makes room for its share only; filled from files, or by the model's own code."""
    x = torch.randn(8, 1024)
    with torch.device("meta"):
        meta = Wide()
    full = sum(p.numel() * 4 for p in meta.parameters())
    hints = {"layers.*": ((1, 1), (world, 1))}
    limit = full / world * 1.3 + (50 << 20)
    for fill in (
        autopar.initialise,
        lambda p: autopar.load_pretrained(p, FOLDER / "wide.safetensors"),
        lambda p: autopar.load_checkpoint(FOLDER / "wide", p),
    ):
        with Peak() as peak:
            parallel = autopar.autoparallelize(meta, (x,), mesh=world, hints=hints)
            fill(parallel)
        assert all(layout.split_axes for layout in parallel.plan.parameter_layouts.values())
        assert peak.growth <= limit, f"{peak.growth >> 20} MB grown, {int(limit) >> 20} allowed"
        parallel(x)
        if fill is autopar.initialise:
            state = autopar.full_state_dict(parallel)
            if rank == 0:
                from safetensors.torch import save_file

                save_file(state, FOLDER / "wide.safetensors")
            del state
            autopar.save_checkpoint(FOLDER / "wide", parallel)
        del parallel
    if rank == 0:
        print(f"{full >> 20} MB of weights", flush=True)


def check_initialise(rank: int, world: int) -> None:
    """A model from the meta device gets the values it has when it is built with them."""
    for mesh in meshes(world):
        single = Deep().double()
        with torch.device("meta"):
            meta = Deep().double()
        parallel = autopar.autoparallelize(
            meta, deep_call(), mesh=mesh, device=slow_device(), outputs="full"
        )
        try:
            parallel(*deep_call())
        except autopar.NoValuesError as error:
            assert "'embed.weight'" in str(error) and "initialise" in str(error)
        else:
            raise AssertionError("ran without values")
        torch.manual_seed(5 if rank == 0 else 6)
        autopar.initialise(parallel)
        got = autopar.full_state_dict(parallel, everywhere=True)
        torch.manual_seed(5)
        for module in single.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, value in single.state_dict().items():
            assert torch.equal(got[name], value), name
        close(parallel(*deep_call()), single(*deep_call()))


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ranks inherit what is loaded here: the compiler that tracing needs.
    autopar.plan(Net().double(), batch(8), mesh=1)
    main(CHECKS)
