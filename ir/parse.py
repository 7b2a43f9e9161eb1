"""Reading the text form of a graph (`autopar.ir.text` describes it)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from autopar.ir.errors import GraphError, LayoutError, MeshError
from autopar.ir.graph import SOURCES, Graph, Node, Origin, Value
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.text import DTYPE_NAMES, TORCH_NAMES

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<ref>%[\w.]+)
    | (?P<number>-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|-inf\b)
    | (?P<word>[^\W\d][\w.]*)
    | (?P<mark>\.\.\.|[()\[\]{}:,=@+/])
    | (?P<comment>\#.*)
    | (?P<end>$)
    )""",
    re.VERBOSE,
)
_ORIGIN = re.compile(r"#\s*(?P<module>.*?)(?:\s\((?P<file>.*):(?P<line>\d+)\))?\s*$")

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_WORDS: dict[str, Any] = {
    "True": True,
    "False": False,
    "None": None,
    "inf": float("inf"),
    "nan": float("nan"),
    **_DTYPES,
    **TORCH_NAMES,
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "device": torch.device,
    "slice": slice,
}

T = TypeVar("T")


def parse_graph(text: str, *, origins: bool = False) -> Graph:
    """The graph that `print_graph` wrote.

    `origins` reads the comments after nodes back as their origins; otherwise comments are
    skipped. Raises GraphError, naming line and column, where the text is not a graph.
    """
    reader = _Reader()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        reader.read(_Line(line, number), origins)
    if reader.outputs is None:
        raise GraphError(f"line {max(1, len(lines))}: the text ends without a 'return' line")
    return Graph(tuple(reader.nodes), reader.outputs, tuple(reader.updates), reader.mesh)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    column: int


