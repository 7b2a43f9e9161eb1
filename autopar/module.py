"""The module a user gets back: the model's own face on the emitted graphs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.utils import _pytree as pytree

from autopar import agreement
from autopar.compiler import Request, Traced, lower_plan, make_plan, trace_model
from autopar.ir.calling import CallSignature, TensorArgument
from autopar.ir.errors import NotCompiledError
from autopar.ir.graph import Graph, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.steps import STEPS
from autopar.plan_reports import with_reports
from autopar.plans import Plan
from autopar.runtime.emit import emit
from autopar.runtime.groups import RankContext
from autopar.runtime.pieces import piece
from autopar.runtime.random import agree_on_seed

#: The part of a module's training state that a graph depends on: the modules in eval mode.
Modes = frozenset[str]


@dataclass(frozen=True)
class Compiled:
    """One graph of the model (training or evaluation), ready to run on this rank."""

    traced: Traced
    plan: Plan
    graph: Graph
    run: fx.GraphModule
    signature: CallSignature
    random: bool


class ParallelModule(nn.Module):
    """A model split over the ranks of a mesh; made by `autoparallelize`.

    It is called as the model is, returns the same structure, and has the same parameter, buffer
    and module names. Parameters are `DTensor`s (plain parameters on a mesh of one rank), so
    optimizers, gradient clipping and checkpoints work on it unchanged. `train()` and `eval()`
    switch between two graphs that share the parameters; the second one is compiled when it is
    first called.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        context: RankContext,
        *,
        inputs: str,
        plan: Plan | None,
    ) -> None:
        super().__init__()
        self._model = _Hidden(model)
        self._request = request
        self._context = context
        self._inputs = inputs
        self._given_plan = plan
        self._compiled: dict[Modes, Compiled] = {}
        self._checked: set[Modes] = set()
        self._layouts: dict[str, Layout] = {}
        self.training = model.training
        context.prepare([self.mesh.names])

    # -- what was decided ---------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the graph compiled first."""
        self._require_compiled("the plan")
        return next(iter(self._compiled.values())).plan

    @property
    def mesh(self) -> Mesh:
        return self._request.mesh

    @property
    def graph_module(self) -> fx.GraphModule:
        """The emitted module of the current mode, on local tensors (for reading)."""
        self._require_compiled("the emitted graph")
        return self._compiled[self._modes()].run

    def partitioned_graph(self) -> Graph:
        """The IR graph that each rank runs in the current mode."""
        self._require_compiled("the partitioned graph")
        return self._compiled[self._modes()].graph

    # -- running ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        modes = self._modes()
        compiled = self._compiled.get(modes) or self.compile_for(args, kwargs)
        if modes in self._checked:
            tensors = compiled.signature.bind(args, kwargs)
        else:
            tensors = self._bind_together(compiled, args, kwargs)
            self._checked.add(modes)
        device = self._device()
        sources = iter(self._sources(compiled, tensors, device))
        with self._context.active():
            if compiled.random:
                agree_on_seed(self._context, device)
            outputs, updates = compiled.run(*sources)
        with torch.no_grad():
            for (name, _), new in zip(compiled.graph.updates, updates, strict=True):
                self.get_buffer(name).copy_(new)
        returned = [
            self._returned(value, out)
            for value, out in zip(compiled.graph.outputs, outputs, strict=True)
        ]
        return compiled.traced.program.unflatten(returned)

    def _sources(
        self, compiled: Compiled, tensors: Sequence[Tensor], device: torch.device
    ) -> Iterator[Tensor]:
        """The local tensor of every source node, in the order of the graph."""
        inputs = iter(tensors)
        for node in compiled.graph.nodes:
            if node.op == "param":
                parameter = self.get_parameter(node.target)
                yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
            elif node.op == "buffer":
                yield self.get_buffer(node.target)
            elif node.op == "constant":
                yield compiled.traced.program.constants[node.target].to(device)
            elif node.op == "input":
                tensor = next(inputs).to(device)
                layout = node.results[0].layout
                assert layout is not None
                if self._inputs == "global" and layout.split_axes:
                    tensor = piece(tensor, layout, self.mesh, self._context.coordinates)
                yield tensor

    def _returned(self, value: Any, out: Any) -> Any:
        """A split output as a DTensor; scalars and whole outputs as they are."""
        if not isinstance(value, Value) or value.layout is None or not value.layout.split_axes:
            return out
        return DTensor.from_local(
            out,
            self._context.device_mesh,
            placements(value.layout, self.mesh),
            run_check=False,
        )

    def _bind_together(
        self, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Bind the first call, making sure that all ranks were called alike."""
        tensors: list[Tensor] = []
        error: Exception | None = None
        try:
            tensors = compiled.signature.bind(args, kwargs)
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = problem
        agreement.share_outcome(self._context, error, "checking the inputs")
        held = []
        for node, tensor in zip(compiled.graph.sources("input"), tensors, strict=True):
            layout = node.results[0].layout
            assert layout is not None
            index = [self.mesh.index(self._context.coordinates, axes) for axes in layout.dims]
            part = "whole" if self._inputs == "global" else str(index)
            held.append({part: agreement.tensor_digest(tensor)})
        agreement.require_equal_inputs(self._context, compiled.signature.names, held)
        return tensors

    # -- compiling ----------------------------------------------------------------------------

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
        """Trace, plan and emit the graph of the current mode for one example call.

        Every rank calls it together; the first rank plans, the others receive its plan.
        """
        model = self._model.value
        error: BaseException | None = None
        traced: Traced | None = None
        try:
            with _training_modes(model, self._modes()):
                traced = trace_model(model, args, kwargs, self._request)
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = problem
        agreement.share_outcome(self._context, error, "tracing")
        assert traced is not None
        return self.compile_traced(traced)

    def compile_traced(self, traced: Traced) -> Compiled:
        """Plan and emit a graph that every rank has traced, for the current mode."""
        modes = self._modes()
        agreement.require_equal(
            self._context,
            traced.fingerprint,
            "the traced model",
            "build the same model, and give an example call of the same shapes, on every rank",
        )
        plan = self._plan(traced)
        digest = hashlib.sha256(json.dumps(plan.to_json()).encode()).hexdigest()
        # Before the plan is looked at: a wrong one must fail on all ranks, or on none.
        agreement.require_equal(
            self._context, digest, "the plan", "give every rank the same plan file"
        )
        graph = lower_plan(traced, plan, self._request)
        if not self._compiled:
            agreement.require_equal_state(self._context, _state(self._model.value))
            self._materialise(traced, plan)
        self._context.prepare(groups_of(graph))
        compiled = Compiled(
            traced,
            plan,
            graph,
            emit(graph, self._device()),
            self._signature(traced, graph),
            any(rule.always_assist for rule in traced.rules.values()),
        )
        self._compiled[modes] = compiled
        return compiled

    def _plan(self, traced: Traced) -> Plan:
        if not self._compiled and self._given_plan is not None:
            return with_reports(traced, self._given_plan)
        pinned = None
        if self._compiled:
            pinned = {
                name: self._layouts.get(name, Layout.whole(len(state.shape)))
                for name, state in traced.program.params.items()
            }
        plan = agreement.from_first_rank(
            self._context, lambda: make_plan(traced, self._request, pinned), "planning"
        )
        return with_reports(traced, plan)

    def _signature(self, traced: Traced, graph: Graph) -> CallSignature:
        """With local inputs, calls are checked against the local shapes."""
        signature = traced.program.signature
        if self._inputs == "global":
            return signature
        local = {
            node.target: node.results[0].layout.local_shape(  # type: ignore[union-attr]
                node.results[0].shape, self.mesh
            )
            for node in graph.sources("input")
        }

        def shrink(argument: TensorArgument) -> TensorArgument:
            return replace(argument, shape=local[argument.path])

        return replace(
            signature,
            example=pytree.tree_map_only(TensorArgument, shrink, dict(signature.example)),
            order=tuple(shrink(argument) for argument in signature.order),
        )

    def _materialise(self, traced: Traced, plan: Plan) -> None:
        """Build the module tree of the model, with this rank's pieces as its parameters."""
        model = self._model.value
        self._layouts = plan.parameter_layouts
        shells: dict[int, _Shell] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if path:
                shell = shells.setdefault(id(module), _Shell())
                shell.training = module.training
                parent, _, name = path.rpartition(".")
                super().get_submodule(parent)._modules[name] = shell
        program = traced.program
        for state in program.params.values():
            whole = model.get_parameter(state.name)
            layout = self._layouts.get(state.name, Layout.whole(len(state.shape)))
            parameter = nn.Parameter(self._held(whole.detach(), layout), whole.requires_grad)
            for name in state.names:
                parent, _, leaf = name.rpartition(".")
                super().get_submodule(parent)._parameters[leaf] = parameter
        for state in program.buffers.values():
            buffer = model.get_buffer(state.name).detach().clone()
            for name in state.names:
                parent, _, leaf = name.rpartition(".")
                owner = super().get_submodule(parent)
                owner._buffers[leaf] = buffer
                if not state.persistent:
                    owner._non_persistent_buffers_set.add(leaf)

    def _held(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's piece of a parameter, as a DTensor where there is more than one rank."""
        local = piece(whole, layout, self.mesh, self._context.coordinates).clone()
        if self._context.device_mesh is None:
            return local
        return DTensor.from_local(
            local, self._context.device_mesh, placements(layout, self.mesh), run_check=False
        )

    # -- state --------------------------------------------------------------------------------

    def _modes(self) -> Modes:
        """The modules in eval mode; before compilation the model's own flags count."""
        if not self._compiled:
            return _eval_modules(self._model.value)
        return _eval_modules(self)

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch all modules to training or evaluation mode; returns self."""
        if not self._compiled:
            self._model.value.train(mode)
        super().train(mode)
        return self

    def _device(self) -> torch.device:
        for parameter in self._model.value.parameters():
            return parameter.device
        return torch.device("cpu")

    def _require_compiled(self, what: str) -> None:
        if not self._compiled:
            raise NotCompiledError(
                f"{what}: not known before the first call, which compiles the module; "
                "give example inputs to autoparallelize(model, args, kwargs), or call the module "
                "once before making an optimizer"
            )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`. Raises NotCompiledError before the first call."""
        self._require_compiled("parameters")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As `nn.Module.named_buffers`. Raises NotCompiledError before the first call."""
        self._require_compiled("buffers")
        return super().named_buffers(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """As `nn.Module.get_submodule`. Raises NotCompiledError before the first call."""
        if target:
            self._require_compiled(f"module {target!r}")
        return super().get_submodule(target)

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelModule:
        """What `to`, `cuda`, `double` … go through: before compilation the model itself moves."""
        if not self._compiled:
            self._model.value._apply(fn, recurse)
        super()._apply(fn, recurse)
        return self

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As `nn.Module.state_dict`. Raises NotCompiledError before the first call.

        It needs no communication: every rank gets its own pieces as DTensors.
        """
        self._require_compiled("state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`. Raises NotCompiledError before the first call."""
        self._require_compiled("load_state_dict")
        return super().load_state_dict(*args, **kwargs)


class _Shell(nn.Module):
    """The place of one module of the model; holds its parameters and its training flag."""


class _Hidden:
    """Keeps a module out of another module's submodules."""

    def __init__(self, value: nn.Module) -> None:
        self.value = value


def placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """The DTensor placements of a layout of Shard and Invariant states."""
    found: list[Placement] = []
    for axis in mesh.names:
        state = layout.state(axis)
        found.append(DShard(state) if isinstance(state, int) else DReplicate())
    return found


def groups_of(graph: Graph) -> list[tuple[str, ...]]:
    """Every tuple of axes that a partitioned graph communicates over, and the whole mesh."""
    assert graph.mesh is not None
    found = [graph.mesh.names]
    for node in graph.nodes:
        if node.op in STEPS:
            found.append(node.args[1])
        for _, axes, _ in node.kwargs.get("split", ()):
            found.append(axes)
    return list(dict.fromkeys(found))


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _eval_modules(module: nn.Module) -> Modes:
    return frozenset(path for path, child in module.named_modules() if not child.training)


class _training_modes:  # noqa: N801 (a context manager)
    """Give the model's modules the training flags of a mode, and their own back afterwards."""

    def __init__(self, model: nn.Module, modes: Modes) -> None:
        self.modules = dict(model.named_modules())
        self.modes = modes

    def __enter__(self) -> None:
        self.before = {path: module.training for path, module in self.modules.items()}
        for path, module in self.modules.items():
            module.training = path not in self.modes

    def __exit__(self, *_: object) -> None:
        for path, module in self.modules.items():
            module.training = self.before[path]
