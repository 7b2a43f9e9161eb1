"""The module a user gets back: the model's own face on the emitted graphs."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar import agreement
from autopar.arguments import (
    LocalInput,
    example_call,
    local_inputs,
    local_tensor,
    whole_entries,
)
from autopar.calls import Call, CallKey, Surroundings, changes, covers, state_of, without_gradient
from autopar.compiled import Compiled, agree_on_plan, compile_plan
from autopar.compiler import Request, Traced, trace_model
from autopar.face import Face
from autopar.infinities import agree_on_infinities
from autopar.ir.calling import flatten_call
from autopar.ir.errors import AutoparError, InputError
from autopar.ir.graph import Graph, Value
from autopar.materialise import as_global
from autopar.muster import meet
from autopar.one_piece import (
    call_in_one_piece,
    of_fixed_sizes,
    require_compilable,
    whole_if_differentiable,
)
from autopar.optimizers import watch
from autopar.plans import Plan
from autopar.runtime.compiling import is_compiling
from autopar.runtime.groups import RankContext
from autopar.runtime.random import agree_on_seed, default_generator
from autopar.skeleton import traceable

#: How many graphs a module keeps; the one that was not called for the longest goes first.
MAX_GRAPHS = 32

#: What is said where other ranks go on as before.
_ALONE = (
    "Here the call is unlike the one before (its arguments, their shapes or dtypes, training or "
    "evaluation mode), and all ranks have to be called alike"
)

log = logging.getLogger("autopar")


@dataclass(frozen=True)
class CallOptions:
    """How a parallel module takes its calls; `autoparallelize` explains each."""

    inputs: str = "global"
    shapes: str = "recompile"
    check: str = "first"
    exact_rng: bool = False


class ParallelModule(Face):
    """A model split over the ranks of a mesh; made by `autoparallelize`.

    It is called as the model is, returns the same structure, and has the same parameter, buffer
    and module names. Parameters are `DTensor`s (plain parameters on a mesh of one rank), so
    optimizers, gradient clipping and checkpoints work on it unchanged.

    A graph is compiled for every kind of call: its arguments but for the contents of tensors,
    which modules are in training mode, autocast, which parameters are trained, and their dtype.
    All graphs share the parameters, whose layouts the first one decides.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        context: RankContext,
        device: torch.device,
        options: CallOptions,
        *,
        plan: Plan | None,
    ) -> None:
        super().__init__(model, context, device)
        self._request = request
        self._options = options
        self._given_plan = plan
        self._plan: Plan | None = None
        self._parameters_of_forward = inspect.signature(model.forward)
        #: The graphs, the one that was called last at the end.
        self._compiled: OrderedDict[CallKey, Compiled] = OrderedDict()
        #: The kinds of calls that were compared between ranks, and ran.
        self._agreed: set[CallKey] = set()
        #: What `torch.compile` sees of a call.
        self._in_one_piece: Callable[..., Any] | None = None
        #: How the inputs of the first graph are divided, by path.
        self.example_inputs: dict[str, LocalInput] = {}
        context.prepare([self.mesh.names])

    # -- what was decided ---------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the graph compiled first, which decided how parameters are stored."""
        self._require_built("the plan")
        assert self._plan is not None
        return self._plan

    @property
    def computes_in(self) -> torch.dtype | None:
        mixed = self._request.mixed
        return None if mixed is None else mixed.low

    @property
    def offloads_optimizer(self) -> bool:
        return self._plan is not None and self._plan.policies.offloads_optimizer

    @property
    def takes_pieces(self) -> bool:
        """Whether a plain tensor in a call is one rank's piece (``inputs="local"``)."""
        return self._options.inputs == "local"

    @property
    def call_signature(self) -> inspect.Signature:
        """The signature of the model's `forward`."""
        return self._parameters_of_forward

    @property
    def _local(self) -> dict[str, LocalInput] | None:
        """With local inputs: what the plain tensors of a call are pieces of."""
        return self.example_inputs if self.takes_pieces else None

    @property
    def graph_module(self) -> fx.GraphModule:
        """The emitted module of the current mode, on local tensors (for reading)."""
        return self._current("the emitted graph").run

    def partitioned_graph(self) -> Graph:
        """The IR graph that each rank runs in the current mode."""
        return self._current("the partitioned graph").graph

    def _current(self, what: str) -> Compiled:
        """The graph that ran last in the current mode, else in any."""
        self._require_built(what)
        modes = self._modes()
        latest = list(reversed(self._compiled))
        return self._compiled[next((key for key in latest if key.modes == modes), latest[0])]

    # -- running ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # Looked at here, so that a change of them is noticed, and a graph made for it.
            modes = tuple(module.training for _, module in self._parts)
            trained = tuple(tensor.requires_grad for tensor in self.parameters())
            assert self._in_one_piece is not None
            flags = (modes, trained, self._context.accumulating)
            return self._in_one_piece(self, flags, args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call does (`forward` is what `torch.compile` sees of it)."""
        self._require_values()
        call, compiled = self._graph_for(args, kwargs)
        self.ran = True
        sources = list(self._sources(compiled, call.tensors))
        with self._context.active(), self._autocast_off(), self._random_kept():
            if compiled.random and not self._options.exact_rng:
                agree_on_seed(self._context, self._home)
            try:
                outputs, updates = compiled.run(*sources)
            except RuntimeError as error:
                if call.key in self._agreed or not compiled.why:
                    raise
                raise _refusal(compiled.why, error) from error
        if not is_compiling():
            self._agreed.add(call.key)
        with torch.no_grad():
            for (name, _), new in zip(compiled.graph.updates, updates, strict=True):
                self._state_tensor(name).copy_(new)
        returned = [
            self._returned(value, out)
            for value, out in zip(compiled.graph.outputs, outputs, strict=True)
        ]
        return compiled.traced.program.unflatten(returned)

    def _autocast_off(self) -> contextlib.AbstractContextManager[Any]:
        """The graph says itself which operators run under autocast, the caller's included."""
        if torch.is_autocast_enabled(self._home.type):
            return torch.autocast(self._home.type, enabled=False)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _random_kept(self) -> Iterator[None]:
        """Inside of `torch.compile` a seed belongs to the graph; the ranks' own is put back."""
        state = self._context.random
        try:
            yield
        finally:
            if is_compiling():
                self._context.random = state

    def _sources(self, compiled: Compiled, tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """The local tensor of every source node, in the order of the graph.

        A bucket takes parameters as they are.
        """
        as_they_are = frozenset() if is_compiling() else compiled.bucketed
        parameters = (node for node in compiled.sources if node.op == "param")
        cut = [node.target for node in parameters if node.name not in as_they_are]
        pieces = iter(self.local_parameters(cut))
        for node in compiled.sources:
            if node.op == "param" and node.name in as_they_are:
                yield self._state_tensor(node.target)
            elif node.op == "param":
                yield next(pieces)
            elif node.op == "buffer":
                yield self._state_tensor(node.target)
            elif node.op == "constant":
                yield compiled.traced.program.constants[node.target].to(self._home)
            elif node.op == "input":
                layout = node.results[0].layout
                assert layout is not None
                given = tensors[node.target]
                yield local_tensor(
                    given, node.target, layout, self._context, self._home, self._local
                )

    def _returned(self, value: Any, out: Any) -> Any:
        """A split output as a DTensor; scalars and whole outputs as they are."""
        if not isinstance(value, Value) or value.layout is None or not value.layout.split_axes:
            return out
        made = as_global(out, value.layout, value.shape, self._context)
        return whole_if_differentiable(made) if is_compiling() else made

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes inside do not sum them over data parallel ranks.

        Each rank adds up its own terms; the first backward pass outside sums them together with
        its own, in one go. Until then `.grad` of such a parameter is a DTensor in state Partial:
        clipping or an optimizer would still see the right sum, at the price of communicating.
        The gradient is that of the sum of the losses: divide each by the number of micro-batches
        where the mean is meant. Gradients of parameters stored split are scattered every time, so
        that none is ever held whole. Every rank enters it for the same backward passes.

        Raises AutoparError where it is entered twice.
        """
        if self._context.accumulating:
            raise AutoparError(
                "no_sync: this module is inside one already; leave it before entering the next"
            )
        self._context.accumulating = True
        try:
            yield
        finally:
            self._context.accumulating = False

    # -- which graph --------------------------------------------------------------------------

    def _graph_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Compiled]:
        """A call and the graph that it runs, compiled if need be."""
        if is_compiling():
            return self._known_graph(args, kwargs)
        call: Call | None = None
        error: Exception | None = None
        latest = next(reversed(self._compiled), None)
        try:
            call = self._describe(args, kwargs, self._local)
            if call.key == latest:
                call = replace(call, key=latest)  # which has its hash already
            if self._options.shapes == "error" and call.key not in self._compiled:
                self._refuse_other(call, args, kwargs)
        except InputError as problem:
            error = problem
        first_only = self._options.check == "first" and bool(self._agreed)
        if first_only and call is not None and call.key is latest and latest in self._agreed:
            return call, self._compiled[latest]
        if first_only and error is not None:
            # The other ranks do not wait to hear of it: they most likely met the same error.
            raise error
        if first_only:
            # Ranks for which nothing changed are on their way to other collectives.
            meet(self._context, f"{self._name} with another kind of call", _ALONE)
        # Whatever the error is, the other ranks wait to hear of it.
        entries = None if call is None else call.key.entries
        agreement.require_equal_calls(self._context, entries, error)
        assert call is not None
        if first_only and call.key in self._agreed:
            self._compiled.move_to_end(call.key)
            return call, self._compiled[call.key]
        compiled = self._find(call.key) or self._compile(args, kwargs, call)
        self._compare_inputs(compiled, call)
        return call, compiled

    def _known_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Compiled]:
        """The graph of a call inside of `torch.compile`, which must exist: ranks do not talk."""
        call = self._describe(args, kwargs, self._local)
        call = replace(call, key=replace(call.key, entries=of_fixed_sizes(call.key.entries)))
        compiled = self._find(call.key)
        exact = self._options.exact_rng and compiled is not None and compiled.random
        require_compilable(
            self._name,
            known=compiled is not None,
            exact=exact,
            accumulating=self._context.accumulating and torch.is_grad_enabled(),
            policies=compiled is not None and torch.is_grad_enabled() and self._keeps(compiled),
        )
        assert compiled is not None
        return call, compiled

    def _keeps(self, compiled: Compiled) -> bool:
        """Whether a policy that was asked for says what is kept of a graph.

        What the model checkpoints itself, and copies that ZeRO gathers again, nobody asked for.
        """
        asked = self._request.memory_policy is not None or self._given_plan is not None
        policies = compiled.plan.policies
        return asked and bool(policies.regions or policies.forms)

    def _describe(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        local: Mapping[str, LocalInput] | None,
    ) -> Call:
        entries, tensors = flatten_call(self._parameters_of_forward, args, kwargs)
        if local is not None:
            entries = whole_entries(entries, tensors, local)
        if not torch.is_grad_enabled():
            entries = tuple((path, without_gradient(entry)) for path, entry in entries)
        return Call(self._key(entries), tensors)

    def _key(self, entries: Any) -> CallKey:
        return CallKey(
            self._modes(),
            Surroundings.now(self._home, self._request.mixed),
            state_of(map(self._state_tensor, self._places)),
            entries,
        )

    def _refuse_other(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise InputError for a call unlike the one that the current mode was compiled with."""
        for key, compiled in self._compiled.items():
            if key.modes == call.key.modes:
                whole = example_call(args, kwargs, call, torch.device("meta"))
                compiled.traced.program.signature.bind(*whole)
                return

    def _find(self, key: CallKey) -> Compiled | None:
        """The graph of a key; one that gives more gradients than are asked for will do."""
        if key not in self._compiled:
            for other, compiled in self._compiled.items():
                if covers(other, key):
                    self._compiled[key] = compiled
                    break
        return self._compiled.get(key)

    def _compare_inputs(self, compiled: Compiled, call: Call) -> None:
        """Make sure that ranks which need the same piece of an input were given the same."""
        held, names = [], []
        for node in compiled.graph.sources("input"):
            path = node.target
            known = (self._local or {}).get(path)
            layout = None if known is None else known.layout
            names.append(path)
            held.append(agreement.piece_digest(call.tensors[path], layout, self._context))
        agreement.require_equal_inputs(self._context, names, held)
        if self._options.exact_rng:
            agreement.require_equal(
                self._context,
                agreement.tensor_digest(default_generator(self._home).get_state()),
                "the state of the random number generator",
                "exact_rng=True needs the same torch.manual_seed on every rank",
            )

    # -- compiling ----------------------------------------------------------------------------

    def compile_example(
        self, traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Compile the first graph from an example call with whole inputs, traced already."""
        call = self._describe(args, kwargs, None)
        self._compile_traced(traced, call.key.entries)

    def _compile(self, args: Sequence[Any], kwargs: Mapping[str, Any], call: Call) -> Compiled:
        """Trace, plan and emit the graph of one call; every rank calls this together."""
        why = self._why_another(call.key)
        error: Exception | None = None
        traced: Traced | None = None
        try:
            # What is made here must not become inference tensors, whatever surrounds the call.
            with torch.inference_mode(False):
                example = example_call(args, kwargs, call, self._home)
                with self._traceable() as model:
                    traced = trace_model(model, *example, self._request)
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = _refusal(why, problem) if why else problem
            error.__cause__ = problem if why else None
        agreement.share_outcome(self._context, error, "tracing")
        assert traced is not None
        return self._compile_traced(traced, call.key.entries, why)

    def _compile_traced(self, traced: Traced, entries: Any, why: str = "") -> Compiled:
        with torch.inference_mode(False), torch.enable_grad():
            pinned = {n: self.layout_of(n) for n in traced.program.params} if self.built else None
            given = None if self.built else self._given_plan
            plan = agree_on_plan(self._context, traced, self._request, given, pinned)
            compiled = compile_plan(self._context, traced, plan, self._request, self._home, why)
            model = self._model.value
            if model is not None:
                agreement.require_equal_state(self._context, _state(model))
                self.build(traced.program, plan.parameter_layouts)
                watch(model, self)
                agree_on_infinities(self._context.device_mesh)
                self._plan = plan
                self.example_inputs = local_inputs(compiled.graph, self._context)
                if self._options.exact_rng:
                    self._context.use_default_rng(self._home)
        self._in_one_piece = call_in_one_piece()
        self._compiled[self._key(entries)] = compiled
        while len(self._compiled) > MAX_GRAPHS:
            dropped, _ = self._compiled.popitem(last=False)
            self._agreed.discard(dropped)
            self._say(f"more than {MAX_GRAPHS} graphs: dropped the one not used for the longest")
        return compiled

    def _why_another(self, key: CallKey) -> str:
        """What makes another graph necessary, and says so; nothing for the first one."""
        if not self._compiled:
            return ""
        why = changes(self._compiled, key)
        self._say(f"compiling another graph, for a call that differs in {why}")
        return why

    def _say(self, text: str) -> None:
        if self._context.rank == 0:
            log.warning("%s: %s", self._name, text)

    @contextlib.contextmanager
    def _traceable(self) -> Iterator[nn.Module]:
        """What is traced: the model, later its skeleton in the state of this module."""
        model = self._model.value
        if model is not None:
            yield traceable(model, self._home)
            return
        assert self._skeleton is not None
        flags = {path: module.training for path, module in self._parts}
        with self._skeleton.like(self._state_tensors(), flags) as skeleton:
            yield skeleton


def _refusal(why: str, error: Exception) -> InputError:
    return InputError(f"this call differs from those before it in {why}; it fails: {error}")


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model that have values, by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if not tensor.is_meta}
