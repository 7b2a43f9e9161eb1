"""Every reshard step on pieces of different sizes, nested and in units, forward and backward."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from autopar.ir.graph import Node, Value
from autopar.ir.local import rank_call
from autopar.ir.mesh import Mesh
from autopar.passes.reshard.steps import Cuts, Step, layouts, step_node_args, steps_from
from autopar.runtime.groups import current
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.operators import resolve
from harness import dual, gather, scatter

#: Sizes that divide on none of these meshes; of 3 and 5 some pieces are empty.
CASES = [
    ({"a": 2}, Cuts((7, 5), ((1,), (1,)))),
    ({"a": 3}, Cuts((15, 4), ((1, 3), (1,)))),
    ({"a": 4}, Cuts((7, 5), ((1,), (1,)))),
    ({"a": 2, "b": 2}, Cuts((7, 3), ((1,), (1,)))),
    ({"a": 2, "b": 2}, Cuts((15, 6), ((1, 3), (1, 2)))),
    ({"a": 3, "b": 2}, Cuts((14, 5), ((1, 2), (1,)))),
]

#: How many steps of a case are tried at most.
MOST = 300


def uneven_steps(mesh: Mesh, cuts: Cuts) -> list[Step]:
    every = list(layouts(mesh, len(cuts.shape), cuts))
    found = [step for layout in every for step in steps_from(layout, mesh, cuts)]
    uneven = [
        step
        for step in found
        if not step.before.divides(cuts.shape, mesh) or not step.after.divides(cuts.shape, mesh)
    ]
    # Every one of them where they are few, else some, the same in each run.
    return uneven if len(uneven) <= MOST else random.Random(0).sample(uneven, MOST)


def node_of(step: Step, shape: tuple[int, ...]) -> Node:
    x = Value("x", shape, torch.float64, True, step.before)
    y = Value("y", shape, torch.float64, True, step.after)
    return Node(step.op, (x, *step_node_args(step)), {}, (y,))


@pytest.mark.parametrize(("sizes", "cuts"), CASES, ids=str)
def test_value_and_gradients_are_whole(sizes: dict[str, int], cuts: Cuts) -> None:
    mesh, steps = Mesh.of(sizes), uneven_steps(Mesh.of(sizes), cuts)
    generator = torch.Generator().manual_seed(0)
    value, cotangent = torch.randn(2, *cuts.shape, generator=generator, dtype=torch.float64)
    held = [
        (
            scatter(value, step.before, mesh, generator),
            scatter(cotangent, dual(step.after), mesh, generator),
            scatter(value, step.before, mesh, generator),
        )
        for step in steps
    ]

    def on_rank(rank: int) -> list[tuple[Tensor, ...]]:
        here = current().coordinates
        at, results = tuple(here.values()), []
        for step, (xs, gs, hs) in zip(steps, held, strict=True):
            call = rank_call(node_of(step, cuts.shape), mesh, here)
            x, g = xs[at].clone().requires_grad_(), gs[at].clone().requires_grad_()
            y = resolve(call.op)(x, *call.args[1:], **call.kwargs)
            (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
            (again,) = torch.autograd.grad(grad, g, hs[at])
            results.append((y.detach(), grad.detach(), again))
        return results

    ranks = run_lockstep(mesh, on_rank)
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    for k, step in enumerate(steps):
        for i, (layout, want) in enumerate(
            ((step.after, value), (dual(step.before), cotangent), (step.after, value))
        ):
            pieces = {at: results[k][i] for at, results in zip(places, ranks, strict=True)}
            whole = gather(pieces, layout, mesh, str(step))
            torch.testing.assert_close(whole, want, msg=lambda m, s=step: f"{s}: {m}")


def test_every_kind_of_step_is_tried() -> None:
    kinds = {step.kind for sizes, cuts in CASES for step in uneven_steps(Mesh.of(sizes), cuts)}
    assert len(kinds) == 10
