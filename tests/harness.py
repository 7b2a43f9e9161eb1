"""The one check that every operator rule must pass.

A rule claims, for each of its strategies, which piece of every operand a rank needs, which call
it makes, and what the results then are. `check_sample` takes the claim literally: it cuts whole
tensors into the operand layouts, runs the local call on every rank in lockstep, puts the results
together as their layouts say, and compares with the unsplit operator, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Node, Value, map_values
from autopar.ir.layout import Layout
from autopar.ir.local import is_empty, rank_call
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, operand_layout, result_layout, strategies
from autopar.ir.rules import rule_for
from autopar.passes.localise import local_call
from autopar.runtime import groups, lockstep
from autopar.runtime.nothing import nothing
from autopar.runtime.operators import resolve
from samples.sample import Sample

MESHES = (Mesh.of({"a": 2}), Mesh.of({"a": 3}), Mesh.of({"a": 2, "b": 2}))

#: Largest difference allowed, relative to the largest entry.
TOLERANCE = 1e-9

#: The same for results of other dtypes than double precision.
TOLERANCES = {
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}

#: Seed of torch's generator before a random operator runs, whole or on any rank.
RANDOM_SEED = 1234

#: A tensor as the ranks hold it: position along the mesh axes -> local piece.
Pieces = dict[tuple[int, ...], Tensor]


class RuleError(AssertionError):
    """A strategy of a rule does not reproduce the unsplit operator."""


@dataclass
class Tally:
    """How many (rule, strategy) pairs of how many calls were checked, in this process."""

    pairs: int = 0
    calls: int = 0
    operators: set[str] = field(default_factory=set)

    def add(self, op: str, pairs: int) -> None:
        self.pairs += pairs
        self.calls += 1
        self.operators.add(op)


TALLY = Tally()


@dataclass(frozen=True)
class Case:
    """A sample made into a node, with the whole results and gradients it must give.

    tensors:
        the operands, in `Node.operands` order
    cotangents, gradients:
        by result and by operand; None where no gradient flows
    """

    sample: Sample
    node: Node
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Trial:
    """One strategy made ready to run: every rank's operands and cotangents."""

    strategy: Strategy
    call: Node
    operands: tuple[Pieces, ...]
    operand_layouts: tuple[Layout, ...]
    result_layouts: tuple[Layout, ...]
    cotangents: tuple[Pieces | None, ...]


def check_sample(
    sample: Sample, rule_of: Callable[[Node], Rule] = rule_for, meshes: tuple[Mesh, ...] = MESHES
) -> int:
    """Check every strategy of a sample on every mesh; the number of strategies.

    Raises RuleError naming the operator, the mesh, the strategy and what differs.
    """
    case = make_case(sample)
    rule = rule_of(case.node)
    splittable = any(f.splittable and f.size > 1 for f in rule.factors)
    if splittable == sample.unsplit:
        raise RuleError(f"{sample.name}: {'something' if splittable else 'nothing'} may be split")
    count = 0
    for mesh in meshes:
        found = strategies(rule, mesh, grad=case.node.differentiable, axis_orders=True)
        check_strategies(case, rule, found, mesh)
        count += len(found)
    TALLY.add(sample.op, count)
    return count


def check_uneven(sample: Sample, meshes: tuple[Mesh, ...]) -> int:
    """Check every strategy that cuts something unevenly, empty pieces included; their number.

    Raises RuleError as `check_sample` does.
    """
    case = make_case(sample)
    rule = rule_for(case.node)
    every = {f.name for f in rule.factors}
    count = 0
    for mesh in meshes:
        grad = case.node.differentiable
        found = [
            strategy
            for strategy in strategies(rule, mesh, grad=grad, axis_orders=True, asked=every)
            if any(f.size % mesh.axis_size(*strategy.axes_of(f.name)) for f in rule.factors)
        ]
        check_strategies(case, rule, found, mesh)
        count += len(found)
    TALLY.add(sample.op, count)
    return count


