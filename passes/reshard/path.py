"""The cheapest sequence of collectives from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.errors import LayoutError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.device import Device
from autopar.passes.reshard.cost import path_table
from autopar.passes.reshard.steps import Step, step_node_args

__all__ = ["Step", "plan_reshard", "step_node_args"]


def plan_reshard(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    mesh: Mesh,
    device: Device,
    *,
    grad: bool,
    fetched: bool = False,
) -> tuple[Step, ...]:
    """The steps that take a tensor from `src` to `dst`, forward and backward together cheapest.

    shape:
        the whole tensor's
    grad:
        whether a gradient flows back; without one R is the same as I and backward costs nothing
    fetched:
        whether it is a parameter that comes into the graph, in a bucket with others

    Of equally fast sequences the one of fewer steps is taken, then a fixed order decides.
    Raises LayoutError where `src` or `dst` does not fit the shape or the mesh.
    """
    for layout in (src, dst):
        layout.check(shape)
    if not grad:
        src, dst = src.without_gradient(), dst.without_gradient()
    if src == dst:
        return ()
    table = path_table(shape, mesh, device, grad=grad, between=(src, dst), fetched=fetched)
    source, target = table.ids((src, dst))
    path = table.path(int(source), int(target))
    if path is None:
        raise LayoutError(f"no reshard from {src} to {dst} for a tensor of shape {tuple(shape)}")
    return path
