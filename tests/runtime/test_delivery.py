"""When buckets start and when they are waited for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.runtime import lockstep
from autopar.runtime.delivery import _deliveries
from autopar.runtime.emit import emit
from autopar.runtime.groups import current
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.pieces import piece

MESH = Mesh.of({"a": 2})
LAYERS = 3

#: Three layers, each with a bucket of its own.
SUMMED = """
%w{k} : f64[4, 4] grad = param "w{k}"
%w{k}_1 : f64[4, 4] grad rep(a) = autopar.fused((%w{k},), (("autopar.to_replicate", ("a",), ((),)),))
%h{k} : f64[2@a, 4] grad = aten.linear.default(%h{before}, %w{k}_1)
"""  # noqa: E501
GATHERED = """
%w{k} : f64[4@a, 4] grad = param "w{k}"
%w{k}_1 : f64[4, 4] grad rep(a) = autopar.fused((%w{k},), (("autopar.all_gather", ("a",), ((0, "R"),)),))
%h{k} : f64[2@a, 4] grad = aten.linear.default(%h{before}, %w{k}_1)
"""  # noqa: E501


def layers(text: str, mesh: str = "a=2") -> Graph:
    body = "".join(text.format(k=k, before=k - 1) for k in range(1, LAYERS + 1))
    lines = [f"mesh {mesh}", '%h0 : f64[2@a, 4] = input "x"', *body.split("\n")]
    sources = [line for line in lines if " = param " in line]
    calls = [line for line in lines if line and line not in sources]
    return parse_graph("\n".join([*calls[:2], *sources, *calls[2:], f"return %h{LAYERS}"]) + "\n")


def events(graph: Graph, monkeypatch: pytest.MonkeyPatch, *, fail: bool = False) -> list[str]:
    """What the first rank does in one step: forward and backward of layers, starts and landings."""
    seen: list[str] = []

    def watched(name: str, kind: str) -> None:
        start = getattr(lockstep._LockstepGroup, name)

        def started(group: Any, x: Tensor) -> Any:
            landing = start(group, x)
            if group.index:
                return landing
            seen.append(f"start {kind}")

            def landed() -> Tensor:
                seen.append(f"land {kind}")
                return landing()

            return landed

        monkeypatch.setattr(lockstep._LockstepGroup, name, started)

    for name, kind in (
        ("_start_all_reduce", "sum"),
        ("_start_all_gather", "gather"),
        ("_start_reduce_scatter", "scatter"),
    ):
        watched(name, kind)

    def on_rank(rank: int) -> None:
        module = emit(graph)
        linear = torch.ops.aten.linear.default
        for k, node in enumerate(n for n in module.graph.nodes if n.target is linear):
            node.target = _marked(f"layer {k + 1}", seen if rank == 0 else [], fail and k == 0)
        module.recompile()
        leaves = [
            piece(torch.ones(v.shape, dtype=v.dtype), v.layout, MESH, MESH.coordinates(rank))
            .clone()
            .requires_grad_(v.grad)
            for v in (node.results[0] for node in graph.nodes if node.is_source)
            if v.layout is not None
        ]
        (y,), _ = module(*leaves)
        if rank == 0:
            seen.append("backward")
        if not fail:
            y.sum().backward()
            return
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        assert all(leaf.grad is None for leaf in leaves)

    run_lockstep(MESH, on_rank)
    return seen


def _marked(name: str, seen: list[str], fail: bool) -> Any:
    """A linear layer that says when it runs; where it is to fail, its backward raises."""

    def back(grad: Tensor) -> None:
        seen.append(f"back {name}")
        if fail:
            raise ZeroDivisionError

    def call(x: Tensor, w: Tensor) -> Tensor:
        seen.append(name)
        y = torch.nn.functional.linear(x, w)
        y.register_hook(back)
        return y

    return call


def test_sums_start_during_the_backward_pass_and_are_waited_for_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert events(layers(SUMMED), monkeypatch) == [
        *(f"layer {k}" for k in (1, 2, 3)),
        "backward",
        *(event for k in (3, 2, 1) for event in (f"back layer {k}", "start sum")),
        *["land sum"] * LAYERS,
    ]


@pytest.mark.parametrize("text", [SUMMED, GATHERED], ids=["summed", "gathered"])
def test_a_gradient_alone_in_its_bucket_is_sent_from_where_it_lies(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = layers(text)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    expected = [x.clone().requires_grad_() for x in whole]
    h = expected[0]
    for w in expected[1:]:
        h = torch.nn.functional.linear(h, w)
    (h * h).sum().backward()

    def no_copies(*args: Any) -> Tensor:
        raise AssertionError("gradients were copied")

    monkeypatch.setattr("autopar.runtime.flat.torch.cat", no_copies)
    monkeypatch.setattr("autopar.runtime.flat._stacked", no_copies)

    def mine(x: Tensor, rank: int) -> Tensor:
        return x.chunk(2)[rank] if text == GATHERED else x

    def on_rank(rank: int) -> list[Tensor | None]:
        x = whole[0].chunk(2)[rank].clone()
        leaves = [mine(w, rank).clone().requires_grad_() for w in whole[1:]]
        (y,), _ = emit(graph)(x, *leaves)
        (y * y).sum().backward()
        return [leaf.grad for leaf in leaves]

    for rank, found in enumerate(run_lockstep(MESH, on_rank)):
        for grad, leaf in zip(found, expected[1:], strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(grad, mine(leaf.grad, rank))


def test_the_next_parameters_are_gathered_beside_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bucket ahead, never more."""
    assert events(layers(GATHERED), monkeypatch) == [
        *("start gather", "land gather"),
        *("start gather", "layer 1", "land gather"),
        *("start gather", "layer 2", "land gather"),
        "layer 3",
        "backward",
        *("back layer 3", "start scatter"),
        # On the way gradients are whole: those of one bucket at a time.
        *("back layer 2", "land scatter", "start scatter"),
        *("back layer 1", "land scatter", "start scatter"),
        "land scatter",
    ]


