"""Reading an exported program: its sources, its calls, its outputs and the buffers it updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from autopar.ir.calling import CallSignature
from autopar.ir.errors import TraceError
from autopar.ir.graph import Graph, Node, Origin, Value
from autopar.ir.trace_alias import Ref
from autopar.ir.trace_convert import Converter
from autopar.ir.trace_decisions import check_decisions, refuse_chance
from autopar.ir.trace_names import Namer, source_name


@dataclass(frozen=True)
class StateTensor:
    """One parameter or buffer of the model, whether or not the graph uses it.

    names:
        every dotted name it has, the canonical one first; tied tensors have several
    shape, dtype:
        of the whole tensor
    requires_grad:
        False for buffers and frozen parameters
    persistent:
        whether it is part of the model's `state_dict`
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    persistent: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


class Reader:
    """Reads one exported program of `model`.

    checkpointed:
        module paths whose calls get ``attrs["recompute"]``, the path
    """

    def __init__(
        self,
        model: nn.Module,
        signature: CallSignature,
        autocast: tuple[str, torch.dtype] | None,
        checkpointed: Sequence[str],
    ) -> None:
        self.params = _state(model.named_parameters(remove_duplicate=False))
        self.buffers = _state(model.named_buffers(remove_duplicate=False), _persistent_names(model))
        self.constants: dict[str, torch.Tensor] = {}
        self._paths = dict(model.named_modules())
        self._signature = signature
        self._checkpointed = [path for path in checkpointed if path in self._paths]
        self._namer = Namer()
        self._converter = Converter(self._namer, autocast)
        self._sources: dict[str, tuple[Node, Ref]] = {}

    def graph(self, program: torch.export.ExportedProgram) -> Graph:
        """The IR graph, sources first, its dead calls still in it.

        Raises TraceError for what the IR cannot hold.
        """
        arguments = self._arguments(program)
        outputs = self._converter.run(program.graph_module, arguments)
        results = self._outputs(program, outputs)
        updates = self._updates()
        by_kind: dict[str, list[Node]] = {
            kind: [] for kind in ("param", "buffer", "constant", "input")
        }
        for node, _ in self._sources.values():
            by_kind[node.op].append(node)
        sources = [node for nodes in by_kind.values() for node in nodes]
        calls = [self._mark_recomputed(node) for node in self._converter.nodes]
        graph = Graph((*sources, *calls), tuple(results), tuple(updates))
        refuse_chance(graph, self._converter.decisions)
        return check_decisions(graph, self._converter.decisions)

    # Sources.

    def _arguments(self, program: torch.export.ExportedProgram) -> list[Any]:
        """A ref or a constant for each placeholder of the exported graph."""
        inputs = iter(self._signature.order)
        aliases = {
            name: tensor.name
            for tensor in [*self.params.values(), *self.buffers.values()]
            for name in tensor.names
        }
        arguments: list[Any] = []
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
            fake = node.meta.get("val")
            match spec.kind:
                case InputKind.USER_INPUT if isinstance(fake, torch.Tensor):
                    argument = next(inputs)
                    if tuple(fake.shape) != argument.shape or fake.dtype != argument.dtype:
                        raise TraceError(
                            f"{argument.path}: export took it for a tensor of {tuple(fake.shape)}"
                        )
                    arguments.append(self._source("input", argument.path, fake))
                case InputKind.USER_INPUT:
                    arguments.append(getattr(spec.arg, "value", fake))
                case InputKind.PARAMETER | InputKind.BUFFER:
                    kind = "param" if spec.kind == InputKind.PARAMETER else "buffer"
                    arguments.append(self._source(kind, aliases[str(spec.target)], fake))
                case InputKind.CONSTANT_TENSOR:
                    arguments.append(self._constant(program, spec))
                case _:
                    raise TraceError(
                        f"{spec.target}: a {spec.kind.name.lower()} cannot be part of a traced "
                        f"model. Use tensors, parameters and buffers only"
                    )
        return arguments

    def _source(self, kind: str, target: str, like: torch.Tensor) -> Ref:
        """The ref of a source, the same one for every name of a tied tensor."""
        key = f"{kind}:{target}"
        if key not in self._sources:
            grad = like.requires_grad and (like.is_floating_point() or like.is_complex())
            value = Value(
                self._namer.fresh(source_name(target)), tuple(like.shape), like.dtype, grad
            )
            path = target.rpartition(".")[0]
            owner = self._paths.get(path) if kind in ("param", "buffer") else None
            origin = Origin(path, type(owner).__name__) if owner is not None else Origin()
            node = Node(kind, results=(value,), target=target, origin=origin)
            self._sources[key] = node, Ref.root(value, kind, target)
        return self._sources[key][1]

    def _constant(self, program: torch.export.ExportedProgram, spec: InputSpec) -> Ref:
        name = str(spec.target)
        tensor = program.constants[name]
        if tensor.requires_grad:
            raise TraceError(
                f"{name}: this tensor requires grad but is not a parameter of the model, so it "
                f"would not be trained. Register it with nn.Parameter"
            )
        self.constants[name] = tensor
        return self._source("constant", name, tensor)

    # Results.

    def _outputs(self, program: torch.export.ExportedProgram, outputs: list[Any]) -> list[Any]:
        for spec in program.graph_signature.output_specs:
            if spec.kind != OutputKind.USER_OUTPUT:
                raise TraceError(
                    f"{spec.target}: forward writes to this tensor in a way that cannot be traced. "
                    f"Write to a clone of it, or keep the state in a buffer"
                )
        return [self._output(item) for item in outputs]

    def _output(self, item: Any) -> Any:
        """An output's value; a copy of a source stays one, so that the caller may write to it."""
        value = self._converter.read(item)
        if isinstance(item, Ref) and not item.storage.kind and self._is_source(value):
            (value,) = self._converter.emit(
                "aten.clone.default", (value,), {}, [value.shape], [value.dtype]
            )
        return value

    def _is_source(self, value: Value) -> bool:
        return any(node.name == value.name for node, _ in self._sources.values())

    def _updates(self) -> list[tuple[str, Value]]:
        """The new values of the buffers that were written; no gradient outlives the call."""
        updates = []
        for node, ref in self._sources.values():
            if node.op == "buffer" and ref.storage.version:
                value = ref.storage.value
                if value.grad:
                    (value,) = self._converter.emit(
                        "aten.detach.default", (value,), {}, [value.shape], [value.dtype]
                    )
                updates.append((node.target, value))
        return updates

    def _mark_recomputed(self, node: Node) -> Node:
        for path in self._checkpointed:
            if node.origin.module == path or node.origin.module.startswith(f"{path}."):
                return replace(node, attrs={**node.attrs, "recompute": path})
        return node


def _state(
    named: Iterable[tuple[str, torch.Tensor]], persistent: set[str] | None = None
) -> dict[str, StateTensor]:
    """Canonical name -> description, tied tensors once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    found = {}
    for key, tensor in tensors.items():
        kept = persistent is None or any(name in persistent for name in names[key])
        found[names[key][0]] = StateTensor(
            tuple(names[key]), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, kept
        )
    return found


def _persistent_names(model: nn.Module) -> set[str]:
    """The names of the buffers that the model's `state_dict` holds."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
