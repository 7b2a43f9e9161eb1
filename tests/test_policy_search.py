"""``memory_policy="auto"``: what fits a limit at the least predicted time of plan and policy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import autopar
from autopar.ir.errors import MemoryLimitError
from autopar.passes.policy_search import WHOLE
from autopar.plans import Plan
from policy_worker import Net, batch

torch.set_num_threads(1)

CALL = batch(rows=64, length=16)
OPTIONS: dict[str, Any] = {"device": "h100", "optimizer": "adam"}


def plan(**options: Any) -> Plan:
    return autopar.plan(Net(), (), CALL, **{**OPTIONS, **options})


def total(made: Plan) -> float:
    """Seconds of a step, what the policies add among them."""
    return made.seconds + sum(row.seconds for row in made.kept)


def note(made: Plan) -> str:
    (found,) = [each for each in made.notes if each.startswith("memory_policy='auto'")]
    return found


@pytest.mark.slow
def test_no_dearer_than_a_policy_named_by_hand() -> None:
    mesh = {"dp": 2, "tp": 2}
    limit = int(0.85 * plan(mesh=mesh).memory().peak)
    chosen = plan(mesh=mesh, memory=limit, memory_policy="auto")
    assert chosen.memory().peak <= limit
    lines = note(chosen).splitlines()
    assert f"{total(chosen) * 1e3:.3f} ms" in lines[0]
    assert lines[1].strip() == lines[0].removeprefix("memory_policy='auto': ").split(";")[0]
    for given in WHOLE:
        assert any(line.strip().startswith(given) for line in lines[1:]), given
        if given not in ("keep", "recompute", "offload"):
            continue  # of the rest it is enough that they were tried
        try:
            fixed = plan(mesh=mesh, memory=limit, memory_policy=given)
        except MemoryLimitError:
            continue
        assert total(chosen) <= total(fixed) * (1 + 1e-9), given


def test_as_many_blocks_as_it_takes() -> None:
    """One plan there is: the number of blocks of which less is kept is the smallest that fits."""
    options: dict[str, Any] = {"mesh": {"dp": 2}, "mode": "data_parallel", "zero": 2}
    full = plan(**options).memory().peak
    limit = full - 1
    chosen = plan(memory=limit, memory_policy="auto", **options)
    found = re.search(r"(recompute|offload) of the first 1 of 3 blocks, zero=2", note(chosen))
    assert found and chosen.memory().peak <= limit < full
    assert {row.place.split(".")[1] for row in chosen.kept} == {"0"}
    assert autopar.verify(Net(), (), CALL, mesh=options["mesh"], plan=chosen).ok


def test_nothing_is_offloaded_where_the_host_has_the_same_memory() -> None:
    options: dict[str, Any] = {"mesh": {"dp": 2}, "mode": "data_parallel", "device": "cpu"}
    full = plan(**options).memory().peak
    assert plan(memory_policy="offload", **options).memory().peak >= full
    chosen = plan(memory=full - 1, memory_policy="auto", **options)
    assert chosen.memory().peak < full and "recompute" in note(chosen)
    assert "offload" not in note(chosen)


def test_without_a_limit_all_is_kept() -> None:
    assert not plan(mesh={"dp": 2}, memory_policy="auto").policies
    roomy = plan(mesh={"dp": 2}, memory="80GB", memory_policy="auto")
    assert not roomy.policies and "keep" in note(roomy)


@pytest.mark.slow
def test_nothing_fits() -> None:
    with pytest.raises(MemoryLimitError, match=r"under any policy that was tried \(keep, .*peak"):
        plan(mesh={"dp": 2}, mode="data_parallel", memory=2000, memory_policy="auto")


@pytest.mark.slow
def test_shards_where_that_is_what_it_takes() -> None:
    """With few rows the optimizer's state is what there is to save."""
    options: dict[str, Any] = {"mesh": {"dp": 4}, "mode": "data_parallel"}
    small = batch(rows=4, length=4)
    peaks = [
        autopar.plan(Net(), (), small, zero=zero, **options, **OPTIONS).memory().peak
        for zero in (0, 2)
    ]
    assert peaks[1] < peaks[0]
    chosen = autopar.plan(
        Net(), (), small, memory=sum(peaks) // 2, memory_policy="auto", **options, **OPTIONS
    )
    assert ", zero=2" in note(chosen) and chosen.memory().peak <= sum(peaks) // 2
    assert any(note.startswith("zero=2: ") for note in chosen.notes)
