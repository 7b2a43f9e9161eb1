"""The markers that `shard()` leaves in a traced graph where it is called inside `forward`.

A function's hint marks its tensor arguments and its results::

    %x_m = autopar.mark.default(%x, "{kind: argument, call: 0, index: 0}")
    %w_m = autopar.mark.default(%w, "{kind: argument, call: 0, index: 1}")
    %y   = aten.matmul.default(%x_m, %w_m)
    %y_m = autopar.mark.default(%y, "{kind: operator, call: 0, arguments: 2, inputs: …}")

A tensor's hint is one marker of the kind ``layout``.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.ir.errors import HintError
from autopar.ir.graph import Graph, Node, Value
from autopar.passes.hints import Hint

MARK = "autopar.mark.default"


def mark_spec(node: Node) -> dict[str, Any]:
    """What a marker says, its strategies as tuples; nothing for any other node."""
    return _tuples(json.loads(node.args[1])) if node.op == MARK else {}


def before_casts(graph: Graph, value: Value) -> Value:
    """The value that markers, copies and casts made this one of."""
    node, _ = graph.producers[value.name]
    while node.op == MARK or keeps_shape(node):
        value = node.operands[0]
        node, _ = graph.producers[value.name]
    return value


def marked_operator(
    graph: Graph, mark: Node, spec: dict[str, Any], hint: Hint
) -> tuple[Node, tuple[int, ...]]:
    """The one operator between a function's marked arguments and its marked result.

    Second: its operands in the order of the function's arguments, other ones behind them.

    Raises HintError where the function is more than one operator, or none.
    """
    between: dict[str, Node] = {}
    argument_of: dict[str, int] = {}
    waiting = [mark.operands[0]]
    while waiting:
        value = waiting.pop()
        node, _ = graph.producers[value.name]
        given = mark_spec(node)
        if given.get("kind") == "argument" and given["call"] == spec["call"]:
            argument_of[value.name] = given["index"]
        elif not node.is_source and node.name not in between:
            between[node.name] = node
            waiting.extend(node.operands)
    found = [n for n in between.values() if n.op != MARK]
    if len(found) > 1:
        found = [n for n in found if not keeps_shape(n)]
    if len(found) != 1 or len(argument_of) < spec["arguments"]:
        ops = ", ".join(sorted(n.op for n in found)) or "none"
        raise HintError(
            f"{hint}: shard() takes a function that is one operator of all its tensor arguments, "
            f"this one is {ops}; hint the functions or tensors inside it"
        )
    (operator,) = found
    position = [argument_of.get(_argument(graph, v)) for v in operator.operands]
    indices = range(len(position))
    return operator, tuple(
        sorted(indices, key=lambda i: (position[i] is None, position[i] or 0, i))
    )


def _argument(graph: Graph, value: Value) -> str:
    """The name of the value that was copied or cast into this one."""
    node, _ = graph.producers[value.name]
    while keeps_shape(node):
        value = node.operands[0]
        node, _ = graph.producers[value.name]
    return value.name


def keeps_shape(node: Node) -> bool:
    """Whether a call copies or casts one tensor."""
    return _name(node) in {"contiguous", "clone", "alias", "detach", "to", "_to_copy"}


def moves_only(node: Node) -> bool:
    """Whether a call copies, casts or re-arranges one tensor."""
    return keeps_shape(node) or _name(node) in {
        "reshape", "view", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze",
        "flatten", "unflatten",
    }  # fmt: skip


def _name(node: Node) -> str:
    return node.op.split(".")[1] if "." in node.op else node.op


def _tuples(tree: Any) -> Any:
    """JSON lists back to the tuples they were."""
    if isinstance(tree, dict):
        return {key: _tuples(item) for key, item in tree.items()}
    return tuple(_tuples(item) for item in tree) if isinstance(tree, list) else tree
