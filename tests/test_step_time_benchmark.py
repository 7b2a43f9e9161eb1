"""The step time benchmark: how it judges ratios, and that it runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "step_time.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_time_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_ratios_are_of_the_same_round(benchmark: ModuleType) -> None:
    times = {"ours": [1.0, 10.0, 3.0], "theirs": [2.0, 10.0, 4.0]}
    assert benchmark.ratio(times, "ours", "theirs") == 0.75


def test_a_ratio_above_its_limit_fails(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    held = (benchmark.Held("ours", ("theirs",), 1.0), benchmark.Held("ours", ("theirs",), 0.4))
    what = benchmark.Set("one rank", 1, ("ours", "theirs"), held)
    measured = benchmark.Measured({"ours": [1.0], "theirs": [2.0]}, 2**30)
    assert benchmark.report("tiny", what, measured), "no limit is for this size"
    assert not benchmark.report("small", what, measured)
    text = capsys.readouterr().out
    assert "at most 1.00: holds" in text and "at most 0.40: FAILS" in text


@pytest.mark.slow
def test_ways_take_turns_and_a_process_that_fails_ends_the_others(benchmark: ModuleType) -> None:
    ways = ("autopar tensor", "tensor by hand")
    measured = benchmark.measure("tiny", benchmark.Set("two ranks", 2, ways, ()), 2, 2, 200)
    assert {way: len(each) for way, each in measured.times.items()} == dict.fromkeys(ways, 4)
    with pytest.raises(RuntimeError, match="KeyError: 'no such way'"):
        benchmark.measure("tiny", benchmark.Set("one rank", 1, ("no such way",), ()), 1, 1, 50)
    with pytest.raises(RuntimeError, match="the time is up"):
        benchmark.measure("tiny", benchmark.Set("one rank", 1, ("eager",), ()), 10**9, 1, 0.5)