class _Line:
    """The tokens of one line, read from left to right."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self.comment = ""
        self.tokens: list[_Token] = []
        self.next = 0
        position = 0
        while not self.tokens or self.tokens[-1].kind != "end":
            found = _TOKEN.match(text, position)
            if found is None:
                position += len(text[position:]) - len(text[position:].lstrip())
                self.fail(f"cannot read {text[position:]!r}", _Token("", "", position))
            kind = found.lastgroup or ""
            position = found.end()
            if kind == "comment":
                self.comment = found[kind]
            else:
                self.tokens.append(_Token(kind, found[kind], found.start(kind)))

    @property
    def peek(self) -> _Token:
        return self.tokens[self.next]

    def take(self) -> _Token:
        token = self.peek
        if token.kind != "end":
            self.next += 1
        return token

    def at(self, *marks: str) -> bool:
        return self.peek.kind in ("mark", "word") and self.peek.text in marks

    def accept(self, mark: str) -> bool:
        found = self.at(mark)
        if found:
            self.next += 1
        return found

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            self.fail(f"expected {mark!r}, got {self.described(self.peek)}")

    def kind(self, kind: str, what: str) -> _Token:
        """The next token, which must be of one kind."""
        if self.peek.kind != kind:
            self.fail(f"expected {what}, got {self.described(self.peek)}")
        return self.take()

    def end(self) -> None:
        if self.peek.kind != "end":
            self.fail(f"expected the end of the line, got {self.described(self.peek)}")

    def described(self, token: _Token) -> str:
        return "the end of the line" if token.kind == "end" else repr(token.text)

    def list_of(self, item: Callable[[], T], close: str) -> list[T]:
        """Items separated by commas up to `close`; a trailing comma is allowed."""
        items: list[T] = []
        while not self.accept(close):
            if items:
                self.expect(",")
                if self.accept(close):
                    break
            items.append(item())
        return items

    def fail(self, problem: str, at: _Token | None = None) -> NoReturn:
        column = (at or self.peek).column
        raise GraphError(
            f"line {self.number}, column {column + 1}: {problem}\n"
            f"    {self.text}\n    {' ' * column}^"
        )


@dataclass
class _Reader:
    """What has been read so far."""

    mesh: Mesh | None = None
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    outputs: tuple[Any, ...] | None = None
    updates: list[tuple[str, Value]] = field(default_factory=list)

    def read(self, line: _Line, origins: bool) -> None:
        first = line.peek
        if first.kind == "end":
            return
        if line.accept("update"):
            name = self.string(line)
            line.expect("=")
            self.updates.append((name, self.reference(line)))
        elif self.outputs is not None:
            line.fail("only 'update' lines may follow 'return'")
        elif line.accept("mesh"):
            if self.mesh is not None or self.nodes:
                line.fail("the mesh is named once, before the first node", first)
            self.mesh = self.read_mesh(line, first)
        elif line.accept("return"):
            self.outputs = self.read_outputs(line)
        else:
            self.nodes.append(self.node(line, origins))
        line.end()

    def read_mesh(self, line: _Line, first: _Token) -> Mesh:
        axes = []
        while line.peek.kind != "end":
            name = line.kind("word", "an axis name").text
            line.expect("=")
            axes.append((name, self.integer(line)))
        try:
            return Mesh(tuple(axes))
        except MeshError as error:
            line.fail(str(error), first)

    def read_outputs(self, line: _Line) -> tuple[Any, ...]:
        outputs: list[Any] = []
        while line.peek.kind != "end":
            if outputs:
                line.expect(",")
            outputs.append(self.literal(line))
        return tuple(outputs)

    def node(self, line: _Line, origins: bool) -> Node:
        results: list[Value] = []
        while line.peek.kind == "ref":
            name = line.peek
            value = self.definition(line)
            if value.name in self.values or any(value.name == r.name for r in results):
                line.fail(f"%{value.name} is defined twice", name)
            results.append(value)
            if not line.accept(","):
                break
        if results:
            line.expect("=")
        op = line.kind("word", "an operator")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        target = ""
        if op.text in SOURCES:
            target = self.string(line)
        elif "." not in op.text:
            line.fail(f"{op.text!r} is no operator: its full name has a namespace", op)
        else:
            line.expect("(")
            line.list_of(lambda: self.argument(line, args, kwargs), ")")
        attrs: dict[str, Any] = {}
        if line.accept("{"):
            line.list_of(lambda: self.keyword(line, attrs), "}")
        self.values.update({value.name: value for value in results})
        origin = _origin(line.comment) if origins and line.comment else Origin()
        return Node(op.text, tuple(args), kwargs, tuple(results), target, origin, attrs)

    def argument(self, line: _Line, args: list[Any], kwargs: dict[str, Any]) -> None:
        follower = line.tokens[min(line.next + 1, len(line.tokens) - 1)]
        if line.peek.kind == "word" and follower.text == "=":
            self.keyword(line, kwargs)
        elif kwargs:
            line.fail("a positional argument follows a keyword")
        else:
            args.append(self.literal(line))

    def keyword(self, line: _Line, into: dict[str, Any]) -> None:
        key = line.kind("word", "a keyword")
        if key.text in into:
            line.fail(f"the keyword {key.text!r} is given twice", key)
        line.expect("=")
        into[key.text] = self.literal(line)

    def definition(self, line: _Line) -> Value:
        """``%name : dtype[dims] marks``."""
        start = line.take()
        line.expect(":")
        dtype = line.kind("word", "a dtype")
        if dtype.text not in _DTYPES:
            line.fail(f"unknown dtype {dtype.text!r}", dtype)
        line.expect("[")
        sizes = line.list_of(lambda: self.dimension(line), "]")
        dims = [axes for _, axes, _ in sizes]
        marks: dict[str, list[str]] = {}
        while line.at("grad", "rep", "sum", "whole", "unlaid"):
            mark = line.take().text
            has_axes = mark in ("rep", "sum")
            if has_axes:
                line.expect("(")
            marks[mark] = line.list_of(lambda: self.axis(line), ")") if has_axes else []
        layout = None
        stated = any(dims) or marks.keys() & {"rep", "sum", "whole"}
        if stated and "unlaid" in marks:
            line.fail(f"{start.text} is marked 'unlaid' and has a layout", start)
        if stated or (self.mesh is not None and "unlaid" not in marks):
            try:
                units = [unit for _, _, unit in sizes]
                layout = Layout.make(dims, marks.get("rep", ()), marks.get("sum", ()), units)
            except LayoutError as error:
                line.fail(str(error), start)
        shape = tuple(size for size, _, _ in sizes)
        return Value(start.text[1:], shape, _DTYPES[dtype.text], "grad" in marks, layout)

    def dimension(self, line: _Line) -> tuple[int, list[str], int]:
        """``size``, ``size@axis+axis`` or ``size@axis/unit``."""
        size = self.integer(line)
        axes, unit = [], 1
        if line.accept("@"):
            axes.append(self.axis(line))
            while line.accept("+"):
                axes.append(self.axis(line))
            if line.accept("/"):
                unit = self.integer(line)
        return size, axes, unit

    def axis(self, line: _Line) -> str:
        axis = line.kind("word", "a mesh axis")
        if self.mesh is not None and axis.text not in self.mesh.names:
            line.fail(f"unknown mesh axis {axis.text!r}: the mesh is {self.mesh}", axis)
        return axis.text

    def reference(self, line: _Line) -> Value:
        ref = line.kind("ref", "a value")
        if ref.text[1:] not in self.values:
            line.fail(f"{ref.text} is used before it is defined", ref)
        return self.values[ref.text[1:]]

    def string(self, line: _Line) -> str:
        token = line.kind("string", "a string")
        try:
            return str(json.loads(token.text))
        except json.JSONDecodeError as error:
            line.fail(f"string {token.text}: {error.msg}", token)

    def integer(self, line: _Line) -> int:
        token = line.kind("number", "a whole number")
        if not token.text.isdecimal():
            line.fail(f"expected a whole number, got {token.text!r}", token)
        return int(token.text)

    def literal(self, line: _Line) -> Any:
        token = line.peek
        if token.kind == "ref":
            return self.reference(line)
        if token.kind == "string":
            return self.string(line)
        line.take()
        if token.kind == "number":
            whole = token.text.removeprefix("-").isdecimal()
            return int(token.text) if whole else float(token.text)
        if token.kind == "word" and line.at("(") and token.text in _MAKERS:
            line.take()
            return self.made(line, token)
        if token.kind == "word" and token.text in _WORDS:
            return _WORDS[token.text]
        match token.text:
            case "[":
                return line.list_of(lambda: self.literal(line), "]")
            case "(":
                return self.tuple_of(line)
            case "{":
                return self.dict_of(line, token)
            case "...":
                return ...
        return line.fail(f"expected a value, got {line.described(token)}", token)

    def made(self, line: _Line, maker: _Token) -> Any:
        arguments = line.list_of(lambda: self.literal(line), ")")
        try:
            return _MAKERS[maker.text](*arguments)
        except (TypeError, RuntimeError) as error:
            line.fail(f"{maker.text}: {error}", maker)

    def tuple_of(self, line: _Line) -> Any:
        """A tuple; its only item needs the comma, so that ``(1)`` is not mistaken for one."""
        start = line.next
        items = line.list_of(lambda: self.literal(line), ")")
        if len(items) == 1 and line.tokens[line.next - 2].text != ",":
            line.fail("a tuple of one item is written with a comma, (x,)", line.tokens[start])
        return tuple(items)

    def dict_of(self, line: _Line, start: _Token) -> Any:
        pairs = line.list_of(lambda: self.pair(line), "}")
        try:
            return dict(pairs)
        except TypeError as error:
            line.fail(f"dict: {error}", start)

    def pair(self, line: _Line) -> tuple[Any, Any]:
        key = self.literal(line)
        line.expect(":")
        return key, self.literal(line)


def _origin(comment: str) -> Origin:
    """The origin that a comment spells; its class name and code are not in the text."""
    found = _ORIGIN.match(comment)
    assert found is not None
    module = found["module"]
    return Origin(
        module="" if module == str(Origin()) else module,
        file=found["file"] or "",
        line=int(found["line"] or 0),
    )
