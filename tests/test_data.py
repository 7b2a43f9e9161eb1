"""Batches are loaded as the plan divides them, and go on where they were left."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import autopar
from ranks import run_ranks

WORKER = Path(__file__).with_name("data_worker.py")


def test_on_real_processes() -> None:
    run_ranks(WORKER, 2, "training", "layouts", "resume")


def rows(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def numbers(n: int = 10, **options: Any) -> autopar.DistributedBatches:
    return autopar.DistributedBatches(TensorDataset(torch.arange(n)), 4, **options)


def test_one_process() -> None:
    assert rows(numbers()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rows(numbers(drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(numbers()) == 3 and len(numbers(drop_last=True)) == 2


def test_epochs_are_shuffled_by_seed_and_number() -> None:
    batches = numbers(shuffle=True, seed=7)
    first, second = rows(batches), rows(batches)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert rows(numbers(shuffle=True, seed=8)) == second
    torch.manual_seed(0)
    want = torch.rand(1)
    torch.manual_seed(0)
    rows(batches)
    assert torch.equal(torch.rand(1), want), "the caller's random numbers were used up"


def test_an_epoch_that_is_left_begins_again_unless_it_is_resumed() -> None:
    batches = numbers()
    assert next(iter(batches))[0].tolist() == [0, 1, 2, 3]
    state = batches.state_dict()
    assert rows(batches)[0] == [0, 1, 2, 3]
    batches.load_state_dict(state)
    assert rows(batches) == [[4, 5, 6, 7], [8, 9]]
    assert rows(batches)[0] == [0, 1, 2, 3]


def test_workers() -> None:
    batches = numbers(num_workers=1, shuffle=True)
    assert sorted(chain(*rows(batches))) == list(range(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: autopar.DistributedBatches(Stream(), 4), "dataset: expected one with a length"),
        (lambda: autopar.DistributedBatches(TensorDataset(torch.ones(3)), 0), "batch_size"),
        (
            lambda: numbers().load_state_dict(
                {"epoch": 0, "batches": 1, "seed": 0, "batch_size": 3}
            ),
            "batch_size: 4 here, 3 in the saved state",
        ),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(autopar.InputError, match=words):
        make()
