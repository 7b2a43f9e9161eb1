"""An assignment problem that counts memory, put together from its parts."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule
from autopar.passes.build import Built
from autopar.passes.choices import Choices, node_choices
from autopar.passes.memory_nodes import Added, Tie, hold, hold_copy
from autopar.passes.memory_usage import Carrier, ProblemUsages
from autopar.passes.solver import Problem


def with_memory(
    built: Built, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, usages: ProblemUsages
) -> tuple[Problem, list[Tie]]:
    """The problem of `build_problem` (without sharing) with every carrier on it."""
    nodes, edges = list(built.problem.nodes), list(built.problem.edges)
    ties: list[Tie] = []

    def take(added: Added) -> None:
        nodes.extend(added.nodes)
        edges.extend(added.edges)
        ties.extend(added.ties)

    def put(index: int, carriers: tuple[Carrier, ...]) -> None:
        nodes[index], added = hold(nodes[index], index, carriers, len(nodes))
        take(added)

    choices: dict[str, Choices] = {}
    for node in graph.nodes:
        if node.is_source:
            index, layouts = built.sources[node.name]
            carried = usages.parameter if node.op == "param" else usages.source
            put(index, carried(node.results[0], layouts))
            continue
        choices[node.name] = node_choices(node, rules[node.name], mesh)
        put(built.strategies[node.name][0], usages.call(node, choices[node.name]))
    for name, (index, layouts) in built.relays.items():
        put(index, usages.relay(graph.value(name), layouts))
    for output, returned in zip(graph.outputs, built.outputs, strict=True):
        if returned is not None:
            put(returned[0], usages.output(output, returned[1]))
    for value, (node, result) in ((n.results[i], (n, i)) for n, i in graph.producers.values()):
        if node.is_source:
            index, layouts = built.sources[node.name]
        else:
            index, layouts = built.strategies[node.name][0], choices[node.name].results[result]
        if value.name in built.relays:
            relay, handed = built.relays[value.name]
            copy = usages.copy(value, layouts, handed, None)
            take(hold_copy(f"copy of {value.name}", copy, index, relay, len(nodes)))
            index, layouts = relay, handed
        for use, k in graph.consumers[value.name]:
            copy = usages.copy(value, layouts, choices[use.name].operands[k], use)
            at = built.strategies[use.name][0]
            take(hold_copy(f"copy of {value.name}", copy, index, at, len(nodes)))
    return Problem(tuple(nodes), tuple(edges)), ties
