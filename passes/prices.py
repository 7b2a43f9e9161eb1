"""The prices of an assignment problem: compute, parameters and reshards on one device and mesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from autopar.ir.graph import Node, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy
from autopar.passes.bucket_size import bucket_size
from autopar.passes.compute_cost import Times, call_times, parameter_times
from autopar.passes.device import Device
from autopar.passes.reshard.cost import ReshardCosts
from autopar.passes.reshard.path import Step, plan_reshard
from autopar.passes.signature import type_of


class DevicePrices:
    """Times in seconds, forward and backward together (see `build.Prices`)."""

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self._reshards = ReshardCosts(mesh, device)
        self._calls: dict[Hashable, Times] = {}

    def strategies(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray:
        return self.call(node, rule, choices).total

    def call(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> Times:
        """What is behind `strategies`: forward, backward, and collectives of the operator."""
        # Every block of a model asks for the same calls again.
        types = tuple(map(type_of, (*node.operands, *node.results)))
        key = (node.op, rule, types, tuple(choices))
        if key not in self._calls:
            self._calls[key] = call_times(node, rule, choices, self.mesh, self.device)
        return self._calls[key]

    def parameter(self, value: Value, layouts: Sequence[Layout]) -> np.ndarray:
        return parameter_times(value, layouts, self.mesh, self.device)

    def reshard(
        self, src: Sequence[Layout], dst: Sequence[Layout], value: Value, grad: bool
    ) -> np.ndarray:
        return self._reshards.matrix(src, dst, value.shape, value.dtype.itemsize, grad)

    def fetch(
        self,
        src: Sequence[Layout],
        dst: Sequence[Layout],
        value: Value,
        grad: bool,
        itemsize: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """As `reshard` for the first one of a parameter, which travels in a bucket; and how much
        of it are collectives that bring its gradient back, None for nothing.

        itemsize:
            bytes per element in which they do (default: those of the value)
        """
        own = value.dtype.itemsize
        costs, sent = self._reshards.fetch(src, dst, value.shape, own, grad)
        if sent is None or itemsize in (None, own):
            return costs, sent
        assert itemsize is not None
        _, sums = self._reshards.fetch(src, dst, value.shape, itemsize, grad)
        assert sums is not None
        return costs - sent + sums, sums

    def covering(self, node: Node, rule: Rule, choices: Sequence[Strategy]) -> np.ndarray | None:
        """How many seconds of such collectives the backward of a call covers; None for none."""
        if not self.device.overlap:
            return None
        return self.device.overlap * self.call(node, rule, choices).backward

    def last_bucket(self) -> float:
        """Bytes of gradients that are on their way when the backward pass is over."""
        return bucket_size(self.device, self.mesh, "all_reduce", self.mesh.names).enough(0)

    def steps(
        self, src: Layout, dst: Layout, value: Value, grad: bool, fetched: bool
    ) -> tuple[Step, ...]:
        """The collectives behind one entry of `reshard`, or of `fetch`."""
        return plan_reshard(
            src, dst, value.shape, self.mesh, self.device, grad=grad, fetched=fetched
        )
