"""Checkpoints belong to no plan; they are whole whenever their writers are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.checkpoint_files import METADATA
from autopar.tensor_files import stored_tensors
from ranks import TESTS, run_ranks
from recompile_worker import Net, batch
from state_worker import STEPS, agrees, build, optimizer_of, train, uninterrupted

WORKER = Path(__file__).with_name("state_worker.py")

torch.set_num_threads(1)


def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by two ranks; read by two, by one, and by a plain module."""
    monkeypatch.setenv("AUTOPAR_TEST_FOLDER", str(tmp_path))
    run_ranks(WORKER, 2, "save", "resume", "damaged")
    _goes_on_alone(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_under_other_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by four ranks; read by 4, 2x2, 2, 3 and one, by a plain module too."""
    monkeypatch.setenv("AUTOPAR_TEST_FOLDER", str(tmp_path))
    run_ranks(WORKER, 4, "save", "resume", "whole_files")
    for world in (2, 3):
        run_ranks(WORKER, world, "resume", "whole_files")
    _goes_on_alone(tmp_path)


def _goes_on_alone(tmp_path: Path) -> None:
    _, _, want = uninterrupted()
    for model, optimizer in (build(1), _plain()):
        loaded = autopar.load_checkpoint(tmp_path / "run", model, optimizer)
        assert loaded == autopar.checkpoints.Loaded(STEPS, {"rank": 0})
        agrees(train(model, optimizer, range(STEPS, 2 * STEPS)), want)


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().double()
    return model, optimizer_of(model)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_from_the_meta_device(world: int) -> None:
    run_ranks(WORKER, world, "initialise")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_makes_room_for_its_share(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_TEST_FOLDER", str(tmp_path))
    assert "192 MB of weights" in run_ranks(WORKER, world, "memory")


#: Saves step 1 in peace, and stops at a given place while it saves step 2.
WRITER = """
import os, sys, time
from pathlib import Path
import torch
import autopar
from autopar import checkpoint_files
from state_worker import optimizer_of
from recompile_worker import Net

folder, where = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
model = Net()
autopar.save_checkpoint(folder, model, step=1)

def stop(*_):
    print("stopped", flush=True)
    time.sleep(600)

real, calls = os.replace, []

def replace(*names):
    calls.append(names)
    if len(calls) == int(where.removeprefix("rename ")):
        stop()
    real(*names)

if where == "files":
    os.fsync = stop
else:
    os.replace = replace
with torch.no_grad():
    model.fc1.weight.zero_()
autopar.save_checkpoint(folder, model, step=2, asynchronous="thread" in sys.argv)
"""


@pytest.mark.parametrize(
    ("where", "how"),
    [("files", "waiting"), ("rename 1", "thread"), ("rename 2", "waiting")],
)
def test_killing_the_writer(where: str, how: str, tmp_path: Path) -> None:
    """The previous checkpoint stays whole, and the next save is not troubled by what is left."""
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), where, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), _path()])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    torch.manual_seed(0)
    expected, model = Net(), Net()
    assert autopar.load_checkpoint(folder, model).step == 1
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    autopar.save_checkpoint(folder, model, step=3)
    assert autopar.load_checkpoint(folder, model).step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")


def test_random_states_go_on(tmp_path: Path) -> None:
    import random

    import numpy

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]

    model = Net()
    autopar.save_checkpoint(tmp_path / "run", model)
    want = draw()
    autopar.load_checkpoint(tmp_path / "run", model, random_states=False)
    assert draw() != want
    autopar.load_checkpoint(tmp_path / "run", model)
    assert draw() == want


def _failing(folder: Path, model: nn.Module) -> autopar.checkpoints.Saving:
    """A checkpoint in the background whose writer fails at the end, when the folder is renamed."""
    with mock.patch("autopar.checkpoints.put_in_place", side_effect=OSError("no space")):
        saving = autopar.save_checkpoint(folder, model, step=2, asynchronous=True)
        assert saving is not None
        while not saving.done:
            time.sleep(0.01)
    return saving


def test_saving_in_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is saved is what the model held when `save_checkpoint` was called."""
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saving = autopar.save_checkpoint(tmp_path / "run", model, asynchronous=True)
    with torch.no_grad():
        model.fc1.weight.zero_()
    assert saving is not None
    saving.wait()
    assert saving.done
    autopar.load_checkpoint(tmp_path / "run", model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    saving = _failing(tmp_path / "run", model)
    with pytest.raises(autopar.CheckpointError, match="not renamed: no space"):
        saving.wait()
    assert "not saved" in caplog.text
    assert autopar.load_checkpoint(tmp_path / "run", Net()).step is None
    _failing(tmp_path / "run", model)
    with pytest.raises(autopar.CheckpointError, match="no space"):  # the next one says it as well
        autopar.save_checkpoint(tmp_path / "run", model, step=3)
    autopar.save_checkpoint(tmp_path / "run", model, step=3)
    assert autopar.load_checkpoint(tmp_path / "run", model).step == 3
    blocked = tmp_path / "file" / "run"
    (tmp_path / "file").write_text("")
    with pytest.raises(autopar.CheckpointError, match="cannot be written"):
        autopar.save_checkpoint(blocked, model, asynchronous=True)


@pytest.mark.parametrize(
    ("save", "words"),
    [
        (lambda f, m: autopar.save_checkpoint(f, m, extra=object()), "extra: only tensors"),
        (lambda f, m: autopar.save_checkpoint(f.parent, m), "is no checkpoint"),
        (
            lambda f, m: autopar.save_checkpoint(f, m, torch.optim.SGD(Net().parameters())),
            "none of the model's",
        ),
        (lambda f, m: autopar.load_checkpoint(f, m), "no such checkpoint"),
        (lambda f, m: autopar.load_pretrained(m, f / "x"), "no such file"),
    ],
)
def test_what_is_refused(save: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    model, _ = build(1)
    with pytest.raises(autopar.CheckpointError, match=words):
        save(tmp_path / "run", model)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_another_model(tmp_path: Path) -> None:
    autopar.save_checkpoint(tmp_path / "run", Net())
    other = Net()
    other.fc2 = nn.Linear(16, 5)
    with pytest.raises(autopar.CheckpointError, match=r"'fc2.weight' is \(12, 16\) in it, \(5, 16"):
        autopar.load_checkpoint(tmp_path / "run", other)
    with pytest.raises(autopar.CheckpointError, match="lacks 'weight', 'bias'; the model lacks"):
        autopar.load_checkpoint(tmp_path / "run", nn.Linear(2, 2))
    with pytest.raises(autopar.CheckpointError, match="saved without an optimizer"):
        model = Net()
        autopar.load_checkpoint(tmp_path / "run", model, optimizer_of(model))
    autopar.save_checkpoint(tmp_path / "sgd", other, torch.optim.SGD(other.parameters(), 0.1))
    adam = torch.optim.Adam(other.parameters(), 0.2)
    torch.optim.lr_scheduler.StepLR(adam, 1)
    before = other.fc2.weight.detach().clone().fill_(3.0)
    with torch.no_grad():
        other.fc2.weight.copy_(before)
    with pytest.raises(autopar.CheckpointError, match=r"another kind than Adam: .*'momentum'"):
        autopar.load_checkpoint(tmp_path / "sgd", other, adam)
    assert adam.param_groups[0]["lr"] == 0.2 and torch.equal(other.fc2.weight, before)
    (tmp_path / "run" / METADATA).write_bytes(b"nonsense")
    with pytest.raises(autopar.CheckpointError, match="cannot be read"):
        autopar.load_checkpoint(tmp_path / "run", Net())


# -- files of whole tensors ---------------------------------------------------------------------


def test_blocks_of_a_safetensors_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    from autopar import tensor_files

    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 64)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "scalar": torch.tensor(3.0),
        "half": torch.randn(7, generator=generator).half(),
        "brain": torch.randn(5, 6, generator=generator).bfloat16(),
        "whole": torch.randint(9, (4, 3, 5), generator=generator),
        "flags": torch.rand(6, generator=generator) > 0.5,
    }
    save_file(tensors, tmp_path / "a.safetensors")
    stored = stored_tensors(tmp_path)
    assert set(stored) == set(tensors)
    for name, tensor in tensors.items():
        assert (stored[name].shape, stored[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        whole = stored[name].read([0] * tensor.dim(), tensor.shape)
        assert torch.equal(whole, tensor)
        for dim in range(tensor.dim()):
            for start, size in ((1, 2), (2, 0), (0, tensor.shape[dim])):
                starts = [start if d == dim else 0 for d in range(tensor.dim())]
                sizes = [size if d == dim else n for d, n in enumerate(tensor.shape)]
                want = tensor.narrow(dim, start, size)
                assert torch.equal(stored[name].read(starts, sizes), want)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.safetensors", b"", "cut short"),
        ("a.safetensors", b"\xff" * 30, "cut short"),
        ("a.safetensors", (4).to_bytes(8, "little") + b"{..}", "no safetensors file"),
        ("a.pt", b"nonsense", "state dict"),
        ("note.txt", b"", r"holds no \*.safetensors"),
        ("model.safetensors.index.json", b"{}", "index"),
        (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"w": "gone.safetensors"}}).encode(),
            "'gone.safetensors', named in the index, is missing",
        ),
    ],
)
def test_files_that_cannot_be_read(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(autopar.CheckpointError, match=words):
        stored_tensors(tmp_path)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "a.safetensors"
    save_file(Net().double().state_dict(), file)
    file.write_bytes(file.read_bytes()[:-1])
    model, _ = build(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(autopar.CheckpointError, match="cut short"):
        autopar.load_pretrained(model, file)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_hugging_face_folders(name: str, tmp_path: Path) -> None:
    """Several files with an index, tied names, old names, and buffers that no file holds."""
    from zoo import build as build_example

    model, call = build_example(name)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    with torch.device("meta"):
        meta = type(model)(model.config)
    parallel = autopar.autoparallelize(meta.double(), kwargs=call, mesh=1)
    autopar.load_pretrained(parallel, tmp_path)
    torch.testing.assert_close(parallel(**call).loss, model(**call).loss)
    wrong = next(iter(tmp_path.glob("*.safetensors")))
    wrong.unlink()
    with pytest.raises(autopar.CheckpointError, match=r"missing|lacks"):
        autopar.load_pretrained(parallel, tmp_path)


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    model, _ = build(1)
    values = {f"old.{name}": value for name, value in Net().double().state_dict().items()}
    torch.save({**values, "spare": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(autopar.CheckpointError, match=r"lacks 'fc1.weight'.*holds 'old.fc1"):
        autopar.load_pretrained(model, tmp_path / "a.pt")
    rename = lambda name: None if name == "spare" else name.removeprefix("old.")  # noqa: E731
    autopar.load_pretrained(model, tmp_path / "a.pt", rename=rename)
    assert torch.equal(model.state_dict()["fc1.weight"], values["old.fc1.weight"])


def test_what_nothing_initialises() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * self.scale

    with torch.device("meta"):
        meta = Scaled().double()
    x, _ = batch(8)
    parallel = autopar.autoparallelize(meta, (x,), mesh=1)
    with pytest.raises(autopar.NoValuesError, match=r"'scale'.*init_fn"):
        autopar.initialise(parallel)
    assert parallel.without_values == {"scale"}

    def init(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            module.scale.data[:4] = 2.0
            nn.init.ones_(module.scale[4:])
            module.fc.weight.data.zero_()  # has a value already, which stays

    autopar.initialise(parallel, init)
    assert parallel.get_parameter("scale").tolist() == [2.0] * 4 + [1.0] * 4
    assert parallel.get_parameter("fc.weight").abs().sum() > 0
