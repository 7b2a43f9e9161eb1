"""How the prediction benchmark judges a ranking."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "prediction.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prediction_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _rows(benchmark: ModuleType, *times: tuple[float, float]) -> list:
    return [
        benchmark.Row(f"plan {i}", "{x=2}", predicted, measured, 0.0, 100, 100)
        for i, (predicted, measured) in enumerate(times)
    ]


def test_an_order_that_is_kept_has_no_misordered_pairs(benchmark: ModuleType) -> None:
    rows = _rows(benchmark, (1.0, 2.0), (2.0, 3.0), (3.0, 9.0))
    assert benchmark.misordered(rows) == []
    assert benchmark.spearman(rows) == benchmark.kendall(rows) == 1.0


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        ((1.2, 0.8), True),
        ((1.2, 0.95), False),  # tied as measured
        ((1.05, 0.8), False),  # tied as predicted
        ((1.2, 1.5), False),  # in order
    ],
)
def test_pairs_tied_on_either_side_may_be_in_any_order(
    benchmark: ModuleType, other: tuple[float, float], wrong: bool
) -> None:
    first, second = _rows(benchmark, (1.0, 1.0), other)
    assert bool(benchmark.misordered([first, second])) == wrong
    assert bool(benchmark.misordered([second, first])) == wrong


def test_the_reverse_order_is_the_opposite_of_the_right_one(benchmark: ModuleType) -> None:
    rows = _rows(benchmark, (1.0, 4.0), (2.0, 3.0), (3.0, 2.0), (4.0, 1.0))
    assert benchmark.spearman(rows) == benchmark.kendall(rows) == -1.0
    assert len(benchmark.misordered(rows)) == 6


def test_the_report_says_what_does_not_hold(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.report("fine", _rows(benchmark, (1.0, 1.0), (2.0, 2.0)))
    assert not benchmark.report("wrong", _rows(benchmark, (1.0, 2.0), (2.0, 1.0)))
    forgot = benchmark.Row("plan", "{x=2}", 1.0, 1.0, 0.0, 100, 150)
    assert not benchmark.report("memory", [forgot, *_rows(benchmark, (2.0, 2.0))])
    text = capsys.readouterr().out
    assert "misordered: plan 1" in text and "FAILS in 1 pairs" in text
    assert "memory within 10%: FAILS for plan" in text
