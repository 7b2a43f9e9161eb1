"""The step time benchmark: how it judges ratios, and that it runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_where_a_median_lies(benchmark: ModuleType) -> None:
    ratios = [k / 100 for k in range(100)]
    times = {"ours": ratios[::-1], "theirs": [1.0] * 100}
    assert benchmark.interval(times, "ours", "theirs") == (0.40, 0.59)
    few = {"ours": [1.0, 2.0], "theirs": [1.0, 1.0]}
    assert benchmark.interval(few, "ours", "theirs") == (1.0, 2.0)


def test_open_ratios_are_measured_again(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[str, ...]] = []

    def launch(ratio: float) -> Callable[..., Any]:
        def run(size: str, what: Any, rounds: int, limit_s: float) -> Any:
            built.append(what.ways)
            spread = (0.9, 1.0, 1.1) * 3
            times = {"ours": [ratio * s for s in spread], "theirs": [1.0] * 9}
            return benchmark.Measured(times, len(built))

        return run

    held = (benchmark.Held("ours", "theirs", {"small": 1.0}),)
    what = benchmark.Set("one rank", 1, ("ours", "theirs"), held)
    monkeypatch.setattr(benchmark, "_launch", launch(0.5))
    clear = benchmark.measure("small", what, 9, (2, 6), 1)
    assert len(clear.times["ours"]) == 18 and clear.peak == 2
    assert built == [("ours", "theirs"), ("theirs", "ours")]
    built.clear()
    monkeypatch.setattr(benchmark, "_launch", launch(1.0))
    assert benchmark.measure("small", what, 9, (2, 6), 1).peak == 6, "as many as there may be"
    built.clear()
    assert benchmark.measure("tiny", what, 9, (2, 6), 1).peak == 2, "no limit is for this size"


def test_a_ratio_above_its_limit_fails(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    held = (benchmark.Held("ours", "theirs", {"small": 0.4, "large": 1.0}),)
    what = benchmark.Set("one rank", 1, ("ours", "theirs"), held)
    measured = benchmark.Measured({"ours": [1.0], "theirs": [2.0]}, 2**30)
    assert benchmark.report("tiny", what, measured), "no limit is for this size"
    assert benchmark.report("large", what, measured)
    assert not benchmark.report("small", what, measured)
    text = capsys.readouterr().out
    assert "at most 1.00: holds" in text and "at most 0.40: FAILS" in text


@pytest.mark.slow
def test_ways_take_turns_and_a_process_that_fails_ends_the_others(benchmark: ModuleType) -> None:
    ways = ("autopar tensor", "tensor by hand")
    measured = benchmark.measure("tiny", benchmark.Set("two ranks", 2, ways, ()), 2, (2, 2), 200)
    assert {way: len(each) for way, each in measured.times.items()} == dict.fromkeys(ways, 4)
    with pytest.raises(RuntimeError, match="KeyError: 'no such way'"):
        benchmark.measure("tiny", benchmark.Set("one rank", 1, ("no such way",), ()), 1, (1, 1), 50)
    with pytest.raises(RuntimeError, match="the time is up"):
        benchmark.measure("tiny", benchmark.Set("one rank", 1, ("eager",), ()), 10**9, (1, 1), 0.5)
