"""The contest format: a small instance, the command line, and files that are wrong."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.passes.solver import ProblemError, solve
from autopar.passes.solver.__main__ import main
from autopar.passes.solver.iopddl import load, parse

# The five-node example of the contest's description; the optimum is known by brute force.
EXAMPLE: dict[str, Any] = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


@pytest.mark.parametrize("method", ["auto", "ilp", "reduce"])
def test_the_example_is_solved(method: str) -> None:
    solution = solve(parse(EXAMPLE), method=method)
    assert solution.cost == 445
    assert solution.choice == (0, 0, 2, 1, 0)
    assert solution.peak == 50
    assert solution.status == "optimal"


def test_without_the_limit_the_example_is_cheaper() -> None:
    document = copy.deepcopy(EXAMPLE)
    del document["problem"]["usage_limit"]
    assert solve(parse(document)).cost < 445


def test_huge_costs_are_forbidden() -> None:
    document = copy.deepcopy(EXAMPLE)
    document["problem"]["nodes"]["costs"][1] = [10**18, 65]
    document["problem"]["edges"]["costs"][2] = [90, 10, 10**30, 80]
    problem = parse(document)
    assert problem.nodes[1].costs.tolist() == [np.inf, 65]
    assert problem.edges[2].dense().tolist() == [[90, 10], [np.inf, 80]]
    assert solve(problem).choice[1] == 1


def change(path: list[Any], value: Any) -> dict[str, Any]:
    """The example with one place replaced."""
    document = copy.deepcopy(EXAMPLE)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "document: got list, expected an object"),
        ({}, "document: got no 'problem', expected one"),
        (change(["problem", "nodes"], 3), "problem.nodes: got int, expected an object"),
        (
            change(["problem", "nodes", "intervals"], [[0, 1]]),
            "problem.nodes: got 1 intervals, 5 costs and 5 usages",
        ),
        (
            change(["problem", "nodes", "intervals", 2], [1]),
            "problem.nodes.intervals[2]: got [1], expected two integers",
        ),
        (
            change(["problem", "nodes", "intervals", 2], [9, 3]),
            "node 2 (n2): got interval [9, 3)",
        ),
        (
            change(["problem", "nodes", "costs", 1], "cheap"),
            "problem.nodes.costs[1]: got str, expected a list of numbers",
        ),
        (
            change(["problem", "nodes", "costs", 1], [1, "a"]),
            "problem.nodes.costs[1]: got [1, 'a'], expected a list of numbers",
        ),
        (
            change(["problem", "nodes", "usages", 1], [1]),
            "node 1 (n1): got 1 usages for 2 costs",
        ),
        (
            change(["problem", "edges", "nodes"], [[0, 1]]),
            "problem.edges: got 1 nodes and 5 costs",
        ),
        (
            change(["problem", "edges", "nodes", 3], [2, 9]),
            "problem.edges.nodes[3]: got node 9, expected 0 to 4",
        ),
        (
            change(["problem", "edges", "costs", 1], [1, 2]),
            "problem.edges.costs[1]: got 2 costs, expected 1 x 3",
        ),
        (
            change(["problem", "nodes", "costs", 1], [1, float("nan")]),
            "node 1 (n1): got costs with nan or -inf",
        ),
        (
            change(["problem", "nodes", "costs", 1], [1, -(10**400)]),
            "node 1 (n1): got costs with nan or -inf",
        ),
        (
            change(["problem", "nodes", "costs", 1], [1, None]),
            "problem.nodes.costs[1]: got [1, None], expected a list of numbers",
        ),
        (change(["problem", "nodes", "costs", 0], []), "problem.nodes.costs[0]: got no choices"),
        (
            change(["problem", "nodes", "intervals", 2], [-3, 3]),
            "node 2 (n2): got interval [-3, 3)",
        ),
        (
            change(["problem", "nodes", "intervals", 2], [0, 10**30]),
            "node 2 (n2): got interval [0, 1000000000000000000000000000000)",
        ),
        (change(["problem", "usage_limit"], float("nan")), "usage limit: got nan"),
        (
            change(["problem", "usage_limit"], "much"),
            "problem.usage_limit: got 'much', expected a number",
        ),
    ],
)
def test_a_malformed_document_is_named(document: Any, message: str) -> None:
    with pytest.raises(ProblemError) as raised:
        parse(document)
    assert str(raised.value).startswith(message)


def test_files_are_read_plain_and_zipped(tmp_path: Path) -> None:
    text = json.dumps(EXAMPLE)
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    for name in ("a.json", "b.json.gz"):
        problem = load(tmp_path / name)
        assert (len(problem.nodes), len(problem.edges), problem.usage_limit) == (5, 5, 50.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.json", b'{"problem": {'),
        ("text.json", b"\xff\xfe\x00"),
        ("plain.json.gz", b"{}"),
        ("cut.json.gz", gzip.compress(json.dumps(EXAMPLE).encode(), mtime=0)[:-20]),
        ("spoilt.json.gz", gzip.compress(json.dumps(EXAMPLE).encode(), mtime=0)[:40] + b"\0" * 40),
        ("deep.json", b"[" * 100_000),
    ],
)
def test_a_file_that_is_no_document_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProblemError, match=name):
        load(tmp_path / name)
    assert main([str(tmp_path / name), "--seconds", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and name in lines[0]


def test_the_command_ends_with_the_assignment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(EXAMPLE))
    assert main([str(tmp_path / "a.json"), "--seconds", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == [0, 0, 2, 1, 0]
    assert lines[-2].startswith("optimal: cost 445, bound 445, gap 0.0000%, peak 50, limit 50")
    assert "best 445, bound 445" in lines[0]


def test_the_command_reports_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    document = change(["problem", "usage_limit"], 49)
    (tmp_path / "tight.json").write_text(json.dumps(document))
    assert main([str(tmp_path / "bad.json")]) == 2
    assert "no 'problem'" in capsys.readouterr().err
    assert main([str(tmp_path / "tight.json")]) == 1
    assert "limit of 49" in capsys.readouterr().err
    assert main([str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err
