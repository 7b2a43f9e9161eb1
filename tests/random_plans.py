"""Plans drawn at random: any valid strategy for every operator, any layout for everything held.

A plan need not be good to be correct, and bad ones exercise the rewriter far more than good ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autopar.compiler import Request, Traced, describe_plan
from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.rule import Rule, Strategy
from autopar.passes.assignment import Assignment
from autopar.passes.build import build_problem
from autopar.passes.search import output_choices
from autopar.plans import Plan

#: How many random plans of each model were verified in this run.
VERIFIED: Counter[str] = Counter()


class _Free:
    """Prices of nothing: a random plan is drawn, not searched."""

    def strategies(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray:
        return np.zeros(len(choices))

    def parameter(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        return np.zeros(len(layouts))

    def reshard(
        self, src: Sequence[Layout], dst: Sequence[Layout], value: Value, grad: bool
    ) -> np.ndarray:
        return np.zeros((len(src), len(dst)))

    def fetch(
        self,
        src: Sequence[Layout],
        dst: Sequence[Layout],
        value: Value,
        grad: bool,
        itemsize: int,
    ) -> tuple[np.ndarray, None]:
        return np.zeros((len(src), len(dst))), None

    def covering(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> None:
        return None

    def last_bucket(self) -> float:
        return 0.0


def random_assignment(traced: Traced, request: Request, seed: int) -> Assignment:
    """Any choice for every operator, source, shared value and output of a traced model."""
    mesh = request.mesh.without_trivial_axes()
    built = build_problem(
        traced.graph,
        traced.rules,
        mesh,
        _Free(),
        fixes=traced.placed.fixes,
        output_layouts=output_choices(traced.graph, mesh, request.outputs),
    )
    draw = random.Random(seed)
    choice = [draw.randrange(len(node.costs)) for node in built.problem.nodes]
    return built.assignment(mesh, choice)


def random_plan(traced: Traced, request: Request, seed: int) -> Plan:
    """The plan of a random assignment."""
    assignment = random_assignment(traced, request, seed)
    return describe_plan(traced, request, assignment, f"random {seed}", 0.0, 0.0)
