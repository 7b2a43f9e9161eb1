"""From a model to its plan, and from a plan to the graph that ranks run."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from autopar.dry_run import dry_operators
from autopar.ir.errors import (
    GraphError,
    HintError,
    InputError,
    LayoutError,
    MeshError,
    PlanError,
)
from autopar.ir.graph import Graph
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.ir.text import print_graph
from autopar.ir.trace import Program, trace
from autopar.ir.trace_export import model_device
from autopar.kept_rows import KeptRow, make_kept_rows, state_row
from autopar.memory_report import parse_size
from autopar.mixed import MixedPrecision, region
from autopar.passes import pipeline
from autopar.passes.assignment import Assignment
from autopar.passes.baselines import simplest_as_good
from autopar.passes.choices import rules_of
from autopar.passes.collector import no_collection
from autopar.passes.communication import format_bytes
from autopar.passes.device import Device, device_for
from autopar.passes.hints import Hint
from autopar.passes.memory.limit import MemoryLimit
from autopar.passes.memory.timeline import optimizer_states
from autopar.passes.overlap import NOTHING_HIDDEN, Hiding
from autopar.passes.place_hints import Placed
from autopar.passes.policies import (
    NO_POLICIES,
    Given,
    Policies,
    check_given,
    resolve_policies,
)
from autopar.passes.policy_costs import effects_on
from autopar.passes.policy_search import AUTO
from autopar.passes.prices import DevicePrices
from autopar.passes.search import MODES, OUTPUTS, Searched
from autopar.passes.state_costs import state_effect
from autopar.passes.zero import Sharded
from autopar.plan_check import check_plan, source_label, source_type
from autopar.plans import Plan
from autopar.policy_choice import Decide, chosen_policies
from autopar.report import make_rows
from autopar.sharding import make_hint, module_hints

#: The levels of ZeRO, 0 for parameters stored as the search has it.
ZERO_LEVELS = (0, 1, 2, 3)

#: How the text of a graph names a device.
_DEVICES = re.compile(r'device\("[^"]*"\)')


@dataclass(frozen=True)
class Request:
    """What a user asks of the compiler, checked: everything but the model and its inputs.

    mesh:
        the full mesh, axes of size 1 included
    mode:
        None: semi-auto when there are hints, else auto
    limit:
        the most memory one rank may need, None for no limit
    memory_policy:
        what is kept for the backward pass (`autopar.passes.policies`)
    zero:
        the level of ZeRO, 0 for none
    mixed:
        the mixed precision that the model is traced under, None for none
    share_blocks:
        whether equal blocks of the model share their decisions
    optimizer:
        whose state is counted
    offload_optimizer:
        whether that state is in the host's memory between steps
    """

    mesh: Mesh
    mode: str | None
    hints: Mapping[str, Hint]
    device: Device
    outputs: str
    limit: MemoryLimit | None = None
    memory_policy: Given = None
    zero: int = 0
    mixed: MixedPrecision | None = None
    share_blocks: bool = True
    optimizer: str = "adam"
    offload_optimizer: bool = False

    @staticmethod
    def make(
        mesh: Mesh,
        mode: str | None,
        hints: Mapping[str, Any] | None,
        device: Any,
        outputs: str,
        memory: int | str | None = None,
        optimizer: str = "adam",
        memory_policy: Given = None,
        zero: int = 0,
        mixed: MixedPrecision | None = None,
        share_blocks: bool = True,
        offload_optimizer: bool = False,
    ) -> Request:
        """Check and normalise. Raises PlanError or HintError naming the argument."""
        if mode is not None and mode not in MODES:
            raise PlanError(f"mode: expected one of {MODES} or None, got {mode!r}")
        if outputs not in OUTPUTS:
            raise PlanError(f"outputs: expected one of {OUTPUTS}, got {outputs!r}")
        if zero not in ZERO_LEVELS or isinstance(zero, bool):
            raise PlanError(f"zero: expected one of {ZERO_LEVELS}, got {zero!r}")
        if memory_policy != AUTO:
            check_given(memory_policy)
        if not isinstance(offload_optimizer, bool):
            raise PlanError(f"offload_optimizer: expected True or False, got {offload_optimizer!r}")
        optimizer_states(optimizer)  # refuses one it does not know
        priced_for = device_for(device or "cpu", mesh)
        limit = None
        if memory is not None:
            probe = partial(dry_operators, backend=priced_for.backend)
            nbytes, apart = parse_size(memory), priced_for.separate_memory
            limit = MemoryLimit(nbytes, optimizer, probe, separate_memory=apart)
        hinted = _pattern_hints(hints)
        return Request(
            mesh,
            mode,
            hinted,
            priced_for,
            outputs,
            limit,
            memory_policy,
            zero,
            mixed,
            share_blocks,
            optimizer,
            offload_optimizer,
        )


def _pattern_hints(hints: Mapping[str, Any] | None) -> dict[str, Hint]:
    """`hints=` of a call: a strategy, or a dict with in_strategy and out_strategy."""
    if hints is None:
        return {}
    if not isinstance(hints, Mapping):
        raise HintError(f"hints: expected a dict of module name pattern -> strategy, got {hints!r}")
    found = {}
    for pattern, spec in hints.items():
        if not isinstance(pattern, str):
            raise HintError(f"hints: expected a module name pattern as key, got {pattern!r}")
        if isinstance(spec, Mapping):
            unknown = set(spec) - {"in_strategy", "out_strategy"}
            if unknown:
                raise HintError(f"hint {pattern!r}: unknown keys {sorted(unknown)}")
            found[pattern] = make_hint(
                repr(pattern), spec.get("in_strategy"), spec.get("out_strategy")
            )
        else:
            found[pattern] = make_hint(repr(pattern), spec, None)
    return found


@dataclass(frozen=True)
class Traced:
    """A model traced and its hints placed; the same on every rank."""

    program: Program
    placed: Placed
    rules: Mapping[str, Rule]
    fingerprint: str

    @property
    def graph(self) -> Graph:
        return self.placed.graph


def trace_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request
) -> Traced:
    """Trace a model and resolve its hints; no communication."""
    return place_program(trace_program(model, args, kwargs, request.mixed), model, request)


def trace_program(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mixed: MixedPrecision | None = None,
) -> Program:
    """Trace a model; its hints are still markers."""
    _check_call(model, args, kwargs)
    with region(mixed, model_device(model, (args, kwargs))):
        return trace(model, tuple(args), dict(kwargs))


def place_program(program: Program, model: nn.Module, request: Request) -> Traced:
    """Resolve the hints of a model that is traced, for the mesh of a request."""
    placed = pipeline.place(
        program.graph,
        request.mesh,
        module_hints(model),
        request.hints,
        _module_names(model),
        *([] if request.mixed is None else [request.mixed.reduce_dtype]),
    )
    text = print_graph(placed.graph)
    hints = sorted(f"{name} {fix}" for name, fix in placed.fixes.items())
    # Where the model was traced does not matter: operators that name a device are told another.
    digest = hashlib.sha256(_DEVICES.sub("device", "\n".join([text, *hints])).encode()).hexdigest()
    return Traced(program, placed, rules_of(placed.graph), digest)


def _check_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what is no model, and an example call that is not spelled as one."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args: expected a tuple of positional arguments, got {type(args).__name__}; "
            "a single one is written (x,)"
        )
    if not isinstance(kwargs, Mapping):
        raise InputError(
            f"kwargs: expected a dict of keyword arguments, got {type(kwargs).__name__}"
        )


def _module_names(model: nn.Module) -> dict[str, str]:
    """Every path of every module -> the first path of the same module."""
    first: dict[int, str] = {}
    return {
        path: first.setdefault(id(module), path)
        for path, module in model.named_modules(remove_duplicate=False)
    }


@no_collection()
def make_plan(traced: Traced, request: Request, pinned: Mapping[str, Layout] | None = None) -> Plan:
    """Search the assignment of a traced model. `pinned` gives parameter layouts by name."""
    mode = request.mode or ("semi_auto" if traced.placed.fixes else "auto")

    def decide(
        pinned: Mapping[str, Layout] | None, limit: MemoryLimit | None, policies: Policies
    ) -> Searched:
        found = pipeline.decide(
            traced.placed,
            request.mesh,
            request.device,
            mode=mode,  # type: ignore[arg-type]
            outputs=request.outputs,  # type: ignore[arg-type]
            pinned=pinned,
            limit=limit,
            share_blocks=request.share_blocks,
            policies=policies,
        )
        if mode != "auto" or traced.placed.fixes or pinned or limit is not None:
            return found
        mesh, precision = request.mesh.without_trivial_axes(), request.device.precision
        return simplest_as_good(traced.graph, traced.rules, mesh, precision, found)

    if request.memory_policy == AUTO:
        if request.limit is not None:
            return _with_chosen_policies(traced, request, mode, pinned, decide)
        request = replace(request, memory_policy=None)  # nothing is cheaper than to keep all
    # A pattern that a later kind of call has nothing for was good for the first one.
    policies = policies_of(traced, request, strict=pinned is None)
    searched = decide(pinned, request.limit, policies)
    notes: list[str] = []
    if request.zero and pinned is None:
        sharded = pipeline.store_in_shards(
            traced.graph, searched, request.device, lambda p: decide(p, request.limit, policies)
        )
        searched = sharded.searched
        notes = _zero_notes(traced.graph, request.zero, sharded)
    return _describe_searched(traced, request, mode, searched, policies, notes)


def _describe_searched(
    traced: Traced,
    request: Request,
    mode: str,
    searched: Searched,
    policies: Policies,
    notes: Sequence[str],
) -> Plan:
    solution = searched.solution
    return describe_plan(
        traced,
        request,
        searched.assignment,
        mode,
        solution.cost,
        solution.bound,
        searched.hiding,
        policies,
        [*notes, *searched.notes],
    )


def _with_chosen_policies(
    traced: Traced,
    request: Request,
    mode: str,
    pinned: Mapping[str, Layout] | None,
    decide: Decide,
) -> Plan:
    """The cheapest plan and policy within the limit."""

    def resolve(given: Given, zero: int) -> Policies:
        return policies_of(traced, replace(request, memory_policy=given, zero=zero))

    chosen, sharded = chosen_policies(traced, request, pinned, decide, resolve, mode)
    notes = [] if sharded is None else _zero_notes(traced.graph, chosen.zero, sharded)
    request = replace(request, memory_policy=chosen.given, zero=chosen.zero)
    return _describe_searched(
        traced, request, mode, chosen.searched, chosen.policies, [*notes, chosen.note]
    )


def policies_of(traced: Traced, request: Request, strict: bool = True) -> Policies:
    """What a request keeps for the backward pass of a traced model.

    Raises PlanError for a pattern that matches nothing, unless `strict` is off.
    """
    found = resolve_policies(traced.graph, request.memory_policy, request.zero == 3, strict)
    return replace(found, offloads_optimizer=request.offload_optimizer)


def _zero_notes(graph: Graph, level: int, sharded: Sharded) -> list[str]:
    """What ZeRO did, and what it could not do."""
    if not sharded.axes:
        return [f"zero={level}: no axis is data parallel here, parameters are stored as they were"]
    over = "+".join(sharded.axes)
    notes = [f"zero={level}: {len(sharded.shards)} parameters are stored in shards over {over}"]
    if sharded.whole:
        values = {node.target: node.results[0] for node in graph.sources("param")}
        nbytes = format_bytes(sum(values[name].nbytes for name in sharded.whole))
        notes.append(
            f"zero={level}: {len(sharded.whole)} parameters ({nbytes}) stay whole along an axis of "
            f"{over}, which cuts no dimension of theirs; the first is {sharded.whole[0]}"
        )
    return notes


def describe_plan(
    traced: Traced,
    request: Request,
    assignment: Assignment,
    mode: str,
    seconds: float,
    bound: float,
    hiding: Hiding = NOTHING_HIDDEN,
    policies: Policies = NO_POLICIES,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan of an assignment, with its rows for reading."""
    graph = traced.graph
    # What each operator needs by itself; the buckets that run instead belong to no operator.
    partitioned = pipeline.partitioned(graph, assignment, request.device)
    prices = DevicePrices(assignment.mesh, request.device)
    labels = {n.name: source_label(n) for n in graph.nodes if n.is_source}
    return Plan(
        mesh=request.mesh,
        mode=mode,
        outputs=request.outputs,
        device=request.device,
        training=traced.program.training,
        fingerprint=traced.fingerprint,
        signature={source_label(n): source_type(n.results[0]) for n in graph.nodes if n.is_source},
        labels=labels,
        assignment=assignment,
        seconds=seconds,
        bound=bound,
        gradients=hiding.gradients,
        hidden=hiding.hidden,
        rows=make_rows(
            graph, partitioned, traced.rules, assignment, prices, f"outputs={request.outputs!r}"
        ),
        notes=(
            *traced.program.notes,
            *_hint_notes(traced.placed, mode),
            *_rule_notes(graph, traced.rules),
            *notes,
        ),
        mixed=request.mixed,
        policies=policies,
        kept=_kept_rows(traced, partitioned, assignment, policies, prices, request.optimizer),
    )


