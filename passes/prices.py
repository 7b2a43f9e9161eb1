"""The prices of an assignment problem: compute, parameters and reshards on one device and mesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.passes.compute_cost import parameter_times, strategy_times
from autopar.passes.device import Device
from autopar.passes.reshard import Step, plan_reshard
from autopar.passes.reshard_cost import ReshardCosts
from autopar.passes.signature import type_of


class DevicePrices:
    """Times in seconds, forward and backward together (see `build.Prices`)."""

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self._reshards = ReshardCosts(mesh, device)
        self._strategies: dict[Hashable, np.ndarray] = {}

    def strategies(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray:
        # Every block of a model asks for the same calls again.
        types = tuple(map(type_of, (*node.operands, *node.results)))
        key = (node.op, rule, types, tuple(choices))
        if key not in self._strategies:
            self._strategies[key] = strategy_times(node, rule, choices, self.mesh, self.device)
        return self._strategies[key]

    def parameter(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        return parameter_times(value, layouts, self.mesh, self.device)

    def reshard(
        self, src: Sequence[Layout], dst: Sequence[Layout], value: Value, grad: bool
    ) -> np.ndarray:
        return self._reshards.matrix(src, dst, value.shape, value.dtype.itemsize, grad)

    def steps(self, src: Layout, dst: Layout, value: Value, grad: bool) -> tuple[Step, ...]:
        """The collectives behind one entry of `reshard`."""
        return plan_reshard(src, dst, value.shape, self.mesh, self.device, grad=grad)
