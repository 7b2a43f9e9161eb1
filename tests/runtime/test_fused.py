"""A bucket does what its steps do one by one: values, gradients, and in every way to ask for them.

The graphs are in text form; `fuse` puts their parameters into buckets, and both graphs run on
every rank of a mesh with the same pieces and the same gradients coming in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.passes.assignment import Assignment
from autopar.passes.communication import collectives_of
from autopar.passes.device import device_for
from autopar.passes.fuse import fuse
from autopar.runtime.counting import count_communication
from autopar.runtime.emit import emit
from autopar.runtime.groups import current
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.pieces import piece

SUMS = """
mesh a=2 b=2
%p : f64[4, 6] grad = param "p"
%q : f64[5] grad = param "q"
%r : f64[3, 2@b] grad = param "r"
%p_1 : f64[4, 6] grad rep(a) = autopar.to_replicate(%p, ("a",))
%q_1 : f64[5] grad rep(a) = autopar.to_replicate(%q, ("a",))
%r_1 : f64[3, 2@b] grad rep(a) = autopar.to_replicate(%r, ("a",))
return %p_1, %q_1, %r_1
"""

GATHERS = """
mesh a=2 b=2
%p : f64[4@a, 6] grad = param "p"
%q : f64[2, 4, 6@a] grad = param "q"
%r : f64[4@b+a] grad = param "r"
%p_1 : f64[4, 6] grad rep(a) = autopar.all_gather(%p, ("a",), 0, "R")
%q_1 : f64[2, 4, 6] grad rep(a) = autopar.all_gather(%q, ("a",), 2, "R")
%r_1 : f64[4@b] grad rep(a) = autopar.all_gather(%r, ("a",), 0, "R")
return %p_1, %q_1, %r_1
"""

COPIES = """
mesh a=2 b=2
%p : f64[4@a, 6] grad = param "p"
%q : f64[2, 6@a] grad = param "q"
%p_1 : f64[4, 6] grad = autopar.all_gather(%p, ("a",), 0, "I")
%q_1 : f64[2, 6] grad = autopar.all_gather(%q, ("a",), 1, "I")
return %p_1, %q_1
"""

CHAINS = """
mesh a=2 b=2
%p : f64[4@b, 6] grad = param "p"
%q : f64[2, 6@b] grad = param "q"
%p_1 : f64[4@b, 6] grad rep(a) = autopar.to_replicate(%p, ("a",))
%p_2 : f64[4, 6] grad rep(a, b) = autopar.all_gather(%p_1, ("b",), 0, "R")
%q_1 : f64[2, 6@b] grad rep(a) = autopar.to_replicate(%q, ("a",))
%q_2 : f64[2, 6] grad rep(a, b) = autopar.all_gather(%q_1, ("b",), 1, "R")
return %p_2, %q_2
"""

ONE_GROUP = """
mesh a=2 b=2
%p : f64[4@a+b, 6] grad = param "p"
%q : f64[8@a+b] grad = param "q"
%p_1 : f64[4, 6] grad rep(a, b) = autopar.all_gather(%p, ("a", "b"), 0, "R")
%q_1 : f64[8] grad rep(a, b) = autopar.all_gather(%q, ("a", "b"), 0, "R")
return %p_1, %q_1
"""

UNEVEN = """
mesh a=4
%p : f64[5@a, 3] grad = param "p"
%q : f64[2, 7@a] grad = param "q"
%r : f64[8@a] grad = param "r"
%p_1 : f64[5, 3] grad rep(a) = autopar.all_gather(%p, ("a",), 0, "R")
%q_1 : f64[2, 7] grad rep(a) = autopar.all_gather(%q, ("a",), 1, "R")
%r_1 : f64[8] grad rep(a) = autopar.all_gather(%r, ("a",), 0, "R")
return %p_1, %q_1, %r_1
"""

NESTED = """
mesh a=2 b=2
%p : f64[7@a+b, 3] grad = param "p"
%q : f64[2, 5@b] grad = param "q"
%p_1 : f64[7@a, 3] grad rep(b) = autopar.all_gather(%p, ("b",), 0, "R")
%q_1 : f64[2, 5] grad rep(b) = autopar.all_gather(%q, ("b",), 1, "R")
return %p_1, %q_1
"""

GRAPHS = {
    "sums": SUMS,
    "gathers": GATHERS,
    "copies": COPIES,
    "chains": CHAINS,
    "one_group": ONE_GROUP,
    "uneven": UNEVEN,
    "nested": NESTED,
}

#: Forward through a graph (results of the leaves), and the leaves.
Run = Callable[[], Sequence[Tensor]]
Found = list[Tensor | None]


def both(text: str) -> tuple[Graph, Graph]:
    """A graph, and the one with its parameters in one bucket."""
    graph = parse_graph(text.strip() + "\n")
    assert graph.mesh is not None
    fused = fuse(graph, device_for("cpu", graph.mesh))
    assert [node.op for node in fused.calls] == [FUSED]
    return graph, fused


def check(
    text: str, ask: Callable[[Run, list[Tensor]], Found], device_mesh: DeviceMesh | None = None
) -> None:
    """Whatever `ask` finds on the single steps it must find on the bucket, on every rank.

    device_mesh:
        what the bucket's parameters, as DTensors, are on; without it they are plain
    """
    graph, fused = both(text)
    mesh = graph.mesh
    assert mesh is not None

    def on_rank(rank: int) -> None:
        got, want = _asked(fused, mesh, ask, device_mesh), _asked(graph, mesh, ask)
        assert len(got) == len(want)
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            if w is None:
                assert g is None, k
                continue
            assert g is not None, k
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12, msg=lambda m, k=k: f"{k}: {m}")
            assert g.stride() == w.stride()

    run_lockstep(mesh, on_rank)


def _asked(
    graph: Graph,
    mesh: Mesh,
    ask: Callable[[Run, list[Tensor]], Found],
    device_mesh: DeviceMesh | None = None,
) -> Found:
    here = mesh.coordinates(current().rank)
    module = emit(graph, coordinates=here)
    leaves = []
    for k, node in enumerate(graph.sources("param")):
        (value,) = node.results
        assert value.layout is not None
        whole = torch.randn(value.shape, dtype=value.dtype, generator=_generator(k))
        mine = piece(whole, value.layout, mesh, here).clone()
        if device_mesh is not None:
            mine = DTensor.from_local(mine, device_mesh, [Replicate()] * 2, run_check=False)
        leaves.append(mine.requires_grad_())
    return [
        each if each is None else local(each) for each in ask(lambda: module(*leaves)[0], leaves)
    ]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(results: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Gradients that differ from rank to rank, and are not laid out as the results."""
    random = _generator(100 * seed + current().rank)
    return [
        torch.randn(y.shape[::-1], dtype=y.dtype, generator=random).permute(*range(y.dim())[::-1])
        for y in results
    ]


