"""Every strategy of every rule against the unsplit operator (see `harness.py`)."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.rules.registry import registered
from harness import check_sample, check_uneven
from samples import Sample, all_samples
from samples.resize import FIXED, resized

SAMPLES = all_samples()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_every_strategy_reproduces_the_unsplit_operator(sample: Sample) -> None:
    assert check_sample(sample) > 0


#: Operators on which nothing may be split at any size.
WHOLE = {sample.op for sample in SAMPLES} - {s.op for s in SAMPLES if not s.unsplit}

#: Uneven and, where sizes are small, empty pieces: 7 over 2, 3, 4 and 2x2 ranks; 5 and 3 as well.
LINES = (Mesh.of({"a": 2}), Mesh.of({"a": 4}))
OTHERS = (Mesh.of({"a": 3}), Mesh.of({"a": 2, "b": 2}))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_uneven_pieces_reproduce_the_unsplit_operator(sample: Sample) -> None:
    for other in resized(sample):
        check_uneven(other, LINES)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_nested_uneven_pieces_reproduce_the_unsplit_operator(sample: Sample) -> None:
    check_uneven(sample, OTHERS)
    for other in resized(sample):
        check_uneven(other, OTHERS)


def test_nearly_every_operator_has_a_sample_that_does_not_divide() -> None:
    found = {sample.op for sample in SAMPLES if any(True for _ in resized(sample))}
    missing = {sample.op for sample in SAMPLES} - found - WHOLE - set(FIXED)
    assert len(missing) <= 3, sorted(missing)


def test_every_registered_rule_has_a_sample() -> None:
    missing = set(registered()) - {sample.op for sample in SAMPLES}
    assert not missing, f"rules without a sample call: {sorted(missing)}"
