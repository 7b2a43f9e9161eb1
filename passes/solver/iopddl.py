"""Reads the public format of the intra-operator parallelism contest (iopddl), .json[.gz]."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from typing import Any

import numpy as np

from .errors import ProblemError
from .problem import Edge, Held, Node, Problem

# Costs from here on mean "forbidden" in the format.
FORBIDDEN = 10**18


def load(path: str | os.PathLike[str]) -> Problem:
    """The problem in a contest file.

    Raises:
        ProblemError: the file is no such problem; the message names what is wrong.
        OSError: the file cannot be read.
    """
    path = os.fspath(path)
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            document = json.loads(file.read())
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise ProblemError(f"{path}: not a JSON document ({error})") from error
    try:
        return parse(document)
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from error


def parse(document: Any) -> Problem:
    """The problem in a parsed contest document, see ``load``."""
    problem = _member(document, "problem", "document", dict)
    nodes = _member(problem, "nodes", "problem", dict)
    edges = _member(problem, "edges", "problem", dict)
    intervals = _member(nodes, "intervals", "problem.nodes", list)
    node_costs = _member(nodes, "costs", "problem.nodes", list)
    usages = _member(nodes, "usages", "problem.nodes", list)
    if not len(intervals) == len(node_costs) == len(usages):
        raise ProblemError(
            f"problem.nodes: got {len(intervals)} intervals, {len(node_costs)} costs and "
            f"{len(usages)} usages, expected the same number of each"
        )
    ends = _member(edges, "nodes", "problem.edges", list)
    edge_costs = _member(edges, "costs", "problem.edges", list)
    if len(ends) != len(edge_costs):
        raise ProblemError(
            f"problem.edges: got {len(ends)} nodes and {len(edge_costs)} costs, "
            "expected the same number of each"
        )
    limit = problem.get("usage_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float))):
        raise ProblemError(f"problem.usage_limit: got {limit!r}, expected a number")
    all_nodes = tuple(
        Node(
            f"n{index}",
            _costs(costs, f"problem.nodes.costs[{index}]"),
            (
                Held(
                    _numbers(usage, f"problem.nodes.usages[{index}]"),
                    _pair(interval, f"problem.nodes.intervals[{index}]"),
                ),
            ),
        )
        for index, (interval, costs, usage) in enumerate(
            zip(intervals, node_costs, usages, strict=True)
        )
    )
    all_edges = tuple(
        _edge(index, pair, costs, all_nodes)
        for index, (pair, costs) in enumerate(zip(ends, edge_costs, strict=True))
    )
    return Problem(all_nodes, all_edges, None if limit is None else _float(limit))


def _edge(index: int, pair: Any, values: Any, nodes: tuple[Node, ...]) -> Edge:
    where = f"problem.edges.nodes[{index}]"
    u, v = _pair(pair, where)
    for end in (u, v):
        if not 0 <= end < len(nodes):
            raise ProblemError(f"{where}: got node {end}, expected 0 to {len(nodes) - 1}")
    costs = _costs(values, f"problem.edges.costs[{index}]")
    shape = (len(nodes[u].costs), len(nodes[v].costs))
    if costs.size != shape[0] * shape[1]:
        raise ProblemError(
            f"problem.edges.costs[{index}]: got {costs.size} costs, "
            f"expected {shape[0]} x {shape[1]}"
        )
    return Edge.from_dense(u, v, costs.reshape(shape))


def _member(container: Any, key: str, where: str, kind: type) -> Any:
    if not isinstance(container, dict):
        raise ProblemError(f"{where}: got {type(container).__name__}, expected an object")
    if key not in container:
        raise ProblemError(f"{where}: got no {key!r}, expected one")
    value = container[key]
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise ProblemError(f"{where}.{key}: got {type(value).__name__}, expected {expected}")
    return value


def _costs(values: Any, where: str) -> np.ndarray:
    numbers = _numbers(values, where)
    if not numbers.size:
        raise ProblemError(f"{where}: got no choices, expected at least one")
    numbers[numbers >= FORBIDDEN] = np.inf
    return numbers


def _numbers(values: Any, where: str) -> np.ndarray:
    if not isinstance(values, list):
        raise ProblemError(f"{where}: got {type(values).__name__}, expected a list of numbers")
    try:
        numbers = np.asarray(values)
        if numbers.dtype.kind == "O":  # whole numbers too large for 64 bits
            numbers = np.array([_float(value) for value in values if type(value) in (int, float)])
        if values and numbers.dtype.kind not in "iuf":
            raise TypeError
        return numbers.astype(np.float64).reshape(len(values))
    except (TypeError, ValueError):
        raise ProblemError(f"{where}: got {values!r:.60}, expected a list of numbers") from None


def _float(number: float) -> float:
    """A number of any size; what no float can hold is infinite."""
    try:
        return float(number)
    except OverflowError:
        return np.inf if number > 0 else -np.inf


def _pair(value: Any, where: str) -> tuple[int, int]:
    good = isinstance(value, list) and len(value) == 2
    if not good or any(isinstance(end, bool) or not isinstance(end, int) for end in value):
        raise ProblemError(f"{where}: got {value!r:.60}, expected two integers")
    return value[0], value[1]
