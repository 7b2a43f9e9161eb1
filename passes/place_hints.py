"""Find the operators that hints mean, and turn the hints into fixes on them.

before::    %y : f32[8, 64] = aten.relu.default(%x)
            %z : f32[8, 64] = autopar.mark.default(%y, "{...layout: dp, None...}")

after::     %y : f32[8, 64] = aten.relu.default(%x)
            %z : f32[8, 64] = autopar.constrain(%y)          fixed: dimension 0 by dp
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.errors import HintError
from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.ir.rules import rule_for
from autopar.passes.choices import WHOLE, Fix
from autopar.passes.hints import (
    Entry,
    Hint,
    assign_axes,
    dimension_wants,
    operator_fix,
    parse_entries,
)

#: The marker operator that `shard()` leaves in a traced graph, and what replaces it.
MARK = "autopar.mark.default"
CONSTRAIN = "autopar.constrain"


@dataclass
class Placed:
    """A graph without markers, and what its hints fixed.

    fixes, hints:
        call node name -> its fix, and the hint it comes from
    notes:
        what a user may not expect of a hint
    """

    graph: Graph
    fixes: dict[str, Fix] = field(default_factory=dict)
    hints: dict[str, Hint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def place_hints(
    graph: Graph,
    mesh: Mesh,
    module_hints: Mapping[str, Hint],
    pattern_hints: Mapping[str, Hint],
    module_paths: Iterable[str],
) -> Placed:
    """Resolve all hints on a graph.

    mesh:
        the full mesh, axes of size 1 included (a hint may name them)
    module_hints:
        module path -> the hint that `shard(module, …)` left on it
    pattern_hints:
        shell-style pattern over module paths -> hint
    module_paths:
        the paths of all modules of the model

    Raises HintError (see `operator_fix`); also for a name that matches no module, a module
    without an operator of its own, and two hints that ask different things of one operator.
    """
    paths = list(module_paths)
    work = _Placing(graph, mesh)
    for path, hint in module_hints.items():
        work.on_module(path, hint, paths)
    for pattern, hint in pattern_hints.items():
        matched = [p for p in paths if fnmatch.fnmatchcase(p, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
            raise HintError(
                f"hint {pattern!r}: no module has this name"
                + (f"; the nearest are {', '.join(map(repr, near))}" if near else "")
            )
        for path in matched:
            work.on_module(path, replace(hint, where=f"{path!r} (pattern {pattern!r})"), paths)
    work.on_marks()
    return work.finish()


@dataclass(frozen=True)
class _LayoutHint:
    """A layout asked of one tensor.

    what:
        the tensor in words: "output 0 of aten.relu.default"
    short:
        whether two entries may stand for more dimensions (see `parse_entries`)
    """

    hint: Hint
    spec: Any
    what: str
    short: bool = False


class _Placing:
    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.placed = Placed(graph)
        # Value name -> the layout hint to put behind it.
        self.after: dict[str, _LayoutHint] = {}
        self.marks: dict[str, _LayoutHint] = {}
        # Name of the reading node -> the parameters that are to be stored in a given layout.
        self.stored: dict[str, dict[str, _LayoutHint]] = {}

    def on_module(self, path: str, hint: Hint, paths: list[str]) -> None:
        for node in self._operators_of(path, hint, paths):
            self._on_operator(node, hint)

    def _operators_of(self, path: str, hint: Hint, paths: list[str]) -> list[Node]:
        """The operator of a module, once for every time the module is called."""
        inside = [n for n in self.graph.calls if n.origin.module == path and n.op != MARK]
        own = [n for n in inside if not _moves_only(n)]
        with_params = [n for n in own if any(self._parameter(v) for v in n.operands)]
        own = with_params or own
        kinds = {n.op for n in own}
        if not own:
            below = [p for p in paths if p.startswith(f"{path}." if path else "") and p != path]
            raise HintError(
                f"{hint}: module {path!r} calls no operator of its own in this model"
                + (f"; hint one of its submodules, e.g. {below[:3]}" if below else "")
            )
        if len(kinds) > 1:
            raise HintError(
                f"{hint}: module {path!r} calls several operators {sorted(kinds)}; "
                "hint a submodule, or call shard() on the function or tensor inside its forward"
            )
        return own

    def _parameter(self, value: Value) -> Node | None:
        """The parameter that a value is, if it is one (perhaps marked)."""
        node, _ = self.graph.producers[value.name]
        while node.op == MARK:
            node, _ = self.graph.producers[node.operands[0].name]
        return node if node.op == "param" else None

    def _on_operator(self, node: Node, hint: Hint, order: Sequence[int] | None = None) -> None:
        rule = rule_for(node)
        if rule.opaque:
            raise HintError(
                f"{hint}: {node.op} in {node.origin} has no rule, so it cannot be split"
            )
        if hint.inputs is not None:
            parameters = [i for i, v in enumerate(node.operands) if self._parameter(v)]
            fix, stored = operator_fix(node, rule, hint, self.mesh, parameters, order)
            self._record(node.name, fix, hint)
            self._store(node, stored, hint)
        if hint.outputs is not None:
            self._constrain(node, rule, hint)

    def _record(self, name: str, fix: Fix, hint: Hint) -> None:
        known = self.placed.fixes.get(name)
        if known is not None and known != fix:
            other = self.placed.hints[name]
            raise HintError(
                f"{hint} conflicts with {other}: {hint.inputs or hint.outputs!r} "
                f"against {other.inputs or other.outputs!r}"
            )
        self.placed.fixes[name] = fix
        self.placed.hints[name] = hint

    def _store(self, node: Node, stored: Mapping[int, Any], hint: Hint) -> None:
        """Keep a parameter as its strategy says, whatever the operator needs of it."""
        for index, spec in stored.items():
            value = node.operands[index]
            parameter = self._parameter(value)
            assert parameter is not None
            what = f"parameter {parameter.target!r}"
            self.stored.setdefault(node.name, {})[value.name] = _LayoutHint(hint, spec, what)
            note = (
                f"{hint}: {what} is stored split as {spec!r} and gathered for "
                f"{node.op}, whose other inputs keep that loop whole"
            )
            if note not in self.placed.notes:
                self.placed.notes.append(note)

    def _constrain(self, node: Node, rule: Rule, hint: Hint) -> None:
        for k, (value, spec) in enumerate(zip(node.results, _per_result(node, hint), strict=False)):
            if spec is None:
                continue
            wanted = _LayoutHint(hint, spec, f"output {k} of {node.op}", rule.flatten_hint)
            other = self.after.get(value.name)
            if other is not None and other.spec != spec:
                raise HintError(
                    f"{hint} conflicts with {other.hint}: {spec!r} against {other.spec!r} "
                    f"for {wanted.what}"
                )
            self.after[value.name] = wanted

    def on_marks(self) -> None:
        for node in self.graph.calls:
            if node.op != MARK:
                continue
            spec = json.loads(node.args[1])
            if spec["kind"] == "layout":
                where = f"shard(tensor) in {node.origin}"
                outputs = _tuples(spec["outputs"])
                self.marks[node.name] = _LayoutHint(Hint(where, None, outputs), outputs, "tensor")
            elif spec["kind"] == "operator":
                where = f"shard({spec['function']}) in {node.origin}"
                hint = Hint(where, _tuples(spec["inputs"]), _tuples(spec["outputs"]))
                operator, order = self._marked_operator(node, spec, hint)
                self._on_operator(operator, hint, order)

    def _marked_operator(
        self, mark: Node, spec: dict[str, Any], hint: Hint
    ) -> tuple[Node, tuple[int, ...]]:
        """The one operator between a function's marked arguments and its marked result.

        Second: its operands in the order of the function's arguments, other ones behind them.
        """
        between: dict[str, Node] = {}
        argument_of: dict[str, int] = {}
        waiting = [mark.operands[0]]
        while waiting:
            value = waiting.pop()
            node, _ = self.graph.producers[value.name]
            given = json.loads(node.args[1]) if node.op == MARK else {}
            if given.get("kind") == "argument" and given["call"] == spec["call"]:
                argument_of[value.name] = given["index"]
            elif not node.is_source and node.name not in between:
                between[node.name] = node
                waiting.extend(node.operands)
        found = [n for n in between.values() if n.op != MARK]
        moving = [n for n in found if _moves_only(n)]
        if len(found) > 1:
            found = [n for n in found if n not in moving]
        if len(found) != 1 or len(argument_of) < spec["arguments"]:
            raise HintError(
                f"{hint}: shard() takes a function that is one operator, this one is "
                f"{sorted({n.op for n in found}) or 'none'}; hint the functions or tensors "
                "inside it"
            )
        (operator,) = found
        position = [argument_of.get(self._before_moves(v)) for v in operator.operands]
        indices = range(len(position))
        return operator, tuple(
            sorted(indices, key=lambda i: (position[i] is None, position[i] or 0, i))
        )

    def _before_moves(self, value: Value) -> str:
        """The name of the value that was re-arranged into this one."""
        node, _ = self.graph.producers[value.name]
        while _moves_only(node) and node.op != MARK:
            value = node.operands[0]
            node, _ = self.graph.producers[value.name]
        return value.name

    def finish(self) -> Placed:
        """Drop the markers and put the constraints in."""
        nodes: list[Node] = []
        renamed: dict[str, Value] = {}
        kept: dict[tuple[str, Any], Value] = {}

        def current(value: Value) -> Value:
            return renamed.get(value.name, value)

        for node in self.graph.nodes:
            stored = {
                name: self._stored_copy(nodes, kept, current(self.graph.value(name)), wanted, node)
                for name, wanted in self.stored.get(node.name, {}).items()
            }

            def reads(value: Value, stored: dict[str, Value] = stored) -> Value:
                return stored.get(value.name) or current(value)

            node = replace(
                node, args=map_values(node.args, reads), kwargs=map_values(node.kwargs, reads)
            )
            if node.op != MARK:
                nodes.append(node)
                for value in node.results:
                    if value.name in self.after:
                        result = replace(value, name=f"{value.name}_constrained")
                        renamed[value.name] = self._add_constraint(
                            nodes, value, self.after[value.name], node, result
                        )
            elif node.name in self.marks:
                (operand, result) = node.operands[0], node.results[0]
                self._add_constraint(nodes, operand, self.marks[node.name], node, result)
            else:
                renamed[node.name] = node.operands[0]
        outputs = map_values(self.graph.outputs, current)
        updates = tuple((name, current(v)) for name, v in self.graph.updates)
        self.placed.graph = replace(
            self.graph, nodes=tuple(nodes), outputs=outputs, updates=updates
        )
        return self.placed

    def _stored_copy(
        self,
        nodes: list[Node],
        kept: dict[tuple[str, Any], Value],
        value: Value,
        wanted: _LayoutHint,
        reader: Node,
    ) -> Value:
        """A parameter in the layout it is stored in, once for all its readers."""
        key = value.name, wanted.spec
        if key not in kept:
            result = replace(value, name=f"{value.name}_stored{len(kept) or ''}")
            kept[key] = self._add_constraint(nodes, value, wanted, reader, result)
        return kept[key]

    def _add_constraint(
        self, nodes: list[Node], value: Value, wanted: _LayoutHint, source: Node, result: Value
    ) -> Value:
        node = Node(CONSTRAIN, (value,), {}, (result,), origin=source.origin)
        nodes.append(node)
        label = f"{wanted.hint}: {wanted.what}, shape {tuple(value.shape)}"
        entries = parse_entries(
            wanted.spec, len(value.shape), label, self.mesh, wanted.what, short=wanted.short
        )
        fix = layout_fix(rule_for(node), entries, value.shape, label, self.mesh)
        self._record(result.name, fix, replace(wanted.hint, inputs=None, outputs=wanted.spec))
        return result


def _per_result(node: Node, hint: Hint) -> tuple[Any, ...]:
    """The parts of an out_strategy: one tuple per result, or just the one of a single result."""
    outputs = hint.outputs
    assert outputs is not None
    listed = all(spec is None or isinstance(spec, (tuple, list)) for spec in outputs)
    if not listed or (len(node.results) == 1 < len(outputs)):
        return (outputs,)
    if len(outputs) > len(node.results):
        raise HintError(
            f"{hint}: {node.op} has {len(node.results)} results, "
            f"the out_strategy {outputs!r} has {len(outputs)}"
        )
    return outputs


def layout_fix(
    rule: Rule, entries: Sequence[Entry], shape: tuple[int, ...], label: str, mesh: Mesh
) -> Fix:
    """What a layout fixes about the identity operator: its splits, and no Partial state."""
    dims, sizes = rule.operands[0], shape
    if len(entries) < len(dims):
        dims = (tuple(f for dim in dims[:-1] for f in dim), dims[-1])
        sizes = (math.prod(shape[:-1]), shape[-1])
    wanted = {
        factor: part
        for d, (dim, entry, size) in enumerate(zip(dims, entries, sizes, strict=True))
        for factor, part, _ in dimension_wants(
            rule, dim, entry, size, f"{label}, dimension {d}", mesh
        )
    }
    fix = assign_axes(wanted, mesh, label)
    used = {axis for axes in fix.exact.values() for axis in axes}
    rest = {axis: WHOLE for axis, size in mesh.axes if size > 1 and axis not in used}
    return replace(fix, roles=rest)


def _moves_only(node: Node) -> bool:
    """Whether a call only re-arranges one tensor."""
    name = node.op.split(".")[1] if "." in node.op else node.op
    return name in {
        "reshape", "view", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze",
        "contiguous", "clone", "alias", "detach", "flatten", "unflatten",
    }  # fmt: skip


def _tuples(tree: Any) -> Any:
    """JSON lists back to the tuples they were."""
    return tuple(_tuples(item) for item in tree) if isinstance(tree, list) else tree
