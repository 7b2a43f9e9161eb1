"""Shortest reshards: valid step by step, right forward and backward, never dearer than need be."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import numpy as np
import pytest

import reshard_interpreter as interpreter
from autopar.ir import cut
from autopar.ir.errors import LayoutError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.steps import step_layout
from autopar.passes.device import device_for
from autopar.passes.reshard.cost import REFERENCE_BYTES
from autopar.passes.reshard.path import Step, plan_reshard, step_node_args
from autopar.passes.reshard.price import step_times
from autopar.passes.reshard.steps import Cuts, layouts, steps_from

make = Layout.make

#: Mesh, and shapes of rank 1 to 3: some sizes divide by every axis, some by one only, some by none.
CASES = [
    ({"a": 2, "b": 3}, [(12,), (6, 4), (5, 6), (6, 2, 3), (7, 11)]),
    ({"a": 2, "b": 4, "c": 2}, [(16,), (16, 8), (2, 16), (4, 4, 16), (3, 16, 1), (15, 8)]),
]


def is_offered(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    cuts = zip(shape, map(mesh.sizes_of, layout.dims), strict=True)
    return all(cut.is_offered(size, counts) for size, counts in cuts)


def sampled_pairs(count: int) -> list[tuple[Mesh, tuple[int, ...], Layout, Layout]]:
    rng = random.Random(0)
    pairs = []
    for sizes, shapes in CASES:
        mesh = Mesh.of(sizes)
        for shape in shapes:
            usable = [x for x in layouts(mesh, len(shape)) if is_offered(x, shape, mesh)]
            pairs += [(mesh, shape, rng.choice(usable), rng.choice(usable)) for _ in range(count)]
    return pairs


def total(
    steps: tuple[Step, ...],
    nbytes: float,
    mesh: Mesh,
    device: str,
    shape: tuple[int, ...],
    grad: bool = True,
) -> float:
    model = device_for(device, mesh)
    return sum(sum(step_times(s, nbytes, mesh, model, grad=grad, shape=shape)) for s in steps)


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("grad", [True, False])
def test_every_step_is_one_the_layout_before_it_allows(device: str, grad: bool) -> None:
    for mesh, shape, src, dst in sampled_pairs(40):
        steps = plan_reshard(src, dst, shape, mesh, device_for(device, mesh), grad=grad)
        at = src if grad else src.without_gradient()
        for step in steps:
            assert step.before == at
            assert step in set(steps_from(at, mesh))
            assert is_offered(step.after, shape, mesh)
            assert grad or not step.after.replicate
            at = step.after
        assert at == (dst if grad else dst.without_gradient())


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_value_and_gradient_are_the_same_tensors_after_a_reshard(device: str) -> None:
    rng = np.random.default_rng(0)
    for mesh, shape, src, dst in sampled_pairs(40):
        steps = plan_reshard(src, dst, shape, mesh, device_for(device, mesh), grad=True)
        value, gradient = rng.integers(-99, 99, (2, *shape))
        pieces = interpreter.scatter(value, src, mesh, rng)
        for step in steps:
            pieces = interpreter.forward(step, pieces, mesh)
        np.testing.assert_array_equal(interpreter.gather(pieces, dst, mesh), value)

        pieces = interpreter.scatter(gradient, interpreter.dual(dst), mesh, rng)
        for step in reversed(steps):
            pieces = interpreter.backward(step, pieces, mesh)
        back = interpreter.gather(pieces, interpreter.dual(src), mesh)
        np.testing.assert_array_equal(back, gradient)


def test_every_single_step_keeps_value_and_gradient() -> None:
    mesh, shape = Mesh.of({"a": 2, "b": 3}), (6, 12)
    rng = np.random.default_rng(0)
    seen = set()
    for layout in layouts(mesh, 2):
        for step in steps_from(layout, mesh):
            value = rng.integers(-99, 99, shape)
            pieces = interpreter.scatter(value, step.before, mesh, rng)
            pieces = interpreter.forward(step, pieces, mesh)
            np.testing.assert_array_equal(interpreter.gather(pieces, step.after, mesh), value)
            pieces = interpreter.scatter(value, interpreter.dual(step.after), mesh, rng)
            pieces = interpreter.backward(step, pieces, mesh)
            back = interpreter.gather(pieces, interpreter.dual(step.before), mesh)
            np.testing.assert_array_equal(back, value)
            seen.add(step.kind)
    assert len(seen) == 9


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_no_sequence_of_steps_is_cheaper(device: str) -> None:
    mesh, shape = Mesh.of({"a": 2, "b": 4}), (64, 16, 64)
    model = device_for(device, mesh)
    graph = nx.DiGraph()
    for layout in layouts(mesh, 3):
        for step in steps_from(layout, mesh):
            if step.before.divides(shape, mesh) and step.after.divides(shape, mesh):
                seconds = sum(step_times(step, REFERENCE_BYTES[0], mesh, model, grad=True))
                graph.add_edge(step.before, step.after, weight=seconds)
    rng = random.Random(1)
    for src in rng.sample(list(graph), 15):
        best = nx.single_source_dijkstra_path_length(graph, src)
        for dst in graph:
            steps = plan_reshard(src, dst, shape, mesh, model, grad=True)
            found = total(steps, REFERENCE_BYTES[0], mesh, device, shape)
            # A nanosecond per step decides between equally fast sequences.
            assert found <= best[dst] + 1e-9 * max(1, len(steps)) + 1e-12


def test_never_dearer_than_gathering_the_whole_tensor_and_slicing_it() -> None:
    for mesh, shape, src, dst in sampled_pairs(30):
        device = device_for("h100", mesh)
        whole = Layout.whole(len(shape))
        direct = plan_reshard(src, dst, shape, mesh, device, grad=True)
        detour = plan_reshard(src, whole, shape, mesh, device, grad=True) + plan_reshard(
            whole, dst, shape, mesh, device, grad=True
        )
        nbytes = REFERENCE_BYTES[0]
        slack = 1e-9 * (len(direct) + len(detour))
        paid = [total(steps, nbytes, mesh, "h100", shape) for steps in (direct, detour)]
        assert paid[0] <= paid[1] + slack


#: On one axis and a large tensor each pair of states is one step, the one the table names.
ONE_STEP = {
    ("I", "R"): "to_replicate",
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    (0, "R"): "all_gather",
    (0, "I"): "all_gather",
    ("I", 0): "slice",
    ("R", 0): "slice",
    ("P", 0): "reduce_scatter",
    (0, 1): "all_to_all",
    (0, "P"): "pad",
    ("I", "P"): "mask",
    ("R", "P"): "mask",
    ("R", "I"): "to_invariant",
}


@pytest.mark.parametrize(("src", "dst"), ONE_STEP)
def test_each_pair_of_states_is_one_step(src: int | str, dst: int | str) -> None:
    mesh = Mesh.of({"tp": 8})
    whole = Layout.whole(2)
    start, end = whole.with_state("tp", src), whole.with_state("tp", dst)
    steps = plan_reshard(start, end, (4096, 4096), mesh, device_for("h100", mesh), grad=True)
    assert [s.kind for s in steps] == [ONE_STEP[src, dst]]


def test_the_same_layout_takes_no_step() -> None:
    mesh = Mesh.of({"a": 2, "b": 2})
    device = device_for("h100", mesh)
    for layout in layouts(mesh, 2):
        assert plan_reshard(layout, layout, (4, 4), mesh, device, grad=True) == ()


def test_without_gradient_replicate_and_invariant_are_the_same() -> None:
    mesh = Mesh.of({"a": 2})
    device = device_for("h100", mesh)
    rep = make([[]], replicate=["a"])
    assert plan_reshard(Layout.whole(1), rep, (4,), mesh, device, grad=False) == ()
    (step,) = plan_reshard(make([["a"]]), rep, (4,), mesh, device, grad=False)
    assert (step.kind, step.state, step.after) == ("all_gather", "I", Layout.whole(1))


def test_dimensions_with_too_few_elements_are_not_split_on_the_way() -> None:
    # Swapping the order of two axes goes through another dimension where all ranks get a piece.
    mesh = Mesh.of({"a": 4, "b": 4})
    device = device_for("h100", mesh)
    src, dst = make([["a", "b"], []]), make([["b", "a"], []])
    for size in (4096, 4095):
        through = plan_reshard(src, dst, (4096, size), mesh, device, grad=True)
        assert any(s.after.dims[1] for s in through)
    around = plan_reshard(src, dst, (4096 * 1024, 2), mesh, device, grad=True)
    assert around and not any(s.after.dims[1] for s in around)


@pytest.mark.parametrize("side", [0, 1])
def test_ends_with_empty_pieces_are_reached(side: int) -> None:
    mesh = Mesh.of({"a": 4})
    ends = [Layout.whole(1), Layout.whole(1)]
    ends[side] = make([["a"]])
    (step,) = plan_reshard(*ends, (5,), mesh, device_for("h100", mesh), grad=True)
    assert step.kind == ("all_gather", "slice")[side]


def test_a_cut_in_other_units_is_an_exchange_of_what_differs() -> None:
    mesh = Mesh.of({"tp": 2})
    src, dst = make([["tp"], []]), make([["tp"], []], units=[64, 1])
    (step,) = plan_reshard(src, dst, (1600, 4096), mesh, device_for("h100", mesh), grad=True)
    assert str(step) == "recut[tp] dim 0 in units of 64"


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_reshards_between_units_keep_value_and_gradient(device: str) -> None:
    rng, draw = np.random.default_rng(0), random.Random(0)
    for sizes in ({"a": 2}, {"a": 3, "b": 2}):
        mesh, shape = Mesh.of(sizes), (15, 8, 4)
        cuts = Cuts(shape, ((1, 3), (1, 2), (1,)))
        every = list(layouts(mesh, 3, cuts))
        assert any(x.units for x in every)
        for _ in range(60):
            src, dst = draw.choice(every), draw.choice(every)
            steps = plan_reshard(src, dst, shape, mesh, device_for(device, mesh), grad=True)
            value = rng.integers(-99, 99, shape)
            pieces = interpreter.scatter(value, src, mesh, rng)
            for step in steps:
                pieces = interpreter.forward(step, pieces, mesh)
                axes, *rest = step_node_args(step)
                found = step_layout(step.op, step.before, axes, *rest, shape=shape, mesh=mesh)
                assert found == step.after
            np.testing.assert_array_equal(interpreter.gather(pieces, dst, mesh), value)
            pieces = interpreter.scatter(value, interpreter.dual(dst), mesh, rng)
            for step in reversed(steps):
                pieces = interpreter.backward(step, pieces, mesh)
            back = interpreter.gather(pieces, interpreter.dual(src), mesh)
            np.testing.assert_array_equal(back, value)


def test_refuses_a_layout_of_another_rank() -> None:
    mesh = Mesh.of({"a": 4})
    with pytest.raises(LayoutError, match=r"it has 1 dimensions, the tensor \(4, 4\) has 2"):
        plan_reshard(
            make([["a"]]), Layout.whole(1), (4, 4), mesh, device_for("h100", mesh), grad=True
        )


def test_arguments_of_the_ir_nodes_follow_the_operators() -> None:
    mesh = Mesh.of({"a": 2, "b": 2})
    found = {}
    for layout in layouts(mesh, 2):
        for step in steps_from(layout, mesh):
            found.setdefault((step.op, step.state), step_node_args(step))
    shape_of = {key: tuple(type(a) for a in args) for key, args in found.items()}
    assert shape_of == {
        ("autopar.all_reduce", "I"): (tuple, str),
        ("autopar.all_reduce", "R"): (tuple, str),
        ("autopar.all_gather", "I"): (tuple, int, str),
        ("autopar.all_gather", "R"): (tuple, int, str),
        ("autopar.reduce_scatter", None): (tuple, int),
        ("autopar.all_to_all", None): (tuple, int, int),
        ("autopar.slice", "I"): (tuple, int, str),
        ("autopar.slice", "R"): (tuple, int, str),
        ("autopar.pad", None): (tuple, int),
        ("autopar.mask", "I"): (tuple, str),
        ("autopar.mask", "R"): (tuple, str),
        ("autopar.to_replicate", None): (tuple,),
        ("autopar.to_invariant", None): (tuple,),
    }


def test_all_layouts_are_listed_once() -> None:
    mesh = Mesh.of({"a": 2, "b": 2})
    listed = list(layouts(mesh, 3))
    # Six states for each axis, and a second order where both split the same dimension.
    assert len(listed) == len(set(listed)) == 6 * 6 + 3
    states = {(x.state("a"), x.state("b")) for x in listed}
    assert states == set(itertools.product([0, 1, 2, "I", "R", "P"], repeat=2))
