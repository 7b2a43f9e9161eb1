"""What a fused node must look like, in the words of the refusal."""

from __future__ import annotations

import pytest

from autopar.ir.errors import GraphError
from autopar.ir.parse import parse_graph
from autopar.ir.verify import verify_graph

SOURCES = """
mesh a=2 b=2
%p : f64[4@a, 6] grad = param "p"
%q : f64[6, 2] grad = param "q"
%h : f32[4@a, 6] grad = param "h"
"""
GATHERED = "%p_1 : f64[4, 6] grad rep(a)"
WHOLE = "%p_1 : f64[4, 6]"
GATHER = '("autopar.all_gather", ("a",), ((0, "R"),))'

REFUSED = {
    "no_values": (f"{WHOLE} = autopar.fused((), ({GATHER},))", "malformed values"),
    "no_steps": (f"{GATHERED} = autopar.fused((%p,), ())", "malformed steps"),
    "too_few_results": (f"{GATHERED} = autopar.fused((%p, %q), ({GATHER},))", "malformed values"),
    "values_that_are_none": (f"{WHOLE} = autopar.fused((1,), ({GATHER},))", "malformed values"),
    "not_by_position": (f"{GATHERED} = autopar.fused((%p,), steps=({GATHER},))", "by position"),
    "arguments_of_one_value": (
        f"{GATHERED}, %q_1 : f64[6, 2] grad rep(a) = autopar.fused((%p, %q), ({GATHER},))",
        "malformed steps",
    ),
    "a_step_it_does_not_have": (
        f'{GATHERED} = autopar.fused((%p,), (("autopar.all_to_all", ("a",), ((0, 1),)),))',
        "got 'autopar.all_to_all'",
    ),
    "a_step_that_does_not_apply": (
        f'{GATHERED} = autopar.fused((%p,), (("autopar.to_replicate", ("a",), ((),)),))',
        "axis 'a' must be in state 'I'",
    ),
    "another_layout": (
        f"%p_1 : f64[4, 6] grad = autopar.fused((%p,), ({GATHER},))",
        r"autopar.fused gives layout \[-, -\] rep\(a\), got \[-, -\]",
    ),
    "another_shape": (
        f"%p_1 : f64[8, 6] grad rep(a) = autopar.fused((%p,), ({GATHER},))",
        r"autopar.fused gives shape \(4, 6\), got \(8, 6\)",
    ),
    "two_dtypes": (
        f"{GATHERED}, %h_1 : f32[4, 6] grad rep(a) = autopar.fused((%p, %h), "
        '(("autopar.all_gather", ("a",), ((0, "R"), (0, "R"))),))',
        "its values have one dtype, got torch.float32 for %h and torch.float64 for %p",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    line, words = REFUSED[name]
    graph = parse_graph(f"{SOURCES.strip()}\n{line}\nreturn\n")
    with pytest.raises(GraphError, match=words):
        verify_graph(graph, stage="partitioned")


def test_what_is_taken() -> None:
    graph = parse_graph(
        f"{SOURCES.strip()}\n{GATHERED} = autopar.fused((%p,), ({GATHER},))\nreturn\n"
    )
    verify_graph(graph, stage="partitioned")
