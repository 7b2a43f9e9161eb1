"""What a plan can tell beyond its own decisions, as long as it knows its model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.baseline_report import compare_traced
from autopar.comparison import Comparison
from autopar.compiler import Traced
from autopar.memory_report import MemoryReport, memory_report
from autopar.passes import pipeline
from autopar.plans import Plan


@dataclass(frozen=True)
class PlanReports:
    """The reports of one plan for one traced model."""

    traced: Traced
    plan: Plan

    def compare(self) -> Comparison:
        """The plan beside the baselines."""
        return compare_traced(self.traced, self.plan)

    def memory(self, optimizer: str) -> MemoryReport:
        """The memory of one training step on one rank."""
        plan = self.plan
        graph = pipeline.lower(self.traced.graph, plan.assignment, plan.device, plan.policies)
        return memory_report(graph, optimizer, plan.device)


def with_reports(traced: Traced, plan: Plan) -> Plan:
    """The plan, able to report on the model it was made for."""
    return replace(plan, reports=PlanReports(traced, plan))