def check_strategies(case: Case, rule: Rule, chosen: Sequence[Strategy], mesh: Mesh) -> None:
    """Check some strategies of a rule; raises RuleError as `check_sample` does."""
    trials = [make_trial(case, rule, strategy, mesh) for strategy in chosen]
    outcomes = run_trials(case, trials, mesh)
    for k, trial in enumerate(trials):
        where = f"{case.sample.name} on {mesh}, {trial.strategy}"
        _compare(case, trial, mesh, [outcome[k] for outcome in outcomes], where)


# --- the unsplit operator --------------------------------------------------------------------


def make_case(sample: Sample) -> Case:
    """Run a sample whole, forward and backward."""
    names: dict[int, Value] = {}
    tensors: list[Tensor] = []

    def value(x: Tensor) -> Value:
        v = Value(f"x{len(tensors)}", tuple(x.shape), x.dtype, x.requires_grad)
        names[id(x)] = v
        tensors.append(x.detach().clone().requires_grad_(x.requires_grad))
        return v

    args, kwargs = _map_tensors((sample.args, sample.kwargs), value)
    blank = Node(op=sample.op, args=args, kwargs=kwargs)
    torch.manual_seed(RANDOM_SEED)
    results = _call(blank, tensors, resolve(sample.op))
    values = tuple(
        Value(f"y{k}", tuple(y.shape), y.dtype, y.requires_grad) for k, y in enumerate(results)
    )
    node = Node(op=sample.op, args=args, kwargs=kwargs, results=values)
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    cotangents = tuple(
        _noise(y.shape, y.dtype, generator) if y.requires_grad else None for y in results
    )
    gradients = _gradients(results, cotangents, tensors)
    if sample.unspecified:
        results = tuple(torch.zeros_like(y) for y in results)
    return Case(
        sample, node, tuple(tensors), tuple(y.detach() for y in results), cotangents, gradients
    )


def _map_tensors(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_tensors(item, fn) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(item, fn) for key, item in tree.items()}
    return tree


