"""Cost matrices: the same prices as the steps that are emitted."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.ir.errors import LayoutError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.collective_cost import collective_time
from autopar.passes.device import device_for
from autopar.passes.reshard.cost import ReshardCosts
from autopar.passes.reshard.path import plan_reshard
from autopar.passes.reshard.price import step_times
from autopar.passes.reshard.steps import Step, layouts, steps_from

MB = 2**20

CASES = [
    ({"dp": 2, "tp": 4}, (64, 128, 32)),
    ({"dp": 2, "tp": 4}, (6, 1, 4096)),
    ({"dp": 2, "tp": 4}, ()),
    ({"a": 2, "b": 4, "c": 2}, (1024, 4096)),
    ({"a": 2, "b": 4, "c": 2}, (3, 16)),
    ({"dp": 2, "tp": 4}, (50257, 48)),
    ({"dp": 2, "tp": 4}, (7, 1025, 33)),
]


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("sizes", "shape"), CASES)
def test_an_entry_is_the_sum_of_the_steps_that_are_emitted(
    sizes: dict[str, int], shape: tuple[int, ...], grad: bool, device: str
) -> None:
    mesh = Mesh.of(sizes)
    model = device_for(device, mesh)
    usable = [x for x in layouts(mesh, len(shape)) if x.divides(shape, mesh)]
    rng = random.Random(0)
    src, dst = rng.sample(usable, min(8, len(usable))), rng.sample(usable, min(8, len(usable)))
    matrix = ReshardCosts(mesh, model).matrix(src, dst, shape, 2, grad)
    assert matrix.shape == (len(src), len(dst))
    nbytes = 2 * int(np.prod(shape))
    for i, a in enumerate(src):
        for j, b in enumerate(dst):
            steps = plan_reshard(a, b, shape, mesh, model, grad=grad)
            paid = sum(
                sum(step_times(s, nbytes, mesh, model, grad=grad, shape=shape)) for s in steps
            )
            assert matrix[i, j] == pytest.approx(paid, rel=1e-9, abs=0)


def test_rows_do_not_depend_on_what_was_asked_before() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 2})
    # Another launch cost makes a device of its own, with tables that no other test has filled.
    device = device_for("a100", mesh)
    every = list(layouts(mesh, 2))
    costs = ReshardCosts(mesh, device)
    one_by_one = np.concatenate([costs.matrix([x], every, (64, 32), 4, True) for x in every])
    costs.matrix(every, every, (64, 32), 4, True)
    again = np.concatenate([costs.matrix([x], every, (64, 32), 4, True) for x in every[::-1]])
    np.testing.assert_array_equal(one_by_one, again[::-1])
    assert not np.diag(one_by_one).any()
    assert (one_by_one + np.eye(len(every)) > 0).all()


def test_uneven_pieces_are_paid_for_at_the_size_of_the_largest() -> None:
    mesh = Mesh.of({"dp": 4})
    device = device_for("h100", mesh)
    split, whole = Layout.make([["dp"]]), Layout.whole(1)
    costs = ReshardCosts(mesh, device)

    def gather(size: int) -> float:
        return costs.matrix([split], [whole], (size,), 4, False)[0, 0]

    # Five pieces of 1 MB over four ranks are gathered as four of 2 MB, the last ones padding.
    assert gather(5 * MB // 4) == pytest.approx(gather(5 * MB // 4 + 4), rel=1e-3)
    assert gather(5) == pytest.approx(gather(8), rel=1e-12)
    assert gather(5) > gather(4)


def test_a_cut_in_units_costs_no_less_than_an_even_one() -> None:
    mesh = Mesh.of({"tp": 2})
    costs = ReshardCosts(mesh, device_for("h100", mesh))
    even, heads = Layout.make([["tp"]]), Layout.make([["tp"]], units=[2**22])
    whole = Layout.whole(1)
    matrix = costs.matrix([even, heads], [even, heads, whole], (25 * 2**22,), 4, False)
    assert matrix[0, 0] == matrix[1, 1] == 0
    # Half a head moves instead of all the heads.
    assert 0 < matrix[0, 1] < matrix[0, 2] < matrix[1, 2]


def test_refuses_a_layout_of_another_rank() -> None:
    mesh = Mesh.of({"dp": 2})
    costs = ReshardCosts(mesh, device_for("h100", mesh))
    with pytest.raises(LayoutError, match="not a layout of a tensor of this rank on this mesh"):
        costs.matrix([Layout.whole(2)], [Layout.whole(1)], (4,), 4, True)


def one_step(kind: str, state: str | None = None) -> Step:
    mesh = Mesh.of({"tp": 8})
    for layout in layouts(mesh, 2):
        for step in steps_from(layout, mesh):
            if (step.kind, step.state) == (kind, state):
                return step
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "state", "forward", "backward"),
    [
        ("all_reduce", "I", "all_reduce", None),
        ("all_reduce", "R", "all_reduce", "all_reduce"),
        ("all_gather", "I", "all_gather", "local"),
        ("all_gather", "R", "all_gather", "reduce_scatter"),
        ("reduce_scatter", None, "reduce_scatter", "all_gather"),
        ("all_to_all", None, "all_to_all", "all_to_all"),
        ("slice", "I", "local", "all_gather"),
        ("slice", "R", "local", "local"),
        ("pad", None, "local", "local"),
        ("mask", "I", "local", None),
        ("mask", "R", "local", "local"),
        ("to_replicate", None, None, "all_reduce"),
        ("to_invariant", None, None, "local"),
    ],
)
def test_a_step_costs_what_the_table_of_states_says(
    kind: str, state: str | None, forward: str | None, backward: str | None
) -> None:
    mesh = Mesh.of({"tp": 8})
    device = device_for("h100", mesh)
    paid = step_times(one_step(kind, state), MB, mesh, device, grad=True)
    for seconds, what in zip(paid, (forward, backward), strict=True):
        if what is None:
            assert seconds == 0
        elif what == "local":
            traffic = 2 * MB / device.memory_bandwidth
            assert device.launch < seconds <= device.launch + traffic
        else:
            alone = collective_time(device, mesh, what, ("tp",), MB)
            assert seconds == pytest.approx(device.launch + alone)
    assert step_times(one_step(kind, state), MB, mesh, device, grad=False) == (paid[0], 0.0)


def test_only_the_local_part_along_other_axes_is_moved() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 2})
    device = device_for("h100", mesh)
    src, dst = Layout.make([["dp"], ["tp"]]), Layout.make([["dp"], []])
    (step,) = plan_reshard(src, dst, (64, 64), mesh, device, grad=False)
    forward, _ = step_times(step, 8 * MB, mesh, device, grad=False)
    alone = collective_time(device, mesh, "all_gather", ("tp",), 2 * MB)
    assert forward == pytest.approx(device.launch + alone)


def test_a_slow_reduce_scatter_is_avoided() -> None:
    # gloo's own takes twice as long as its all-reduce: a slice after that one beats it.
    mesh = Mesh.of({"dp": 2})
    src, dst = Layout.make([[], []], partial=["dp"]), Layout.make([["dp"], []])
    shape = (2048, 2048)
    cpu = device_for("cpu", mesh)
    (link, _), slow = cpu.links, 14.8 / 3.8
    collectives = tuple(
        (kind, tuple(replace(m, bandwidth=m.bandwidth / slow) for m in measures))
        if kind == "reduce_scatter"
        else (kind, measures)
        for kind, measures in link.collectives
    )
    links = tuple(replace(each, collectives=collectives) for each in cpu.links)
    devices = {"own": replace(cpu, links=links), "exchange": cpu, "h100": device_for("h100", mesh)}
    kinds = {
        name: [s.kind for s in plan_reshard(src, dst, shape, mesh, device, grad=False)]
        for name, device in devices.items()
    }
    assert kinds == {
        "own": ["all_reduce", "slice"],
        "exchange": ["reduce_scatter"],
        "h100": ["reduce_scatter"],
    }


def test_a_large_gradient_sum_goes_the_hierarchical_way_between_hosts() -> None:
    # One host's ranks share the network traffic instead of each sending the whole tensor.
    mesh = Mesh.of({"dp": 4, "tp": 8})
    device = device_for("h100", mesh)
    src, dst = Layout.make([[], []], partial=["dp", "tp"]), Layout.whole(2)
    large = plan_reshard(src, dst, (8192, 8192), mesh, device, grad=True)
    assert [(s.kind, s.axes) for s in large] == [
        ("reduce_scatter", ("tp",)),
        ("all_reduce", ("dp",)),
        ("all_gather", ("tp",)),
    ]
    small = plan_reshard(src, dst, (64, 64), mesh, device, grad=True)
    assert [(s.kind, s.axes) for s in small] == [("all_reduce", ("dp", "tp"))]


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_what_a_bucket_cuts_or_pads_costs_no_collective(device: str) -> None:
    """A parameter on its way into the graph: only what is sent is priced as sent."""
    mesh, shape = Mesh.of({"a": 2, "b": 2}), (8192, 8192)
    prices = ReshardCosts(mesh, device_for(device, mesh))
    stored = Layout(dims=(("a",), ()))
    read = Layout(dims=((), ()), partial=("a",))
    costs, sent = prices.fetch([stored], [read], shape, 4, True)
    gather, _ = prices.fetch([stored], [Layout.whole(2)], shape, 4, True)
    assert sent is None
    assert 0 <= costs[0, 0] < 0.5 * gather[0, 0]