def _kept_rows(
    traced: Traced,
    partitioned: Graph,
    assignment: Assignment,
    policies: Policies,
    prices: DevicePrices,
    optimizer: str,
) -> tuple[KeptRow, ...]:
    """What the policies save and cost in training."""
    if not policies or not traced.program.training:
        return ()
    probe = partial(dry_operators, backend=prices.device.backend)
    lowered, effects = effects_on(
        traced.graph, partitioned, traced.rules, assignment, prices, policies, probe
    )
    rows = make_kept_rows(effects)
    if not policies.offloads_optimizer:
        return rows
    return (*rows, state_row(state_effect(lowered, optimizer, prices.device), optimizer))


def _hint_notes(placed: Placed, mode: str) -> list[str]:
    """What became of the hints, where it is not what they say."""
    if mode == "stand_alone" and placed.hints:
        unused = ", ".join(sorted({str(hint) for hint in placed.hints.values()}))
        return [f"mode 'stand_alone' splits nothing: not used are {unused}"]
    return placed.notes


def _rule_notes(graph: Graph, rules: Mapping[str, Rule]) -> list[str]:
    """Per operator outside of the compiler's table: how it may be split, or why it is not."""
    where: dict[tuple[str, bool, str], list[str]] = {}
    for node in graph.calls:
        rule = rules[node.name]
        if rule.opaque or rule.note:
            where.setdefault((node.op, rule.opaque, rule.note), []).append(str(node.origin))
    notes = []
    for (op, opaque, note), places in where.items():
        calls = f"({len(places)} calls, first in {places[0]})"
        if opaque:
            reason = f": {note}" if note else ""
            notes.append(f"{op} has no rule: it runs whole on every rank {calls}{reason}")
        else:
            notes.append(f"{op} may be split by a rule that is not the compiler's {calls}: {note}")
    return notes


def lower_plan(traced: Traced, plan: Plan, request: Request) -> Graph:
    """The partitioned graph of a plan, with the collectives that it was priced with.

    Raises PlanError where the plan was made for another model or mesh, or was edited into
    something that cannot run.
    """
    check_plan(
        plan,
        request.mesh,
        traced.graph,
        traced.rules,
        traced.fingerprint,
        traced.program.training,
    )
    try:
        return pipeline.lower(traced.graph, plan.assignment, plan.device, plan.policies)
    except (LayoutError, GraphError, MeshError) as error:
        raise PlanError(f"{plan.called}: {error}") from None


def resolve_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan given as itself or as a file."""
    if not isinstance(plan, (Plan, str, os.PathLike)):
        raise PlanError(f"plan: expected a Plan or the path of its file, got {plan!r}")
    return plan if isinstance(plan, Plan) else Plan.load(plan)
