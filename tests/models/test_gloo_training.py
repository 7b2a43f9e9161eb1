"""Training over real gloo processes gives what one device gives: see `training_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from ranks import run_ranks
from zoo import build

WORKER = Path(__file__).with_name("training_worker.py")


@pytest.mark.slow
def test_five_models_train_as_on_one_device() -> None:
    """GPT-2, Llama, BERT with dropout, ViT and ResNet under the searched plan."""
    output = run_ranks(WORKER, 4, "models")
    for name in ("gpt2", "llama", "bert", "vit", "resnet"):
        assert f"{name}: " in output


def test_ways_to_use_the_module() -> None:
    """Local inputs, outputs, lazy compilation, evaluation, dropout, clipping, states, meshes."""
    checks = ("data_parallel", "outputs", "lazy", "eval", "dropout", "tools", "meshes")
    run_ranks(WORKER, 4, *checks, "shared_names")


@pytest.mark.parametrize("mesh", [None, 1, {"dp": 1, "tp": 1}])
def test_one_rank_needs_no_process_group(mesh: dict[str, int] | int | None) -> None:
    torch.set_num_threads(1)
    single, call = build("mlp")
    parallel = autopar.autoparallelize(build("mlp")[0], kwargs=call, mesh=mesh)
    mine = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(single.parameters(), lr=1e-3)
    for _ in range(2):
        (loss, scores), (expected, want) = parallel(**call), single(**call)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(scores, want)
        for optimizer, value in ((mine, loss), (theirs, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    state = parallel.state_dict()
    assert list(state) == list(single.state_dict())
    for name, value in single.state_dict().items():
        assert type(state[name]) is torch.Tensor
        torch.testing.assert_close(state[name], value)
    assert not dist.is_initialized()


def test_train_and_eval_flags_follow_the_model() -> None:
    """`train()` and `eval()` reach every module, before and after compilation."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).double()
    x = torch.ones(2, 4, dtype=torch.float64)
    parallel = autopar.autoparallelize(model, mesh=1).eval()
    torch.testing.assert_close(parallel(x), model.eval()(x))
    assert not any(module.training for module in parallel.modules())
    parallel.train()
    assert all(module.training for module in parallel.modules())
    drawn = [parallel(x) for _ in range(8)]
    assert any(not torch.equal(each, drawn[0]) for each in drawn)
    parallel.eval()
    torch.testing.assert_close(parallel(x), model.eval()(x))
