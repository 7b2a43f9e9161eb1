"""What a rule declares an assisted split to communicate is what the runtime operator does."""

from __future__ import annotations

import math
from typing import Any

import pytest

import harness
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, local_factor_size, strategies
from autopar.ir.rules import rule_for
from autopar.runtime.groups import Group
from samples import Sample, samples_of

MESH = Mesh.of({"a": 2})

FAMILIES = (
    "attention", "batch_norm", "creation", "dropout", "embedding", "extremum", "loss", "mean",
    "norm", "softmax",
)  # fmt: skip

#: One number per tensor (a count, a sum of class weights) is not worth declaring.
NEGLIGIBLE = 1


class _Meter:
    """The elements that the first rank sends to be reduced or gathered, by direction."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.direction = "forward"
        self.elements = {"forward": 0, "backward": 0}
        for name in ("all_reduce", "all_gather"):
            patch.setattr(Group, name, self._metered(getattr(Group, name)))
        self._backward = harness._gradients
        patch.setattr(harness, "_gradients", self._gradients)

    def _metered(self, method: Any) -> Any:
        def call(group: Group, x: Any, *args: Any, **kwargs: Any) -> Any:
            if group.size > 1 and group.index == 0:
                self.elements[self.direction] += x.numel()
            return method(group, x, *args, **kwargs)

        return call

    def _gradients(self, *args: Any) -> Any:
        self.direction = "backward"
        try:
            return self._backward(*args)
        finally:
            self.direction = "forward"


def _assisted(sample: Sample) -> list[tuple[harness.Case, Rule, Strategy]]:
    case = harness.make_case(sample)
    rule = rule_for(case.node)
    found = strategies(rule, MESH, grad=case.node.differentiable)
    return [
        (case, rule, s)
        for s in found
        if s.role["a"] in rule.by_name and rule.by_name[s.role["a"]].assist
    ]


@pytest.mark.parametrize("sample", samples_of(*FAMILIES), ids=lambda s: s.name)
def test_declared_communication_is_what_happens(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = _assisted(sample)
    meter = _Meter(monkeypatch)
    for case, rule, strategy in trials:
        meter.elements = {"forward": 0, "backward": 0}
        harness.run_trials(case, [harness.make_trial(case, rule, strategy, MESH)], MESH)
        assist = rule.by_name[strategy.role["a"]].assist
        assert assist is not None
        once = math.prod(local_factor_size(rule, strategy, f, MESH) for f in assist.over)
        backward = assist.backward * once if case.node.differentiable else 0
        assert abs(meter.elements["forward"] - assist.forward * once) <= NEGLIGIBLE, str(strategy)
        assert meter.elements["backward"] == backward, str(strategy)
