"""From an exported program to IR nodes: one walk over the fx graph, its regions inlined.

The walk keeps, for every fx node, a `Ref` (see `trace_alias`) or the plain constant it stands
for. Regions that export wraps into sub-graphs (no_grad, autocast) are walked in place, with the
mode they run in kept in `_Mode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.ir.errors import TraceError
from autopar.ir.graph import Node, Value, map_values
from autopar.ir.trace_alias import (
    NotFunctionalError,
    Ref,
    ViewStep,
    functional_name,
    pieces_of,
    read,
    write,
    written_argument,
)
from autopar.ir.trace_decisions import MARK, Decision
from autopar.ir.trace_grad import GradOracle, meta_call
from autopar.ir.trace_names import Namer, base_name
from autopar.ir.trace_origin import origin_of
from autopar.ir.trace_regions import CHECKS, find_regions, needed
from autopar.ir.trace_special import SPECIAL, Mode, Unfit, region_of_data, results_of
from autopar.ir.trace_spelling import IDENTITY, Target, canonical

#: In-place operators that change how a tensor is seen, not what it holds.
_RESHAPES_IN_PLACE = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}
#: Those that change how many elements there are.
_RESIZES = ("aten.resize_", "aten.set_.")


class Converter:
    """Reads fx graphs into `nodes`, a list of IR call nodes in execution order.

    autocast:
        the autocast that is on around the whole model
    """

    def __init__(self, namer: Namer, autocast: tuple[str, torch.dtype] | None = None) -> None:
        self.nodes: list[Node] = []
        self.decisions: list[Decision] = []
        self._namer = namer
        self._oracle = GradOracle()
        self.mode = Mode(autocast=autocast)
        self._detached: dict[str, Value] = {}
        self._memory_tracked = False

    def run(self, module: fx.GraphModule, arguments: Sequence[Any]) -> list[Any]:
        """Walk one fx graph. `arguments` and the outputs are `Ref`s and constants."""
        env: dict[fx.Node, Any] = {}
        remaining = iter(arguments)
        outer = self.mode
        if not self._memory_tracked:
            self._memory_tracked = any(_writes(n) for g in _graphs(module) for n in g.nodes)
        live = needed(module)
        regions = {node: r for r in find_regions(module.graph, live) for node in r.nodes}
        for node in module.graph.nodes:
            if node.op == "call_function" and node not in live:
                continue
            if node in regions:
                if node is regions[node].nodes[-1]:
                    first = regions[node].nodes[0]
                    self.mode = replace(self.mode, origin=origin_of(first.meta))
                    region_of_data(self, module, regions[node], env)
                continue
            match node.op:
                case "placeholder":
                    env[node] = next(remaining)
                case "get_attr":
                    env[node] = _attribute(module, node.target)
                case "call_function":
                    self.mode = replace(self.mode, origin=origin_of(node.meta))
                    env[node] = self._call_functionally(node, env)
                case "output":
                    self.mode = outer
                    return list(pytree.tree_leaves(_substitute(node.args[0], env)))
                case _:
                    raise TraceError(f"{node.op} {node.target}: not a node that export makes")
        raise TraceError("the exported graph has no output")

    def read(self, item: Any) -> Any:
        """The current `Value` of a ref; anything else as it is."""
        if isinstance(item, Unfit):
            raise TraceError(item.reason)
        if not isinstance(item, Ref):
            return item
        # A stale view is made again as it was made first, whatever mode it is read in.
        outer, self.mode = self.mode, replace(self.mode, grad=True)
        value = read(item, self.emit_one)
        self.mode = outer
        return value

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        grads: Sequence[bool] | None = None,
    ) -> tuple[Value, ...]:
        """Add one call on values, with its results' names and (unless given) gradients."""
        mode = self.mode
        if not mode.grad and op != "aten.detach.default":
            args, kwargs = map_values((args, dict(kwargs)), self._detach)
        call = Node(op, args, dict(kwargs))
        if grads is None:
            grads = self._oracle.results(op, args, kwargs, call.operands, dtypes)
        name = self._namer.fresh(base_name(op))
        names = [name] if len(shapes) == 1 else self._namer.parts(name, len(shapes))
        results = tuple(
            Value(name, tuple(shape), dtype, grad)
            for name, shape, dtype, grad in zip(names, shapes, dtypes, grads, strict=True)
        )
        attrs = {"autocast": mode.autocast} if mode.autocast else {}
        self.nodes.append(replace(call, results=results, origin=mode.origin, attrs=attrs))
        return results

    def emit_one(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Value:
        return self.emit(op, args, kwargs, [shape], [dtype])[0]

    def _detach(self, value: Value) -> Value:
        """The value without its gradient, made once."""
        if not value.grad:
            return value
        if value.name not in self._detached:
            self._detached[value.name] = self.emit_one(
                "aten.detach.default", (value,), {}, value.shape, value.dtype
            )
        return self._detached[value.name]

    # One fx call.

    def _call_functionally(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        try:
            return self._call(node, env)
        except NotFunctionalError as error:
            raise TraceError(
                f"{self.where()}: {error} writes in place where the tracer cannot follow. "
                f"Write it out of place (y = f(x)), with slices, or with torch.where"
            ) from None

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        target = node.target
        args, kwargs = _substitute((node.args, dict(node.kwargs)), env)
        if target is torch._C._set_grad_enabled:
            self.mode = replace(self.mode, grad=args[0])
            return None
        if getattr(target, "__name__", "") == "getitem" and not isinstance(args[0], Ref):
            return args[0][args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(target, args, kwargs)
        op = str(target)
        if op == MARK:
            self.decisions.append(Decision(self.read(args[0]), args[1], args[2]))
            return None
        if op.startswith(CHECKS) or (op == "aten.item.default" and not node.users):
            return None
        if not isinstance(target, torch._ops.OpOverload):
            raise TraceError(f"{self.where()}: {target} is not a tensor operator")
        if op == "aten.detach_.default":
            op = "aten.detach.default"
        elif target._schema.is_mutable:
            return self._in_place(op, target, args, kwargs, node)
        elif op in SPECIAL:
            found = SPECIAL[op](self, args, kwargs, node)
            if found is not None:
                return found
        return self._generic(op, args, kwargs, node)

    def _generic(self, op: str, args: Any, kwargs: Any, node: fx.Node) -> Any:
        fakes = results_of(node)
        values, options = self.values((tuple(args), dict(kwargs)))
        single = len(fakes) == 1 and not isinstance(node.meta["val"], (tuple, list))
        if single:
            first = next((n for n in node.args if isinstance(n, fx.Node)), None)
            before = first.meta.get("val") if first is not None else None
            device = before.device if isinstance(before, torch.Tensor) else None
            goal = Target(tuple(fakes[0].shape), fakes[0].dtype, fakes[0].device, device)
            call = canonical(op, values, options, goal)
            if call is IDENTITY:
                operand: Ref = args[0]
                if not self._aliased(fakes[0], node):
                    return Ref.root(values[0])
                if op != "aten.detach.default":
                    return operand
                step = ViewStep(op, (), {}, values[0].shape, values[0].dtype)
                return operand.view(step, values[0])
            op, values, options = call
        results = self.emit(
            op, values, options, [tuple(f.shape) for f in fakes], [f.dtype for f in fakes]
        )
        refs = self._refs(op, args, values, options, results, fakes, node)
        return refs[0] if single else refs

    def _refs(
        self,
        op: str,
        args: Any,
        values: tuple[Any, ...],
        options: dict[str, Any],
        results: tuple[Value, ...],
        fakes: Sequence[torch.Tensor],
        node: fx.Node,
    ) -> list[Ref]:
        """The results as roots of new storages, or as views of the first operand."""
        if not self._memory_tracked or not any(self._aliased(f, node) for f in fakes):
            return [Ref.root(r) for r in results]
        parent = args[0]
        if not isinstance(parent, Ref):
            raise NotFunctionalError(f"{op}, whose results share memory,")
        if len(results) == 1:
            r = results[0]
            steps = [ViewStep(op, values[1:], options, r.shape, r.dtype)]
        else:
            steps = pieces_of(op, values, options, list(results))
        if not self.mode.grad:
            steps = [replace(step, detached=True) for step in steps]
        return [parent.view(s, r) for s, r in zip(steps, results, strict=True)]

    def _aliased(self, fake: torch.Tensor, node: fx.Node) -> bool:
        """Whether a result shares memory with one of the call's operands."""
        if not self._memory_tracked:
            return False
        operands = (n.meta.get("val") for n in node.all_input_nodes)
        mine = _memory(fake)
        return any(isinstance(v, torch.Tensor) and _memory(v) == mine for v in operands)

    def _in_place(
        self, op: str, target: torch._ops.OpOverload, args: Any, kwargs: Any, node: fx.Node
    ) -> Any:
        """A call that writes to one operand: compute functionally, then write back."""
        place = written_argument(target)
        ref = kwargs.get("out") if place == "out" else args[0]
        if not isinstance(ref, Ref) or op.startswith(_RESIZES):
            raise NotFunctionalError(f"the operator {op}")
        self.check_writable(ref)
        if op.split(".")[1] in _RESHAPES_IN_PLACE:
            return self._generic(functional_name(target), args, kwargs, node)
        before: Value = self.read(ref)
        values, options = self.values((tuple(args), dict(kwargs)))
        if not self.mode.grad and any(self.read(r).grad for r in ref.lineage()):
            raise TraceError(
                f"{self.where()}: writes in place, without gradient, to a tensor that carries "
                f"one. Write x = torch.where(...) or x = x + ... outside of no_grad instead"
            )
        options.pop("out", None)
        write(ref, self._new_value(target, before, values, options), self.emit_one)
        return ref

    def _new_value(
        self, target: torch._ops.OpOverload, before: Value, values: Any, options: Any
    ) -> Value:
        """What a call leaves in the tensor it writes to, which held `before`."""
        shape, dtype = before.shape, before.dtype
        name = str(target).split(".")[1]
        if name in ("fill_", "zero_") and not (len(values) > 1 and isinstance(values[1], Value)):
            fill = values[1] if len(values) > 1 else 0
            return self.emit_one("aten.full_like.default", (before, fill), {}, shape, dtype)
        if name in ("fill_", "copy_"):
            new: Value = values[1]
            if not self.mode.grad:
                new = self._detach(new)
        else:
            plain = functional_name(target)
            try:
                made = meta_call(plain, values, options)
                made_shape, made_dtype = tuple(made.shape), made.dtype
            except Exception:  # the meta device does not know it: it keeps its operand's form
                made_shape, made_dtype = shape, dtype
            goal = Target(made_shape, made_dtype, torch.device("meta"), torch.device("meta"))
            call = canonical(plain, values, options, goal)
            new = before if call is IDENTITY else self.emit_one(*call, made_shape, made_dtype)
        if new.dtype != dtype:
            new = self.emit_one("aten.to.dtype", (new, dtype), {}, new.shape, dtype)
        if new.shape != shape:
            new = self.emit_one("aten.expand.default", (new, list(shape)), {}, shape, dtype)
        return new

    def check_writable(self, ref: Ref) -> None:
        kind, target = ref.storage.kind, ref.storage.target
        advice = {
            "param": "Change parameters outside of forward",
            "input": f"Write {target} = {target}.clone() first",
            "constant": "Register it with register_buffer",
        }
        if kind in advice:
            noun = {"param": "parameter", "input": "input", "constant": "tensor"}[kind]
            raise TraceError(
                f"{self.where()}: writes in place to the {noun} {target!r}. {advice[kind]}"
            )

    def _region(self, target: Any, args: Any, kwargs: Any) -> list[Any]:
        """A sub-graph that runs in another mode."""
        outer = self.mode
        name = target.name() if callable(getattr(target, "name", None)) else str(target)
        if name == "wrap_with_set_grad_enabled":
            enabled, module, *rest = args
            inner = replace(outer, grad=enabled)
        elif name == "wrap_with_autocast":
            device, dtype, enabled, _, module, *rest = args
            inner = replace(outer, autocast=(device, dtype) if enabled else None)
        else:
            raise TraceError(
                f"{self.where()}: the control-flow operator {name!r} is not supported. "
                f"Write it with ordinary tensor operators"
            )
        self.mode = inner
        outputs = self.run(module, rest)
        self.mode = outer
        return outputs

    # Helpers.

    def values(self, tree: Any) -> Any:
        """Every ref of a tree read, fx's immutable lists made plain ones."""
        if isinstance(tree, Unfit):
            raise TraceError(tree.reason)
        if isinstance(tree, Ref):
            return self.read(tree)
        if isinstance(tree, tuple):
            return tuple(self.values(item) for item in tree)
        if isinstance(tree, list):
            return [self.values(item) for item in tree]
        if isinstance(tree, dict):
            return {key: self.values(item) for key, item in tree.items()}
        return tree

    def where(self) -> str:
        return str(self.mode.origin)


def _substitute(tree: Any, env: Mapping[fx.Node, Any]) -> Any:
    if isinstance(tree, fx.Node):
        return env[tree]
    if isinstance(tree, tuple):
        return tuple(_substitute(item, env) for item in tree)
    if isinstance(tree, list):
        return [_substitute(item, env) for item in tree]
    if isinstance(tree, dict):
        return {key: _substitute(item, env) for key, item in tree.items()}
    return tree


def _graphs(module: fx.GraphModule) -> list[fx.Graph]:
    return [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _memory(fake: torch.Tensor) -> int:
    return fake.untyped_storage()._cdata


def _attribute(module: torch.nn.Module, path: Any) -> Any:
    found: Any = module
    for part in str(path).split("."):
        found = getattr(found, part)
    return found
