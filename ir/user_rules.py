"""Rules that users declare for operators of their own.

A declaration is tried on a call before it is believed, with the inputs and cuts that discovery
uses: once when it is made, and again for each new kind of call that is met.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.declaration import Declaration
from autopar.ir.discover_sizes import larger, trial
from autopar.ir.discovered import call_text
from autopar.ir.errors import GraphError, RuleError
from autopar.ir.graph import Node, Value
from autopar.ir.probe import one_line, run
from autopar.ir.probe_rule import Unsure, quietly, refute, refute_factor, refute_role, whole_roles
from autopar.ir.rule import Rule, opaque_rule
from autopar.ir.rules.registry import register_users, registered
from autopar.ir.trace_grad import overload

#: Sizes of the factors of a call that is made up.
_SIZES = (6, 8, 10, 7, 9, 11, 5)


def declare_rule(
    op: str,
    declaration: Declaration | None,
    *,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    check: bool = True,
) -> None:
    """Give an operator a rule, in place of one that is declared or discovered.

    op:
        the full name of one of PyTorch's operators, ``"mylib.op.default"``
    declaration:
        None: it is never split
    example:
        the arguments of a call to check the declaration on; without one a call is made up

    Raises RuleError where the operator has a rule of the compiler's, where the declaration does
    not fit its calls, or where the operator split so gives other results.
    """
    if op in registered():
        raise RuleError(
            f"{op}: the compiler has a rule for this operator, which cannot be replaced"
        )
    if declaration is not None and check:
        with quietly():
            node = _example(op, declaration, example)
            try:
                found = refute_declaration(node, declaration)
            except Unsure as outcome:
                raise RuleError(
                    f"{op}: the rule cannot be checked, {outcome}; check=False takes it unchecked"
                ) from None
            if found:
                raise RuleError(f"{op}: the rule {declaration} is wrong: {found}")
    register_users(op, _UserRule(declaration, check))


class _UserRule:
    """The rule function of a declaration; each kind of call is checked once."""

    def __init__(self, declaration: Declaration | None, check: bool) -> None:
        self._declaration, self._check = declaration, check
        self._wrong: dict[str, str] = {}

    def __call__(self, node: Node) -> Rule:
        if self._declaration is None:
            return _opaque(node, "register_rule says that it is not split")
        if self._check:
            key = call_text(node)
            if key not in self._wrong:
                with quietly():
                    self._wrong[key] = _wrong_for(node, self._declaration)
            if self._wrong[key]:
                return _opaque(
                    node, f"its declared rule does not hold for this call: {self._wrong[key]}"
                )
        return self._declaration.rule(node, f"declared: {self._declaration}")


def _opaque(node: Node, note: str) -> Rule:
    return opaque_rule(
        [len(v.shape) for v in node.operands], [len(v.shape) for v in node.results], note
    )


def _wrong_for(node: Node, declaration: Declaration) -> str:
    try:
        declaration.rule(node)
        return refute_declaration(node, declaration)
    except (GraphError, RuleError) as error:
        return str(error)
    except Unsure:
        return ""  # it was checked when it was declared; this call cannot be run here


def refute_declaration(node: Node, declaration: Declaration) -> str:
    """What differs when a call is split as a declaration says; "" if nothing was found.

    The call is tried on small sizes and, one size at a time, on larger ones up to its own. Raises
    Unsure where it cannot be run, RuleError or GraphError where the notation does not fit.
    """
    small = trial(node)
    if found := refute(small.subject, declaration.rule(small.subject.node)):
        return found
    for size in small.sizes:
        for call in larger(node, small, [size]):
            subject = call.subject
            rule = declaration.rule(subject.node)
            for name in _factors_of(node, rule, size):
                if found := refute_factor(subject, rule, name, each=1):
                    return found
            for role in whole_roles(subject.node, rule):
                if found := refute_role(subject, rule, role):
                    return found
    return ""


def _factors_of(node: Node, rule: Rule, size: int) -> list[str]:
    """The factors of the dimensions that have one size in the call."""
    found = [
        name
        for value, dims in zip(node.operands, rule.operands, strict=True)
        for n, dim in zip(value.shape, dims, strict=True)
        for name in dim
        if n == size
    ]
    return list(dict.fromkeys(found))


# --- a call to check on --------------------------------------------------------------------------


def _example(
    op: str,
    declaration: Declaration,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None,
) -> Node:
    """The node of an example call, or of one that is made up from the notation."""
    args, kwargs = example if example is not None else _made_up(op, declaration)
    try:
        node = _node(op, args, kwargs)
    except Exception as error:  # a foreign operator may fail in any way
        way_out = (
            "give another example="
            if example is not None
            else "give a call of it as example=, or check=False to take the rule unchecked"
        )
        raise RuleError(
            f"{op}: the rule cannot be checked ({one_line(error)}); {way_out}"
        ) from None
    try:
        declaration.rule(node)
    except GraphError as error:
        raise RuleError(f"{error}") from None
    return node


def _node(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Node:
    """The IR's node of a call on real tensors, gradients flowing where the operator lets them."""
    names = itertools.count()
    tensors: list[Tensor] = []

    def describe(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item)
            inexact = item.is_floating_point() or item.is_complex()
            return Value(f"x{next(names)}", tuple(item.shape), item.dtype, inexact)
        if isinstance(item, (tuple, list)):
            return type(item)(describe(part) for part in item)
        return item

    blank = Node(
        op,
        tuple(describe(item) for item in args),
        {key: describe(item) for key, item in kwargs.items()},
    )
    given = [
        x.detach().clone().requires_grad_(v.grad)
        for x, v in zip(tensors, blank.operands, strict=True)
    ]
    made = run(blank, given)
    results = tuple(
        Value(f"y{k}", tuple(y.shape), y.dtype, y.requires_grad) for k, y in enumerate(made)
    )
    return Node(op, blank.args, blank.kwargs, results)


