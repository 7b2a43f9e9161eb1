"""Operator rules for users: declare one, list and keep those that were found by trying."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.ir import discovered
from autopar.ir.declaration import Declaration, size_argument
from autopar.ir.discovered import Discovered
from autopar.ir.errors import RuleError
from autopar.ir.trace_grad import has_overload
from autopar.ir.user_rules import declare_rule


def register_rule(
    op: Any,
    declaration: str | None,
    *,
    whole: Sequence[str] = (),
    linear: Sequence[Sequence[int]] = (),
    joins: Sequence[int] = (),
    sizes: Mapping[int | str, int | str] | None = None,
    example: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> None:
    """Declare how an operator of your own may be split, in place of what would be found by trying.

    op:
        the operator, or its name: ``"mylib::op"`` or ``"mylib.op"``
    declaration:
        one term per tensor, naming its dimensions, as in ``"b* i, o i -> b* o"``: any dimension
        that is named may be split, wherever its name stands; one that is in no result is summed
        over. ``1`` is a dimension that stays whole, ``(h d)`` one of ``h`` blocks of ``d``.
        None: never split the operator, and do not try it
    whole:
        names that must not be split
    linear:
        groups of tensors (numbered as in the declaration) in which the operator is jointly linear
    joins:
        tensors that are added to a sum once, as a bias is
    sizes:
        argument (position or name) -> the name whose size it is, or the number of the result
        whose shape it spells
    example, example_kwargs:
        the arguments of a call to check the declaration on. Without them one is made up from the
        declaration, with tensors of floating point numbers and default values
    check:
        run the operator whole and in pieces, forward and backward, and refuse a declaration
        under which anything differs. Later calls that are of another kind (shapes, numbers,
        dtypes) are checked when they are planned; one for which the declaration does not hold is
        not split, and the plan says so.

    Declaring again replaces the rule. Raises RuleError, with what differs, for a wrong
    declaration, for one that does not fit the operator, and for an operator of the compiler's.
    """
    name = _name(op)
    found = None
    if declaration is not None:
        found = Declaration(
            declaration,
            tuple(whole),
            tuple(tuple(group) for group in linear),
            tuple(joins),
            tuple(size_argument(where, what) for where, what in (sizes or {}).items()),
        )
    given = None
    if example is not None or example_kwargs is not None:
        given = (tuple(example or ()), dict(example_kwargs or {}))
    declare_rule(name, found, example=given, check=check)


def _name(op: Any) -> str:
    """The full name of an operator given in one of the ways that PyTorch knows."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return f"{op._qualified_op_name.replace('::', '.')}.default"
    if isinstance(op, str):
        name = op.replace("::", ".")
        name = name if name.count(".") == 2 else f"{name}.default"
        if has_overload(name):
            return name
        raise RuleError(f"{op}: PyTorch has no operator of this name; import what defines it first")
    raise RuleError(f"op: expected an operator of torch.library or its name, got {op!r}")


def discovered_rules() -> tuple[Discovered, ...]:
    """What was found by trying operators that no rule speaks for, since the program began.

    Printed, an entry is the call of `register_rule` that declares the same, or a comment that says
    why the operator is not split.
    """
    return discovered.discovered()


def save_rules(path: str | os.PathLike[str]) -> None:
    """Write what was discovered to a file. Raises RuleError where it cannot be written."""
    text = json.dumps(discovered.to_json(), indent=1) + "\n"
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise RuleError(f"rules file {path}: cannot be written: {error.strerror}") from None


def load_rules(path: str | os.PathLike[str]) -> int:
    """Use what `save_rules` wrote in place of trying; the number of rules.

    Raises RuleError where the file is missing, or is something else.
    """
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RuleError(f"rules file {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RuleError(f"rules file {path}: not valid JSON ({error})") from None
    try:
        return discovered.from_json(data)
    except RuleError as error:
        raise RuleError(f"rules file {path}: {error}") from None
