"""The text form of a graph: `print_graph` here, `parse_graph` in `autopar.ir.parse`.

One line per node, what it makes on the left and how on the right::

    mesh dp=2 tp=4
    %ids : i64[8@dp, 128]              = input "input_ids"
    %w   : f32[50304@tp, 768] grad     = param "wte.weight"
    %e   : f32[8@dp, 128, 768] sum(tp) = aten.embedding.default(%w, %ids)
    return %e, None
    update "bn.running_mean" = %m

- A dimension is its whole size, then the axes that split it, major first (``8@dp+tp``), then the
  elements that stay together where it is cut, unless that is one (``1600@tp/64``).
- ``grad``: a gradient flows back to the value. ``rep(tp)``, ``sum(tp)``: Replicate and Partial
  along these axes; an axis that is not mentioned is Invariant.
- In a graph with a mesh every value has a layout unless marked ``unlaid``; in one without a mesh
  none has, unless it names axes or is marked ``whole`` (Invariant along every axis).
- ``{key=value}`` after a call are its `attrs`; ``#`` starts a comment (a node's origin).

Anything without a text form is printed after a ``!``, which the parser refuses.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch

from autopar.ir.graph import Graph, Node, Origin, Value
from autopar.ir.layout import Layout

_SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

#: Every dtype of torch -> its name in the text form: a short one, or torch's own.
DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

#: Values of torch that are written by name, such as ``torch.strided``.
TORCH_NAMES: dict[str, torch.memory_format | torch.layout] = {
    str(item): item
    for item in vars(torch).values()
    if isinstance(item, (torch.memory_format, torch.layout))
}

#: What a value name may look like after its ``%``.
VALUE_NAME = re.compile(r"[\w.]+")

#: Columns are aligned up to these widths; a longer entry sticks out alone.
_NAME_WIDTH = 24
_TYPE_WIDTH = 48


def print_graph(graph: Graph, *, origins: bool = False) -> str:
    """The graph as text that `parse_graph` reads back; `origins` adds them as comments."""
    laid = graph.mesh is not None
    lines = []
    if graph.mesh is not None:
        lines.append(" ".join(["mesh", *(f"{name}={size}" for name, size in graph.mesh.axes)]))
    lines.extend(format_nodes(graph.nodes, laid=laid, origins=origins))
    lines.append(" ".join(["return", ", ".join(map(format_literal, graph.outputs))]).rstrip())
    lines.extend(format_update(name, value) for name, value in graph.updates)
    return "\n".join(lines) + "\n"


def format_update(name: str, value: Value) -> str:
    return f"update {json.dumps(name)} = {format_literal(value)}"


def format_nodes(nodes: tuple[Node, ...], *, laid: bool, origins: bool = False) -> list[str]:
    """One line per node with the columns aligned; `laid`: the graph has a mesh."""
    rows = [(_left(node, laid), format_call(node)) for node in nodes]
    single = [parts[0] for parts, _ in rows if len(parts) == 1]
    name_width = max((len(n) for n, _ in single if len(n) <= _NAME_WIDTH), default=0)
    type_width = max((len(t) for _, t in single if len(t) <= _TYPE_WIDTH), default=0)
    lines = []
    for node, (parts, call) in zip(nodes, rows, strict=True):
        if len(parts) == 1:
            [(name, kind)] = parts
            line = f"{name:{name_width}} : {kind:{type_width}} = {call}"
        elif parts:
            line = ", ".join(f"{name} : {kind}" for name, kind in parts) + f" = {call}"
        else:
            line = call
        if origins and node.origin != Origin():
            line += f"  # {node.origin}"
        lines.append(line)
    return lines


def _left(node: Node, laid: bool) -> list[tuple[str, str]]:
    return [(f"%{value.name}", format_type(value, laid=laid)) for value in node.results]


def format_type(value: Value, *, laid: bool) -> str:
    """Dtype, shape and layout of a value, e.g. ``f32[8@dp, 768] grad sum(tp)``."""
    layout = value.layout
    if layout is not None and layout.rank != len(value.shape):
        return f"{DTYPE_NAMES[value.dtype]}{list(value.shape)} !{layout}"
    cuts = layout.cuts if layout else ("",) * len(value.shape)
    sizes = (f"{n}{cut}" for n, cut in zip(value.shape, cuts, strict=True))
    words = [f"{DTYPE_NAMES[value.dtype]}[{', '.join(sizes)}]"]
    if value.grad:
        words.append("grad")
    if layout is None:
        return " ".join([*words, "unlaid"] if laid else words)
    if layout.replicate:
        words.append(f"rep({', '.join(layout.replicate)})")
    if layout.partial:
        words.append(f"sum({', '.join(layout.partial)})")
    if not laid and layout == Layout.whole(layout.rank):
        words.append("whole")
    return " ".join(words)


def format_call(node: Node) -> str:
    """The right-hand side of a node's line."""
    if node.is_source:
        call = f"{node.op} {json.dumps(node.target)}"
    else:
        arguments = [format_literal(arg) for arg in node.args]
        arguments += [f"{key}={format_literal(arg)}" for key, arg in node.kwargs.items()]
        call = f"{node.op}({', '.join(arguments)})"
    if node.attrs:
        pairs = (f"{key}={format_literal(item)}" for key, item in node.attrs.items())
        call += " {" + ", ".join(pairs) + "}"
    return call


def format_literal(item: Any) -> str:
    """One argument; what has no text form comes out as ``!`` and its repr."""
    match item:
        case Value():
            return f"%{item.name}"
        case bool() | None | int():
            return repr(item)
        case float():
            return repr(item) if math.isfinite(item) else f"{item}"
        case complex():
            return f"complex({format_literal(item.real)}, {format_literal(item.imag)})"
        case str():
            return json.dumps(item)
        case list():
            return f"[{', '.join(map(format_literal, item))}]"
        case tuple():
            return f"({', '.join(map(format_literal, item))}{',' if len(item) == 1 else ''})"
        case dict():
            pairs = (f"{format_literal(k)}: {format_literal(v)}" for k, v in item.items())
            return "{" + ", ".join(pairs) + "}"
        case slice():
            parts = (item.start, item.stop, item.step)
            return f"slice({', '.join(map(format_literal, parts))})"
        case torch.dtype():
            return DTYPE_NAMES[item]
        case torch.device():
            return f'device("{item}")'
        case torch.memory_format() | torch.layout():
            return str(item)
    return "..." if item is Ellipsis else f"!{item!r}"


def has_text(item: Any) -> bool:
    """Whether an argument has a text form, all the way down."""
    if isinstance(item, (Value, str, int)):
        return True
    if isinstance(item, (list, tuple)):
        return all(map(has_text, item))
    if isinstance(item, dict):
        return all(has_text(part) for pair in item.items() for part in pair)
    if isinstance(item, slice):
        return all(map(has_text, (item.start, item.stop, item.step)))
    return not format_literal(item).startswith("!")
