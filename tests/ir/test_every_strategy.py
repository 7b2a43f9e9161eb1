"""Every strategy of every rule against the unsplit operator (see `harness.py`)."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.rules.registry import registered
from harness import check_sample
from samples import Sample, all_samples

SAMPLES = all_samples()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_every_strategy_reproduces_the_unsplit_operator(sample: Sample) -> None:
    assert check_sample(sample) > 0


def test_every_registered_rule_has_a_sample() -> None:
    missing = set(registered()) - {sample.op for sample in SAMPLES}
    assert not missing, f"rules without a sample call: {sorted(missing)}"