def _call(node: Node, tensors: list[Tensor], fn: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Call `fn` as the node does, on these tensors in operand order."""
    queue = iter(tensors)
    args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
    found = fn(*args, **kwargs)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _gradients(
    results: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...], tensors: list[Tensor]
) -> tuple[Tensor | None, ...]:
    wanted = [x for x in tensors if x.requires_grad]
    outputs = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None]
    if not wanted or not outputs:
        return (None,) * len(tensors)
    for y, _ in outputs:
        if not y.requires_grad:
            raise RuleError(f"a result of shape {tuple(y.shape)} lost its gradient")
    found = iter(
        torch.autograd.grad(
            [y for y, _ in outputs], wanted, [g for _, g in outputs], allow_unused=True
        )
    )
    pairs = [(x, next(found) if x.requires_grad else None) for x in tensors]
    return tuple(torch.zeros_like(x) if g is None and x.requires_grad else g for x, g in pairs)


# --- cutting whole tensors into a layout, and back -------------------------------------------


def scatter(x: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> Pieces:
    """The pieces of a whole tensor: blocks, copies, and random terms that sum to it."""
    # Copies along one axis are copies of the same term along another.
    terms = {(): x}
    for axis in layout.partial:
        size = mesh.axis_size(axis)
        terms = {
            (*at, k): part
            for at, term in terms.items()
            for k, part in enumerate(_terms(term, size, generator))
        }
    cut = {}
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)
        piece = terms[tuple(here[axis] for axis in layout.partial)]
        for d, axes in enumerate(layout.dims):
            for axis in axes:
                piece = _chunk(piece, d, layout.unit(d), mesh.axis_size(axis), here[axis])
        cut[tuple(here.values())] = piece.detach().clone()
    return cut


def _chunk(x: Tensor, dim: int, unit: int, count: int, index: int) -> Tensor:
    """What `torch.chunk` makes of the units of a dimension; it leaves out empty pieces."""
    chunks = torch.arange(x.shape[dim]).view(-1, unit).chunk(count)
    mine = chunks[index].flatten() if index < len(chunks) else torch.arange(0)
    return x.index_select(dim, mine)


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a value in this layout, read as a value."""
    return Layout.make(layout.dims, (), layout.replicate, layout.units)


def gather(pieces: Pieces, layout: Layout, mesh: Mesh, where: str) -> Tensor:
    """The whole tensor that the pieces stand for; copies must agree."""
    for at, piece in pieces.items():
        if piece.dim() != layout.rank:
            raise RuleError(f"{where}: rank {at} holds {tuple(piece.shape)}, not {layout}")
    order = list(mesh.names)
    minor_first = [(a, d) for d, axes in enumerate(layout.dims) for a in reversed(axes)]
    copies = [(a, None) for a in mesh.names if a not in layout.split_axes + layout.partial]
    sums = [(a, None) for a in layout.partial]
    for axis, d in copies + sums + minor_first:
        place = order.index(axis)
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for at, piece in sorted(pieces.items()):
            rows.setdefault(at[:place] + at[place + 1 :], []).append(piece)
        if axis in layout.partial:
            pieces = {at: sum(row[1:], row[0]) for at, row in rows.items()}
        elif d is not None:
            pieces = {at: torch.cat(row, d) for at, row in rows.items()}
        else:
            for at, row in rows.items():
                for other in row[1:]:
                    _assert_same(other, row[0], f"{where}: copies differ along {axis} at {at}")
            pieces = {at: row[0] for at, row in rows.items()}
        order.remove(axis)
    return pieces[()]


def _terms(x: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Random terms of mixed signs that sum to `x`."""
    if x.dtype == torch.bool:
        raise RuleError("a tensor of bools cannot be a sum of terms (state P)")
    rest = [_noise(x.shape, x.dtype, generator) for _ in range(count - 1)]
    return [x - sum(rest, torch.zeros_like(x)), *rest]


def _noise(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(-5, 6, tuple(shape), dtype=dtype, generator=generator)


# --- one strategy ------------------------------------------------------------------------------


def make_trial(case: Case, rule: Rule, strategy: Strategy, mesh: Mesh) -> Trial:
    """Cut the operands and cotangents as a strategy asks."""
    node = case.node
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    ins = tuple(
        operand_layout(rule, strategy, k, node.operand_grad(k), mesh)
        for k in range(len(node.operands))
    )
    outs = tuple(result_layout(rule, strategy, k, v.grad, mesh) for k, v in enumerate(node.results))
    call = local_call(node, rule, strategy, mesh)
    results = [replace(v, layout=layout) for v, layout in zip(node.results, outs, strict=True)]
    return Trial(
        strategy=strategy,
        call=replace(call, results=tuple(results)),
        operands=tuple(
            scatter(x, layout, mesh, generator) for x, layout in zip(case.tensors, ins, strict=True)
        ),
        operand_layouts=ins,
        result_layouts=outs,
        cotangents=tuple(
            None if g is None else scatter(g, dual(layout), mesh, generator)
            for g, layout in zip(case.cotangents, outs, strict=True)
        ),
    )


Outcome = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]


def run_trials(case: Case, trials: list[Trial], mesh: Mesh) -> list[list[Outcome]]:
    """The results and gradients of every trial, by rank."""

    def on_rank(rank: int) -> list[Outcome]:
        at = tuple(mesh.coordinates(rank).values())
        return [_run_trial(case, trial, at) for trial in trials]

    return lockstep.run_lockstep(mesh, on_rank)


def _run_trial(case: Case, trial: Trial, at: tuple[int, ...]) -> Outcome:
    groups.current().use_exact_rng(RANDOM_SEED)
    tensors = [
        (_spread(pieces[at]) if case.sample.strided else pieces[at].clone()).requires_grad_(v.grad)
        for pieces, v in zip(trial.operands, case.node.operands, strict=True)
    ]
    context = groups.current()
    place = context.mesh, context.coordinates
    if is_empty(trial.call, *place):
        shapes = [layout.local_shape(v.shape, *place) for v, layout in _results(trial)]
        made = [(s, v.dtype, v.grad) for s, (v, _) in zip(shapes, _results(trial), strict=True)]
        results = nothing(tuple(made), *tensors)
    else:
        call = rank_call(trial.call, *place)
        results = _call(call, tensors, resolve(call.op))
    if case.sample.unspecified:
        results = tuple(torch.zeros_like(y) for y in results)
    cotangents = tuple(None if g is None else g[at] for g in trial.cotangents)
    # In other precisions, copies that are summed in another order differ.
    if sum(at) % 2 and all(y.dtype == torch.float64 for y in results):
        cotangents = tuple(None if g is None else _ordered(g) for g in cotangents)
    gradients = _gradients(results, cotangents, tensors)
    return tuple(y.detach() for y in results), gradients


def _ordered(x: Tensor) -> Tensor:
    """A gradient as it may come, and comes on every other rank: the last dimensions are the outer
    ones in memory, then channels, then the batch, which is how a transposed matrix of pixels lies.
    """
    dims = (*range(2, x.dim()), *reversed(range(min(2, x.dim()))))
    back = tuple(map(dims.index, range(x.dim())))
    return x.permute(dims).contiguous().permute(back)


def _spread(x: Tensor) -> Tensor:
    """A copy that lies in memory with gaps, its dimensions in another order."""
    dims = tuple(reversed(range(x.dim())))
    gaps = x.new_zeros([*(x.shape[d] for d in dims), 2])
    gaps[..., 0] = x.permute(dims)
    return gaps[..., 0].permute(dims)


def _results(trial: Trial) -> list[tuple[Value, Layout]]:
    return list(zip(trial.call.results, trial.result_layouts, strict=True))


def _compare(case: Case, trial: Trial, mesh: Mesh, by_rank: list[Outcome], where: str) -> None:
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    values = case.node.operands + case.node.results
    tolerance = max((TOLERANCES.get(v.dtype, TOLERANCE) for v in values), default=TOLERANCE)
    for k, (want, layout) in enumerate(zip(case.results, trial.result_layouts, strict=True)):
        pieces = {at: outcome[0][k] for at, outcome in zip(places, by_rank, strict=True)}
        label = f"{where}: result {k} {layout}"
        _assert_same(gather(pieces, layout, mesh, label), want, label, tolerance)
    for k, (want_gradient, layout) in enumerate(
        zip(case.gradients, trial.operand_layouts, strict=True)
    ):
        if want_gradient is None:
            continue
        pieces = {at: outcome[1][k] for at, outcome in zip(places, by_rank, strict=True)}
        label = f"{where}: gradient of operand {k} {layout}"
        _assert_same(gather(pieces, dual(layout), mesh, label), want_gradient, label, tolerance)


def _assert_same(got: Tensor, want: Tensor, where: str, tolerance: float = TOLERANCE) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise RuleError(
            f"{where}: got {got.dtype} {tuple(got.shape)}, "
            f"expected {want.dtype} {tuple(want.shape)}"
        )
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        if not torch.equal(got, want):
            raise RuleError(f"{where}: got {got.tolist()}, expected {want.tolist()}")
        return
    finite = want[torch.isfinite(want)]
    scale = 1.0 + (finite.abs().max().item() if finite.numel() else 0.0)
    allowed = max(tolerance, TOLERANCES.get(want.dtype, TOLERANCE)) * scale
    if not torch.allclose(got, want, rtol=0.0, atol=allowed, equal_nan=True):
        worst = (got - want).abs().max().item()
        raise RuleError(f"{where}: differs from the unsplit operator by {worst:.3g}")
