"""Memory policies: what a user wants kept for the backward pass, resolved to calls of a graph.

A policy is a word, or two joined by ``+``:

``keep``
    what autograd saves stays where it is
``recompute``, ``recompute:3``, ``recompute:sqrt``
    modules are computed again in the backward pass, each by itself, or three (about the square
    root of their number) in a row: only what such a region reads from outside is kept
``offload``
    what autograd saves is kept in the host's memory
``compress``, ``compress8``
    masks as bits and indices as small integers, without loss; with the 8 other floats are rounded
    to 8 bits
``regather``
    parameters that are stored in shards and gathered for use are gathered again in the backward
    pass; otherwise the gathered copies are kept

``recompute+offload`` keeps what regions read in the host's memory, ``+regather`` goes with any.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.keep import FORMS, RECOMPUTE

_RECOMPUTE = re.compile(r"recompute(?::(sqrt|[1-9]\d*))?")
_ACCEPTED = (
    "expected 'keep', 'recompute', 'recompute:<number of modules>', 'recompute:sqrt', 'offload', "
    "'compress' or 'compress8', or one of them with '+regather', or 'recompute+offload'; "
    "for the whole model also 'auto'"
)


@dataclass(frozen=True)
class Policy:
    """One policy, read.

    length:
        how many modules make a region that is computed again, 0 for the square root of their
        number, None where nothing is
    form:
        in which other form things are kept (`autopar.ir.keep.FORMS`), "" for none
    regather:
        whether gathered parameters are gathered again; None where nothing is said about it
    """

    length: int | None = None
    form: str = ""
    regather: bool | None = None

    @staticmethod
    def parse(text: Any, where: str) -> Policy:
        """Raises PlanError, naming `where` it stands, for anything that is no policy."""
        policy = Policy()
        words = text.split("+") if isinstance(text, str) else []
        for word in words:
            found = _RECOMPUTE.fullmatch(word)
            if found:
                length = 0 if found[1] == "sqrt" else int(found[1] or 1)
                policy = Policy(length, policy.form, policy.regather)
            elif word in FORMS:
                policy = Policy(policy.length, word, policy.regather)
            elif word == "regather":
                policy = Policy(policy.length, policy.form, True)
            elif word == "keep":
                policy = Policy(policy.length, policy.form, policy.regather or False)
            else:
                words = []
                break
        kinds = [w.partition(":")[0] for w in words]
        fits = len(set(kinds)) == len(kinds) and not ("keep" in kinds and len(kinds) > 1)
        fits = fits and (kinds == ["keep"] or len(set(kinds) & set(FORMS)) <= 1)
        if policy.length is not None and policy.form not in ("", "offload"):
            fits = False
        if not words or not fits:
            raise PlanError(f"memory_policy{where}: got {text!r}, {_ACCEPTED}")
        return policy


@dataclass(frozen=True)
class Policies:
    """What is kept how, by call and parameter.

    regions:
        call node name -> the name of the region that it is computed again with
    forms:
        call node name -> the form in which it keeps what its backward reads
    regather:
        parameters (dotted names) that are gathered again where they are gathered
    offloads_optimizer:
        whether the state of the optimizer is in the host's memory between steps
    """

    regions: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)
    regather: frozenset[str] = frozenset()
    offloads_optimizer: bool = False

    def __bool__(self) -> bool:
        return bool(self.regions or self.forms or self.regather or self.offloads_optimizer)

    def to_json(self) -> dict[str, Any]:
        return {
            "recompute": dict(self.regions),
            "forms": dict(self.forms),
            "regather": sorted(self.regather),
            **({"offloads_optimizer": True} if self.offloads_optimizer else {}),
        }

    @staticmethod
    def from_json(data: Any) -> Policies:
        """The inverse of `to_json`. Raises PlanError where a field is missing or malformed."""
        required = {"recompute", "forms", "regather"}
        fits = isinstance(data, dict) and set(data) - {"offloads_optimizer"} == required
        if fits:
            offloads = data.get("offloads_optimizer", False)
            regions, forms, again = data["recompute"], data["forms"], data["regather"]
            fits = isinstance(regions, dict) and isinstance(forms, dict) and isinstance(again, list)
            fits = fits and all(isinstance(t, str) for t in [*regions.values(), *again])
            fits = fits and all(form in FORMS for form in forms.values())
            fits = fits and isinstance(offloads, bool)
        if not fits:
            raise PlanError(f"the field 'policies' is malformed: got {data!r}"[:200])
        return Policies(regions, forms, frozenset(again), offloads)


NO_POLICIES = Policies()

#: What a user gives: one policy, or policies by pattern.
Given = str | Mapping[str, str] | None


def check_given(given: Any) -> None:
    """Raises PlanError for what is no policy."""
    if given is None:
        return
    if isinstance(given, Mapping):
        for pattern, text in given.items():
            if not isinstance(pattern, str):
                raise PlanError(f"memory_policy: expected a module path pattern, got {pattern!r}")
            Policy.parse(text, f"[{pattern!r}]")
        return
    Policy.parse(given, "")


def resolve_policies(
    graph: Graph, given: Given, regather: bool = False, strict: bool = True
) -> Policies:
    """The policies of a traced graph.

    given:
        one policy for the whole model (it recomputes by block), or policies by shell pattern over
        module paths; the last pattern that matches a module, or one around it, counts for it.
        ``*`` is the whole model, ``%name`` one call by the name it has in the plan.
    regather:
        what happens to gathered parameters of which `given` says nothing
    strict:
        whether every pattern has to match something

    What the model checkpoints itself (`torch.utils.checkpoint`) is computed again where `given`
    says nothing else. Raises PlanError for what is no policy, and for a pattern that matches
    nothing.
    """
    check_given(given)
    rules = _rules(graph, given)
    calls = [node for node in graph.calls if node.differentiable]
    unused = {rule.pattern for rule in rules}
    of_node: dict[str, tuple[int, str]] = {}
    for node in graph.nodes:
        for index in reversed(range(len(rules))):
            key = rules[index].key(node)
            if key is not None:
                unused.discard(rules[index].pattern)
                of_node.setdefault(node.name, (index, key))
    for pattern in unused - {"*", "blocks"}:
        if strict:
            _refuse(graph, pattern)
    regions: dict[str, str] = {}
    forms: dict[str, str] = {}
    for index, rule in enumerate(rules):
        mine = [n for n in graph.calls if of_node.get(n.name, (-1, ""))[0] == index]
        if rule.policy.length is not None:
            keys = list(dict.fromkeys(of_node[n.name][1] for n in mine))
            named = _segments(keys, rule.policy.length)
            regions |= {n.name: named[of_node[n.name][1]] for n in mine}
        if rule.policy.form:
            forms |= {n.name: rule.policy.form for n in mine}
    for node in graph.calls:
        if node.name not in of_node and RECOMPUTE in node.attrs:
            regions[node.name] = node.attrs[RECOMPUTE]
    again = set()
    for node in graph.sources("param"):
        said = rules[of_node[node.name][0]].policy.regather if node.name in of_node else None
        if regather if said is None else said:
            again.add(node.target)
    known = {node.name for node in calls}
    return Policies(regions, {n: form for n, form in forms.items() if n in known}, frozenset(again))


@dataclass(frozen=True)
class _Rule:
    """Where a policy holds: `key` gives the module (or call) of it that a node belongs to."""

    pattern: str
    policy: Policy
    key: Callable[[Node], str | None]


def _rules(graph: Graph, given: Given) -> list[_Rule]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        found: list[_Rule] = []
        for pattern, text in given.items():
            if pattern == "*":
                found += _rules(graph, text)
            else:
                found.append(_Rule(pattern, Policy.parse(text, ""), _matching(pattern)))
        return found
    policy = Policy.parse(given, "")
    every = _Rule("*", policy, lambda node: node.origin.module or "model")
    if policy.length is None:
        return [every]
    rest = Policy(None, policy.form, policy.regather)
    if _is_in_blocks(graph):
        inside = _Rule("blocks", policy, lambda node: block_of(node.origin.module))
        return [_Rule("*", rest, every.key), inside]
    # Stretches of calls.
    place = {node.name: str(i) for i, node in enumerate(graph.calls)}
    length = policy.length if policy.length > 1 else 0
    return [
        _Rule("*", Policy(length, policy.form, policy.regather), lambda n: place.get(n.name, ""))
    ]


def _is_in_blocks(graph: Graph) -> bool:
    """Whether most calls run in numbered modules, several of one module in a row."""
    calls = list(graph.calls)
    runs = itertools.groupby(calls, lambda node: block_of(node.origin.module))
    lengths = [len(list(run)) for block, run in runs if block]
    return 2 * sum(length for length in lengths if length > 1) > len(calls)


def block_of(path: str) -> str | None:
    """The repeated block that a module is in: its path up to the first number (``h.0.mlp``)."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def _matching(pattern: str) -> Callable[[Node], str | None]:
    def key(node: Node) -> str | None:
        if pattern.startswith("%"):
            return node.name if node.name == pattern[1:] else None
        if node.op == "param" and fnmatch.fnmatchcase(node.target, pattern):
            return node.target
        parts = node.origin.module.split(".") if node.origin.module else []
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if fnmatch.fnmatchcase(path, pattern):
                return path
        return None

    return key


def _segments(keys: Sequence[str], length: int) -> dict[str, str]:
    """Key -> the name of its region, of so many keys in a row (0: the root of their number)."""
    length = length or max(1, math.isqrt(len(keys) - 1) + 1 if keys else 1)
    found: dict[str, str] = {}
    for start in range(0, len(keys), length):
        part = keys[start : start + length]
        name = part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}"
        found |= dict.fromkeys(part, name)
    return found


def _refuse(graph: Graph, pattern: str) -> None:
    known = sorted({node.origin.module for node in graph.nodes if node.origin.module})
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    raise PlanError(
        f"memory_policy[{pattern!r}]: it matches no module that computes anything"
        + (f"; the nearest are {', '.join(map(repr, near))}" if near else "")
    )
