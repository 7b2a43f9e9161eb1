"""Python decisions that depend on the values of tensors: frozen, and checked when the graph runs.

``if not torch.isfinite(x).all(): ...`` cannot be part of a graph. Where the example call has real
data, the model is run once to see how each such decision comes out; the trace goes the same way,
and the graph checks on every call that it still does::

    %ok = aten.all(...)
    %y  = autopar.checked(%loss, [%ok], [True], ["model.py:643 `if not torch.isfinite(x).all():`"])

Only truth values are frozen so. A number out of a tensor is likely to change with the data.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.ir.errors import TraceError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.trace_grad import overload
from autopar.ir.trace_origin import is_torch_file

#: The operator that marks a decision in the exported graph.
MARK = "autopar_trace.decided.default"

_LIBRARY = torch.library.Library("autopar_trace", "DEF")
_LIBRARY.define("decided(Tensor condition, bool value, str where) -> ()")
for _key in ("CompositeExplicitAutograd", "Meta"):
    _LIBRARY.impl("decided", lambda condition, value, where: None, _key)
fx.node.has_side_effect(torch.ops.autopar_trace.decided.default)

#: The compiler's own files, whose frames are not the user's.
_OUR_FILES = __file__.rsplit("trace_decisions", 1)[0]
#: Ways to ask a tensor for a truth value.
_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero)
_COMPARISONS = (torch.equal, torch.Tensor.equal)

#: The place of a decision: file, line, and the module whose code it is.
Place = tuple[str, int, int]


@dataclass(frozen=True)
class Decision:
    """One decision of a traced model: its condition, how it came out, and where it is."""

    condition: Value
    outcome: bool
    where: str


@dataclass
class Decisions:
    """How the decisions of one run came out, in their order at each place."""

    found: dict[Place, list[bool]] = field(default_factory=dict)


class Recording(TorchFunctionMode):
    """Notes every decision of a run on real tensors.

    ignored:
        modules whose decisions are not noted, nor those of modules called by them
    """

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.decisions = Decisions()
        self._ignored = ignored

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if _condition(func, args) is not None:
            place, modules = _place()
            if not modules & self._ignored:
                self.decisions.found.setdefault(place, []).append(bool(made))
        return made


class Replaying(TorchFunctionMode):
    """Takes every decision of a trace as it came out before, and marks it in the graph."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions
        self._met: Counter[Place] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        condition = _condition(func, args)
        if condition is None:
            return func(*args, **(kwargs or {}))
        place, _ = _place()
        outcomes = self._decisions.found.get(place, ())
        number = self._met[place]
        self._met[place] += 1
        tensor = condition()
        if number >= len(outcomes) or not isinstance(tensor, FakeTensor):
            return func(*args, **(kwargs or {}))
        torch.ops.autopar_trace.decided(tensor, outcomes[number], _words(place))
        return outcomes[number]

    def skip(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a decision that something else has taken."""
        if _condition(func, args) is not None:
            self._met[_place()[0]] += 1


def _condition(func: Any, args: tuple[Any, ...]) -> Callable[[], Tensor] | None:
    """What makes the tensor that a call asks for its truth; None for every other call."""
    if func in _TRUTHS:
        return lambda: args[0]
    if func is torch.Tensor.item and args[0].dtype == torch.bool:
        return lambda: args[0]
    if func in _COMPARISONS and args[0].shape == args[1].shape:
        return lambda: (args[0] == args[1]).all()
    return None


def _place() -> tuple[Place, set[int]]:
    """Where the caller's own code is, and the modules whose `forward` is running."""
    frame: FrameType | None = sys._getframe(2)
    file, line, owner = "", 0, 0
    modules: set[int] = set()
    while frame is not None:
        name = frame.f_code.co_filename
        if not file and not is_torch_file(name) and not name.startswith(_OUR_FILES):
            file, line = name, frame.f_lineno
        if frame.f_code.co_name == "forward":
            self = frame.f_locals.get("self")
            if isinstance(self, nn.Module):
                owner = owner or id(self)
                modules.add(id(self))
        frame = frame.f_back
    return (file, line, owner), modules


def _words(place: Place) -> str:
    file, line, _ = place
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" `{code}`" if code else "")


def record(model: nn.Module, args: Any, kwargs: Any, ignored: set[int]) -> Decisions:
    """The decisions of one run of the model on real tensors; its buffers come out as they were."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    recording = Recording(ignored)
    with _disable_current_modes(), torch.no_grad(), recording:
        model(*args, **kwargs)
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    return recording.decisions


def refuse_chance(graph: Graph, decisions: Sequence[Decision]) -> None:
    """Raise TraceError for a decision that is a matter of chance alone, as dropping layers is."""
    for decision in decisions:
        drawn, sources, seen = False, False, set()
        queue = [decision.condition.name]
        while queue:
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            node = graph.producers[name][0]
            drawn |= _is_random(node)
            sources |= node.op in ("input", "param", "buffer")
            queue.extend(v.name for v in node.operands)
        if drawn and not sources:
            raise TraceError(
                f"{decision.where}: this decision is made by a random number, and a trace would "
                f"freeze it. Switch it off (layers are dropped with layerdrop, 0 keeps them), or "
                f"multiply by a random mask instead"
            )


def _is_random(node: Node) -> bool:
    if node.is_source or node.op.startswith("autopar."):
        return False
    return torch.Tag.nondeterministic_seeded in overload(node.op).tags


def check_decisions(graph: Graph, decisions: Sequence[Decision]) -> Graph:
    """Pass the first tensor output through ``autopar.checked``, with every condition."""
    place = next((i for i, v in enumerate(graph.outputs) if isinstance(v, Value)), None)
    if not decisions or place is None:
        return graph
    value = graph.outputs[place]
    args = (
        value,
        [d.condition for d in decisions],
        [d.outcome for d in decisions],
        [d.where for d in decisions],
    )
    taken = set(graph.producers)
    name = next(n for k in itertools.count() if (n := f"checked_{k}") not in taken)
    result = replace(value, name=name)
    origin = graph.producers[value.name][0].origin
    node = Node("autopar.checked", args, {}, (result,), origin=origin)
    outputs = (*graph.outputs[:place], result, *graph.outputs[place + 1 :])
    return replace(graph, nodes=(*graph.nodes, node), outputs=outputs)
