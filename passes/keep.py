"""Memory policies on the graph that ranks run: which calls run again, which gathers, what is kept.

before::    %w_1 : f32[8, 4] grad rep(dp) = autopar.all_gather(%w, ("dp",), 0, "R")
            %h : f32[6@dp, 8] grad = aten.linear.default(%x, %w_1)
            %y : f32[6@dp, 8] grad = aten.relu.default(%h)
            %z : f32[6@dp, 8] grad = aten.add.Tensor(%y, %x)

after::     %w_1 : f32[8, 4] grad rep(dp) = autopar.all_gather(%w, ("dp",), 0, "R") {regather=(0,)}
            %h : f32[6@dp, 8] grad = aten.linear.default(%x, %w_1) {recompute="h.0"}
            %y : f32[6@dp, 8] grad = aten.relu.default(%h) {recompute="h.0"}
            %z : f32[6@dp, 8] grad = aten.add.Tensor(%y, %x)

A region takes in the steps between its calls, so their collectives run again with it. Parameters
on their way into the graph stay outside, before it: whether they are gathered again is their own
policy. What ends a region and keeps nothing leaves it, as nothing of it is needed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.fused import FUSED
from autopar.ir.graph import Graph, Node
from autopar.ir.keep import (
    COMPRESS,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    REGATHER,
    STATE,
    moves,
    regions,
    resident,
)
from autopar.ir.packed import INDICES, MASKS, SIGNS
from autopar.ir.steps import STEPS
from autopar.passes.memory.effects import Effects
from autopar.passes.policies import Policies
from autopar.passes.stand_ins import callable_of

#: The attributes that this pass writes.
_KEYS = frozenset({RECOMPUTE, KEEP, REGATHER, STATE})
#: The steps whose result is their operand.
_SAME = frozenset({"autopar.to_replicate", "autopar.to_invariant", "autopar.mask"})


def apply_policies(graph: Graph, policies: Policies) -> Graph:
    """A partitioned graph with the policies of the traced graph that it came from."""
    plain = tuple(_without(node) for node in graph.nodes)
    graph = graph.with_nodes(plain)
    if not policies:
        return graph
    saves = _Saves(graph)
    graph = graph.with_nodes(_with_regions(graph, policies.regions, saves))
    graph = graph.with_nodes(_with_forms(graph, policies.forms, saves))
    if policies.regather:
        graph = _with_gathers(graph, policies.regather, saves)
    if policies.offloads_optimizer:
        graph = graph.with_nodes(tuple(map(_with_state, graph.nodes)))
    return graph


def _with_state(node: Node) -> Node:
    trained = node.op == "param" and node.results[0].grad
    return _with(node, STATE, OFFLOAD) if trained else node


def _without(node: Node) -> Node:
    if not _KEYS & set(node.attrs):
        return node
    left = {k: v for k, v in node.attrs.items() if k not in _KEYS}
    return replace(node, attrs=left)


def _with(node: Node, key: str, value: Any) -> Node:
    return replace(node, attrs={**node.attrs, key: value})


class _Saves:
    """Which storages the calls of a graph keep for backward.

    home:
        value -> the number of the storage it lies in
    of:
        call -> the storages that autograd keeps for it
    """

    def __init__(self, graph: Graph) -> None:
        effects = Effects(graph, callable_of)
        self.home: dict[str, int] = {}
        self.of: dict[str, set[int]] = {}
        count = 0
        for node in graph.nodes:
            if node.is_source or moves(node):
                self.of[node.name] = set()
                same = node.op in _SAME or (node.op == FUSED and not _gathers(node))
                for k, value in enumerate(node.results):
                    if same:
                        self.home[value.name] = self.home[node.operands[k].name]
                    else:
                        self.home[value.name] = count = count + 1
                continue
            effect = effects.forward(node)
            homes = [self.home[v.name] for v in node.operands]
            for _ in effect.fresh:
                homes.append(count := count + 1)
            for value, home in zip(node.results, effect.homes, strict=True):
                self.home[value.name] = homes[home]
            self.of[node.name] = {homes[k] for k in effect.saved} if node.differentiable else set()


def _gathers(node: Node) -> bool:
    return any(op == "autopar.all_gather" for op, *_ in node.args[1])


def _with_regions(graph: Graph, named: Mapping[str, str], saves: _Saves) -> tuple[Node, ...]:
    if not named:
        return graph.nodes
    held = resident(graph)
    nodes: list[Node] = []
    open_at: int | None = None
    name = ""
    for node in graph.nodes:
        if node.is_source:
            nodes.append(node)
            continue
        outside = moves(node) and all(v.name in held for v in node.results)
        if outside:
            # It reads nothing but parameters and inputs: it may as well run before the region.
            if open_at is None:
                nodes.append(node)
            else:
                nodes.insert(open_at, node)
                open_at += 1
            continue
        own = name if moves(node) and open_at is not None else named.get(node.name, "")
        if own != name or not own:
            open_at, name = (len(nodes), own) if own and not moves(node) else (None, "")
        nodes.append(_with(node, RECOMPUTE, name) if name else node)
    done: list[Node] = []
    for region, part in regions(tuple(nodes)):
        keeps = len(part)
        while keeps and not saves.of[part[keeps - 1].name]:
            keeps -= 1
        if region and keeps < 2:
            keeps = 0
        done += part[:keeps] if region else part
        if region:
            done += [_without(node) for node in part[keeps:]]
    return tuple(done)


def _with_forms(graph: Graph, wanted: Mapping[str, str], saves: _Saves) -> tuple[Node, ...]:
    """Mark the calls that keep what they save in another form, and the regions that do."""
    of_region = {
        node.attrs[RECOMPUTE]: wanted[node.name]
        for node in graph.calls
        if RECOMPUTE in node.attrs and node.name in wanted
    }
    in_full = {
        storage
        for node in graph.calls
        for storage in saves.of[node.name]
        if node.op not in SIGNS and node.op not in INDICES
    }
    nodes = []
    for node in graph.nodes:
        form = wanted.get(node.name, "")
        if RECOMPUTE in node.attrs:
            form = of_region.get(node.attrs[RECOMPUTE], "")
        elif (
            moves(node)
            or not node.differentiable
            or node.is_source
            or (form == COMPRESS and not _packs(node, saves, in_full))
        ):
            form = ""
        nodes.append(_with(node, KEEP, form) if form else node)
    return tuple(nodes)


def _packs(node: Node, saves: _Saves, in_full: set[int]) -> bool:
    """Whether packing without loss makes what a call keeps smaller."""
    if node.op in SIGNS:
        # What somebody else keeps as it is costs nothing more.
        return not saves.of[node.name] & in_full
    flags = any(v.dtype == torch.bool for v in (*node.operands, *node.results))
    return node.op in MASKS or node.op in INDICES or flags


def _with_gathers(graph: Graph, wanted: frozenset[str], saves: _Saves) -> Graph:
    """Mark the gathers of parameters whose results something keeps for backward."""
    parameter = {node.name: node.target for node in graph.sources("param")}
    kept: set[int] = set()
    for node in graph.calls:
        kept |= saves.of[node.name]
        if RECOMPUTE in node.attrs:
            kept |= {saves.home[v.name] for v in node.operands}
    nodes = []
    for node in graph.nodes:
        if moves(node) and node.op in (*STEPS, FUSED):
            came = [parameter.get(v.name) for v in node.operands]
            for value, source in zip(node.results, came, strict=True):
                if source is not None:
                    parameter[value.name] = source
            members = tuple(
                k
                for k, (value, source) in enumerate(zip(node.results, came, strict=True))
                if source in wanted and saves.home[value.name] in kept
            )
            gathers = node.op == "autopar.all_gather" or (node.op == FUSED and _gathers(node))
            if members and gathers:
                node = _with(node, REGATHER, members)
        nodes.append(node)
    return graph.with_nodes(tuple(nodes))