def _made_up(op: str, declaration: Declaration) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an operator whose tensors have the dimensions that a notation names.

    Raises RuleError where the operator takes something that the notation does not tell.
    """
    left = declaration.spec.partition("->")[0]
    terms = [re.findall(r"\([^)]*\)|\w+\*?", term) for term in left.split(",")]
    tokens = (token.strip("()*").split() for term in terms for token in term)
    names = dict.fromkeys(name for parts in tokens for name in parts)
    sizes = dict(zip(names, itertools.cycle(_SIZES), strict=False))
    spelled = {s.argument: s.factor for s in declaration.sizes if s.factor is not None}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    remaining = iter(terms)
    for k, argument in enumerate(overload(op)._schema.arguments):
        tensor = str(argument.type) in ("Tensor", "Optional[Tensor]")
        term = next(remaining, None) if tensor else None
        factor = spelled.get(k, spelled.get(argument.name))
        if term is not None:
            given: Any = torch.randn(_shape(term, sizes), dtype=torch.float64)
        elif factor is not None:
            given = sizes[factor]
        elif argument.has_default_value():
            given = argument.default_value
        else:
            raise RuleError(
                f"{op}: the rule cannot be checked without a value for the argument "
                f"{argument.name!r}; give a call of it as example=, or check=False to take the "
                f"rule unchecked"
            )
        if argument.kwarg_only:
            kwargs[argument.name] = given
        else:
            args.append(given)
    if next(remaining, None) is not None:
        raise RuleError(
            f"{op}: the rule {declaration.spec!r} has {len(terms)} operands, more than the "
            f"operator takes; give a call of it as example= if it takes lists of tensors"
        )
    return args, kwargs


def _shape(term: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """A shape for one term of the notation; `b*` becomes two dimensions."""
    shape: list[int] = []
    for token in term:
        if token.endswith("*"):
            shape += [3, 4]
        elif token == "1":
            shape.append(5)
        else:
            shape.append(math.prod(sizes[name] for name in token.strip("()").split()))
    return shape