def loss_of(results: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Not linear, so that the second derivative is not zero."""
    results = [local(y) for y in results]
    pairs = zip(results, weights(results, seed), strict=True)
    return sum(((y * y * w).sum() for y, w in pairs), torch.zeros((), dtype=torch.float64))


def grads(leaves: list[Tensor]) -> Found:
    return [leaf.grad for leaf in leaves]


def values(run: Run, leaves: list[Tensor]) -> Found:
    with torch.no_grad():
        plain = list(run())
    return [*run(), *plain]


def backward(run: Run, leaves: list[Tensor]) -> Found:
    loss_of(run()).backward()
    return grads(leaves)


def added_up(run: Run, leaves: list[Tensor]) -> Found:
    """Into gradients that are there already."""
    for seed in range(3):
        loss_of(run(), seed).backward()
    return grads(leaves)


def the_same_graph_twice(run: Run, leaves: list[Tensor]) -> Found:
    loss = loss_of(run())
    loss.backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    loss.backward()
    return [*first, *grads(leaves)]


def two_runs_in_one_backward(run: Run, leaves: list[Tensor]) -> Found:
    (loss_of(run(), 1) + loss_of(run(), 2)).backward()
    return grads(leaves)


def returned(run: Run, leaves: list[Tensor]) -> Found:
    found = list(torch.autograd.grad(loss_of(run()), leaves))
    return [*found, *grads(leaves)]


def of_one_leaf(run: Run, leaves: list[Tensor]) -> Found:
    return [*torch.autograd.grad(loss_of(run()), leaves[1:2]), *grads(leaves)]


def into_one_leaf(run: Run, leaves: list[Tensor]) -> Found:
    loss_of(run()).backward(inputs=leaves[1:2])
    return grads(leaves)


def some_are_not_used(run: Run, leaves: list[Tensor]) -> Found:
    loss_of(run()[:1]).backward()
    return grads(leaves)


def some_are_frozen(run: Run, leaves: list[Tensor]) -> Found:
    leaves[0].requires_grad_(False)
    loss_of(run()).backward()
    return grads(leaves)


def all_are_frozen(run: Run, leaves: list[Tensor]) -> Found:
    for leaf in leaves:
        leaf.requires_grad_(False)
    results = run()
    assert not any(y.requires_grad for y in results)
    return list(results)


def differentiated_twice(run: Run, leaves: list[Tensor]) -> Found:
    once = torch.autograd.grad(loss_of(run()), leaves, create_graph=True)
    return [*once, *torch.autograd.grad(loss_of(once, 1), leaves)]


def backward_that_makes_a_graph(run: Run, leaves: list[Tensor]) -> Found:
    loss_of(run()).backward(create_graph=True)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None  # it would hold on to its own graph
    return found


def seen_by_hooks(run: Run, leaves: list[Tensor]) -> Found:
    """A hook of the tensor, a hook behind the addition, and one of the node that adds."""
    before: Found = []
    behind: Found = []
    calls = []
    leaves[0].register_hook(lambda g: before.append(g.clone()) or g * 2)
    leaves[1].register_post_accumulate_grad_hook(lambda p: behind.append(p.grad.clone()))
    loss_of(run()).backward()
    assert len(before) == len(behind) == 1
    found = [*before, *behind, *(leaf.grad.clone() for leaf in leaves)]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf._backward_hooks = None
    node = leaves[-1].expand_as(leaves[-1]).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda inputs, outputs: calls.append(local(leaves[-1].grad).clone()))  # type: ignore[arg-type]
    loss_of(run(), 5).backward()
    assert torch.equal(calls[-1], local(leaves[-1].grad))  # type: ignore[arg-type]
    return [*found, *grads(leaves)]


def behind_another_operator(run: Run, leaves: list[Tensor]) -> Found:
    """What comes in is computed: its gradient goes on from there."""
    return [*torch.autograd.grad(loss_of([y.tanh() for y in run()]), leaves)]


ASKS = (
    values,
    backward,
    added_up,
    the_same_graph_twice,
    two_runs_in_one_backward,
    returned,
    of_one_leaf,
    into_one_leaf,
    some_are_not_used,
    some_are_frozen,
    all_are_frozen,
    differentiated_twice,
    backward_that_makes_a_graph,
    seen_by_hooks,
    behind_another_operator,
)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
def test_a_bucket_is_its_steps(name: str, ask: Callable[[Run, list[Tensor]], Found]) -> None:
    check(GRAPHS[name], ask)


@pytest.fixture(scope="module")
def device_mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask.__name__)
def test_a_bucket_of_parameters_as_they_are(
    name: str, ask: Callable[[Run, list[Tensor]], Found], device_mesh: DeviceMesh
) -> None:
    """It takes the local tensors of DTensors, whose gradients are DTensors again."""
    check(GRAPHS[name], ask, device_mesh)


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_went_nowhere_share_no_memory(hooked: bool, device_mesh: DeviceMesh) -> None:
    """The way back from a gathered copy cuts what came in, which others hold, too."""
    text = COPIES.replace("[2, 6@a]", "[4@a, 6]").replace("[2, 6]", "[4, 6]")
    _, fused = both(text.replace('("a",), 1, "I"', '("a",), 0, "I"'))
    mesh = fused.mesh
    assert mesh is not None

    def on_rank(rank: int) -> None:
        module = emit(fused)
        p, q = (
            DTensor.from_local(torch.ones(2, 6).double(), device_mesh, [Replicate()] * 2)
            .detach()
            .requires_grad_()
            for _ in range(2)
        )
        if hooked:
            p.register_hook(lambda grad: None)
        p_1, q_1 = module(p, q)[0]
        (p_1 + q_1).backward(torch.ones(4, 6).double())
        assert isinstance(p.grad, DTensor) and isinstance(q.grad, DTensor)
        p.grad._local_tensor.zero_()
        assert torch.equal(q.grad._local_tensor, torch.ones(2, 6).double())

    run_lockstep(mesh, on_rank)


def test_members_that_are_not_leaves() -> None:
    """A parameter that is computed (a parametrisation) gets its gradient through the graph."""
    _, fused = both(SUMS)
    mesh = fused.mesh
    assert mesh is not None

    def on_rank(rank: int) -> None:
        module = emit(fused)
        base = torch.randn(4, 6, dtype=torch.float64, generator=_generator(0)).requires_grad_()
        q, r = (torch.ones(s, dtype=torch.float64, requires_grad=True) for s in ((5,), (3, 1)))
        p_1, _, _ = module(base.exp(), q, r)[0]
        (p_1 * (rank + 1)).sum().backward()
        total = sum(mesh.group(rank, ("a",))) + 2
        torch.testing.assert_close(base.grad, base.exp() * total)

    run_lockstep(mesh, on_rank)


def test_gradients_are_parts_of_the_buffer_that_was_sent() -> None:
    """Nothing is copied out of it, and a gradient that is there already stays in its place."""
    _, fused = both(SUMS)
    mesh = fused.mesh
    assert mesh is not None

    def on_rank(rank: int) -> None:
        module = emit(fused)
        shapes = ((4, 6), (5,), (3, 1))
        leaves = [torch.ones(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        loss_of(module(*leaves)[0]).backward()
        storages = {leaf.grad.untyped_storage().data_ptr() for leaf in leaves}
        assert len(storages) == 1
        before = [leaf.grad for leaf in leaves]
        loss_of(module(*leaves)[0]).backward()
        assert all(leaf.grad is b for leaf, b in zip(leaves, before, strict=True))

    run_lockstep(mesh, on_rank)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("sums", [], [("all_reduce", ("a",), 8 * (24 + 5 + 3))]),
        ("copies", [("all_gather", ("a",), 8 * 36)], []),
        (
            "gathers",
            [("all_gather", ("a",), 8 * (24 + 48 + 2))],
            [("reduce_scatter", ("a",), 8 * (24 + 48 + 2))],
        ),
        (
            "chains",
            [("all_gather", ("b",), 8 * 36)],
            [("reduce_scatter", ("b",), 8 * 36), ("all_reduce", ("a",), 8 * 18)],
        ),
        (
            "uneven",  # pieces are as large as the largest while they travel
            [("all_gather", ("a",), 8 * (8 * 3 + 2 * 8 + 8))],
            [("reduce_scatter", ("a",), 8 * (8 * 3 + 2 * 8 + 8))],
        ),
    ],
)
def test_one_collective_per_step(name: str, forward: list, backward: list) -> None:
    _, graph = both(GRAPHS[name])
    mesh = graph.mesh
    assert mesh is not None
    planned = collectives_of(graph, {}, Assignment(mesh, {}, {}, {}, ()))
    for found, is_backward in ((forward, False), (backward, True)):
        mine = [(c.kind, c.axes, c.nbytes) for c in planned if c.backward == is_backward]
        assert sorted(mine) == sorted(found), "what is planned"
    results: list[list] = []

    def ask(run: Run, leaves: list[Tensor]) -> Found:
        with count_communication(current().rank) as counted:
            made = run()
        with count_communication(current().rank) as counted_back:
            loss_of(made).backward()
        results.append([counted.sent, counted_back.sent])
        return []

    run_lockstep(mesh, lambda rank: _asked(graph, mesh, ask))
    assert results == [[forward, backward]] * mesh.size
