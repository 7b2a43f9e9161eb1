"""Find the operators that hints mean, and turn the hints into fixes on them.

before::    %y : f32[8, 64] = aten.relu.default(%x)
            %z : f32[8, 64] = autopar.mark.default(%y, "{...layout: dp, None...}")

after::     %y : f32[8, 64] = aten.relu.default(%x)
            %z : f32[8, 64] = autopar.constrain(%y)          fixed: dimension 0 by dp
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.errors import HintError
from autopar.ir.graph import Graph, Node, Value, map_values
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.ir.rules import rule_for
from autopar.passes.choices import Fix
from autopar.passes.hints import Hint, layout_fix, operator_fix
from autopar.passes.marks import MARK, before_casts, mark_spec, marked_operator, moves_only

#: What a layout hint becomes.
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
    module_paths: Mapping[str, str],
) -> Placed:
    """Resolve all hints on a graph.

    mesh:
        the full mesh, axes of size 1 included (a hint may name them)
    module_hints:
        module path -> the hint that `shard(module, …)` left on it
    pattern_hints:
        shell-style pattern over module paths -> hint
    module_paths:
        the paths of all modules of the model, each with the first path of the same module: a
        hint on one holds for calls through any of them

    Raises HintError (see `operator_fix`); also for a name that matches no module, a module
    without an operator of its own, and two hints that ask different things of one operator.
    """
    work = _Placing(graph, mesh, module_paths)
    for path, hint in module_hints.items():
        work.on_module(path, hint)
    for pattern, hint in pattern_hints.items():
        matched = [path for path in module_paths if fnmatch.fnmatchcase(path, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, list(module_paths), n=3, cutoff=0.4)
            raise HintError(
                f"hint {pattern!r}: no module has this name"
                + (f"; the nearest are {', '.join(map(repr, near))}" if near else "")
            )
        modules: dict[str, str] = {}
        for path in matched:
            modules.setdefault(module_paths[path], path)
        for path in modules.values():
            where = repr(path) if path == pattern else f"{path!r} (pattern {pattern!r})"
            work.on_module(path, replace(hint, where=where))
    work.on_marks()
    return work.finish()


@dataclass(frozen=True)
class _LayoutHint:
    """A layout asked of one tensor.

    what:
        the tensor in words: "output 0 of aten.relu.default"
    short:
        whether two entries may stand for more dimensions (see `tensor_wants`)
    """

    hint: Hint
    spec: Any
    what: str
    short: bool = False


class _Placing:
    def __init__(self, graph: Graph, mesh: Mesh, paths: Mapping[str, str]) -> None:
        self.graph, self.mesh, self.paths = graph, mesh, paths
        self.placed = Placed(graph)
        # Value name -> the layout hint to put behind it.
        self.after: dict[str, _LayoutHint] = {}
        self.marks: dict[str, _LayoutHint] = {}
        # Name of the reading node -> the parameters that are to be stored in a given layout.
        self.stored: dict[str, dict[str, _LayoutHint]] = {}

    def on_module(self, path: str, hint: Hint) -> None:
        for node in self._operators_of(path, hint):
            self._on_operator(node, None, hint)

    def _operators_of(self, path: str, hint: Hint) -> list[Node]:
        """The operator of a module, once for every time the module is called."""
        names = {name for name, first in self.paths.items() if first == self.paths[path]}
        inside = [n for n in self.graph.calls if n.origin.module in names and n.op != MARK]
        own = [n for n in inside if not moves_only(n)]
        with_params = [n for n in own if any(self._parameter(v) for v in n.operands)]
        own = with_params or own
        kinds = {n.op for n in own}
        if not own:
            prefix = f"{path}." if path else ""
            below = [p for p in self.paths if p.startswith(prefix) and p != path]
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
        """The parameter that a value is, if it is one (perhaps marked or cast)."""
        node, _ = self.graph.producers[before_casts(self.graph, value).name]
        return node if node.op == "param" else None

    def _on_operator(self, node: Node, order: Sequence[int] | None, hint: Hint) -> None:
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
            spec = mark_spec(node)
            if spec.get("kind") == "layout":
                hint = Hint(f"shard(tensor) in {node.origin}", None, spec["outputs"])
                self.marks[node.name] = _LayoutHint(hint, spec["outputs"], "tensor")
            elif spec.get("kind") == "operator":
                where = f"shard({spec['function']}) in {node.origin}"
                hint = Hint(where, spec["inputs"], spec["outputs"])
                operator, order = marked_operator(self.graph, node, spec, hint)
                self._on_operator(operator, order, hint)

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
        fix = layout_fix(
            wanted.spec,
            rule_for(node),
            value.shape,
            label,
            self.mesh,
            wanted.what,
            short=wanted.short,
        )
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
