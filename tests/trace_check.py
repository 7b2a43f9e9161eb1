"""Running a traced program with real tensors, and comparing it with its model."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.graph import Graph, Node, Origin, Value, map_values
from autopar.ir.parse import parse_graph
from autopar.ir.text import print_graph
from autopar.ir.trace import Program, trace
from autopar.ir.trace_grad import overload
from autopar.ir.verify import verify_graph
from autopar.runtime.operators import resolve


def _addmm_nd(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x.flatten(0, -2), w).view(*x.shape[:-1], w.shape[-1])


def _batch_norm_train(x: Any, w: Any, b: Any, mean: Any, var: Any, momentum: float, eps: float):
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, w, b, True, momentum, eps), mean, var


_OWN = {
    "autopar.addmm_nd": _addmm_nd,
    "autopar.as_strided": resolve("autopar.as_strided"),
    "autopar.as_strided_scatter": resolve("autopar.as_strided_scatter"),
    "autopar.batch_norm_train": _batch_norm_train,
    "autopar.checked": resolve("autopar.checked"),
}


def call(node: Node, values: dict[str, torch.Tensor]) -> list[Any]:
    """The results of one call node on real tensors."""
    args, kwargs = map_values((node.args, node.kwargs), lambda v: values[v.name])
    run = _OWN.get(node.op) or overload(node.op)
    region = node.attrs.get("autocast")
    with torch.autocast(*region) if region else contextlib.nullcontext():
        made = run(*args, **kwargs)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def run(program: Program, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The output of the program, and the new values of the buffers it updates.

    Every value is checked to have the shape, the dtype and the gradient the graph says.
    """
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    inputs = iter(program.signature.bind(args, kwargs))
    values: dict[str, torch.Tensor] = {}
    for node in program.graph.nodes:
        match node.op:
            case "input":
                made = [next(inputs)]
            case "param" | "buffer":
                made = [state[node.target]]
            case "constant":
                made = [program.constants[node.target]]
            case _:
                made = call(node, values)
        for value, tensor in zip(node.results, made, strict=True):
            said = (value.shape, value.dtype, value.grad)
            assert (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) == said, node
            values[value.name] = tensor
    outputs = [values[o.name] if isinstance(o, Value) else o for o in program.graph.outputs]
    return program.unflatten(outputs), {n: values[v.name] for n, v in program.graph.updates}


def check_same(model: nn.Module, *args: Any, tolerance: float = 0.0, **kwargs: Any) -> Program:
    """Trace, and compare outputs, gradients and buffers with one call of the model itself.

    `tolerance` is relative to the largest element. Random operators draw from the same seed.
    """
    state = copy.deepcopy(model.state_dict())
    mode = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    program = trace(model, args, kwargs)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == mode
    for name, tensor in model.state_dict().items():
        assert type(tensor) is torch.Tensor and torch.equal(tensor, state[name]), name
    assert all(p.grad is None for p in model.parameters())
    check_well_formed(program)

    torch.manual_seed(1)
    got, updates = run(program, model, args, kwargs)
    leaves = [
        t
        for t in [*model.parameters(), *pytree.tree_leaves((args, kwargs))]
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    got_grads = _grads(got, leaves)
    torch.manual_seed(1)
    expected = model(*args, **kwargs)
    assert type(got) is type(expected)
    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True))
    pairs += list(zip(got_grads, _grads(expected, leaves), strict=True))
    after = dict(model.named_buffers())
    pairs += [(updates.get(n, state.get(n, t)), t) for n, t in after.items()]
    for a, b in pairs:
        if isinstance(b, torch.Tensor):
            assert a is not None and a.requires_grad == b.requires_grad
            assert _distance(a, b) <= tolerance
        else:
            assert a == b
    return program


def check_well_formed(program: Program) -> None:
    """Names are unique identifiers, operands come first, and no call writes to its operands."""
    verify_graph(program.graph, stage="traced")
    assert parse_graph(print_graph(program.graph)) == _without_origins(program.graph)
    known: set[str] = set()
    for node in program.graph.nodes:
        assert all(v.name in known for v in node.operands), node
        for value in node.results:
            assert value.name not in known and value.name.isidentifier()
            known.add(value.name)
        if not node.is_source and not node.op.startswith("autopar."):
            assert not overload(node.op)._schema.is_mutable, node
    assert [n.target for n in program.graph.sources("input")] == list(program.signature.names)


def _without_origins(graph: Graph) -> Graph:
    return graph.with_nodes(tuple(replace(n, origin=Origin()) for n in graph.nodes))


def ops(program: Program) -> list[str]:
    return [n.op.removeprefix("aten.") for n in program.graph.calls]


def _grads(output: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    loss = sum(t.double().pow(2).sum() for t in tensors if t.requires_grad)
    if not isinstance(loss, torch.Tensor):
        return [None] * len(leaves)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if b.numel() == 0:
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
