"""What is kept for the backward pass, as nodes of a partitioned graph say it.

``attrs["recompute"]`` names the region that a call is computed again with; the calls of a region
stand one behind the other. ``attrs["keep"]`` says in what form a call, or a region, keeps what its
backward reads. ``attrs["regather"]`` are the results of a gather that are not kept but made again::

    %w_1 : f32[8, 4] grad rep(dp) = autopar.all_gather(%w, ("dp",), 0, "R") {regather=(0,)}
    %h : f32[6@dp, 8] grad = aten.linear.default(%x, %w_1) {recompute="h.0"}
    %y : f32[6@dp, 8] grad = aten.relu.default(%h) {recompute="h.0"}
    %z : f32[6@dp, 8] grad = aten.tanh.default(%y) {keep="offload"}

``attrs["state"]`` of a parameter says where its optimizer state is between steps::

    %w : f32[8@dp, 4] grad = param "w" {state="offload"}
"""

from __future__ import annotations

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.reduced import is_parameter_cast
from autopar.ir.steps import STEPS

#: The keys of `Node.attrs`.
RECOMPUTE, KEEP, REGATHER = "recompute", "keep", "regather"

#: Where a parameter's optimizer state is: a key of `Node.attrs`, whose one value is `OFFLOAD`.
STATE = "state"
#: Of how many bytes of parameters the state that is kept on the host is on the device at a time.
#: Large enough that copies run at the full rate of their link, and small beside a device.
STEP_BYTES = 32 * 2**20

#: The values of ``attrs["keep"]``.
OFFLOAD, COMPRESS, COMPRESS8 = "offload", "compress", "compress8"
FORMS = (OFFLOAD, COMPRESS, COMPRESS8)


def resident(graph: Graph) -> frozenset[str]:
    """The values that come of nothing but sources: parameters and inputs, and copies of them.

    They are there in the backward pass in any case, or can be gathered again.
    """
    found: set[str] = set()
    for node in graph.nodes:
        copied = moves(node) and all(v.name in found for v in node.operands)
        if node.is_source or copied:
            found |= {v.name for v in node.results}
    return frozenset(found)


def gathered_again(graph: Graph) -> frozenset[str]:
    """The values whose memory may be that of a gather which is made again."""
    found: set[str] = set()
    for node in graph.calls:
        seen = bool(node.operands) and all(v.name in found for v in node.operands)
        if node.attrs.get(REGATHER) or seen:
            found |= {v.name for v in node.results}
    return frozenset(found)


def moves(node: Node) -> bool:
    """Whether a call only moves a value between layouts, or casts a parameter on its way."""
    return node.op in STEPS or node.op == FUSED or is_parameter_cast(node)


def regions(nodes: tuple[Node, ...]) -> list[tuple[str, list[Node]]]:
    """Runs of calls that belong to one region; a call that belongs to none stands alone."""
    found: list[tuple[str, list[Node]]] = []
    for node in nodes:
        name = node.attrs.get(RECOMPUTE, "")
        if name and found and found[-1][0] == name:
            found[-1][1].append(node)
        else:
            found.append((name, [node]))
    return found


def reads_from_outside(nodes: list[Node]) -> list[Value]:
    """The values that some calls read and none of them makes, each once, in order."""
    made = {v.name for node in nodes for v in node.results}
    found: dict[str, Value] = {}
    for node in nodes:
        for value in node.operands:
            if value.name not in made:
                found.setdefault(value.name, value)
    return list(found.values())