def test_a_backward_pass_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = events(layers(SUMMED), monkeypatch, fail=True)
    assert seen[-5:] == ["back layer 3", "start sum", "back layer 2", "start sum", "back layer 1"]
    gc.collect()
    assert not _deliveries


def test_chains_go_on_in_one_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second collective of a bucket starts when the next bucket comes, or the pass ends."""
    chain = GATHERED.replace("4@a, 4", "4@b, 4").replace(
        '(("autopar.all_gather", ("a",), ((0, "R"),)),)',
        '(("autopar.to_replicate", ("a",), ((),)), ("autopar.all_gather", ("b",), ((0, "R"),)))',
    )
    graph = layers(chain.replace("rep(a)", "rep(a, b)"), "a=2 b=2")
    mesh = Mesh.of({"a": 2, "b": 2})
    order: list[list[str]] = [[] for _ in range(mesh.size)]
    for name in ("_start_all_reduce", "_start_reduce_scatter"):
        start = getattr(lockstep._LockstepGroup, name)

        def started(group: Any, x: Tensor, name: str = name, start: Any = start) -> Any:
            order[current().rank].append(name)
            return start(group, x)

        monkeypatch.setattr(lockstep._LockstepGroup, name, started)

    def on_rank(rank: int) -> list[Tensor]:
        x = torch.ones(1, 4, dtype=torch.float64)
        leaves = [torch.ones(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(LAYERS)]
        (y,), _ = emit(graph)(x, *leaves)
        y.sum().backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    grads = run_lockstep(mesh, on_rank)
    scatter, total = "_start_reduce_scatter", "_start_all_reduce"
    # The first bucket goes on, and then the second one is sent off.
    assert order == [[scatter, total] * LAYERS] * mesh.size
    assert all(grad is not None for mine in grads for grad in mine)
