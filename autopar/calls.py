"""What identifies a call of a parallel module: graphs are compiled for it and kept by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.ir.calling import Entry, TensorArgument
from autopar.mixed import MixedPrecision, in_force

#: The part of a module's training state that a graph depends on: the modules in eval mode.
Modes = frozenset[str]

#: How many entries that differ a message names.
NAMED = 3


@dataclass(frozen=True)
class Surroundings:
    """The state of PyTorch around a call that a trace freezes.

    autocast:
        (device type, dtype) of the module's mixed precision, or of a `torch.autocast` that is on
    default_dtype:
        `torch.get_default_dtype()`, which tensors made in `forward` have
    """

    autocast: tuple[str, torch.dtype] | None
    default_dtype: torch.dtype

    @staticmethod
    def now(device: torch.device, mixed: MixedPrecision | None = None) -> Surroundings:
        """Raises InputError where the two are not of one dtype."""
        return Surroundings(in_force(mixed, device), torch.get_default_dtype())


@dataclass(frozen=True)
class CallKey:
    """Calls with equal keys run the same graph.

    state:
        (requires_grad, dtype) of every parameter and buffer; empty before they are split
    entries:
        the arguments but for the contents of their tensors (`flatten_call`), with whole shapes
    """

    modes: Modes
    surroundings: Surroundings
    state: tuple[tuple[bool, torch.dtype], ...]
    entries: tuple[Entry, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Worked out once: it goes through all of a model's parameters."""
        return hash((self.modes, self.surroundings, self.state, self.entries))


@dataclass(frozen=True)
class Call:
    """One call: what identifies it, and its tensors by path."""

    key: CallKey
    tensors: Mapping[str, Tensor]


def state_of(tensors: Iterable[Tensor]) -> tuple[tuple[bool, torch.dtype], ...]:
    """What a graph depends on of parameters and buffers, besides their shapes."""
    return tuple((tensor.requires_grad, tensor.dtype) for tensor in tensors)


def changes(known: Iterable[CallKey], new: CallKey) -> str:
    """What differs between a call and the one most like it, as a short text."""
    found = min((_changes(old, new) for old in known), key=len)
    if len(found) > NAMED:
        found = [*found[:NAMED], f"and {len(found) - NAMED} more"]
    return ", ".join(found)


def _changes(old: CallKey, new: CallKey) -> list[str]:
    found = []
    if old.modes != new.modes:
        found.append("the modules in eval mode")
    if old.surroundings.autocast != new.surroundings.autocast:
        before, now = (_autocast(key.surroundings.autocast) for key in (old, new))
        found.append(f"autocast ({before}, now {now})")
    if old.surroundings.default_dtype != new.surroundings.default_dtype:
        found.append(f"the default dtype (now {new.surroundings.default_dtype})")
    if old.state != new.state:
        found.append("which parameters are trained, or their dtype")
    found += [
        f"{path} ({before}, now {now})"
        for path, before, now in entry_changes(old.entries, new.entries)
    ]
    return found


def entry_changes(old: Iterable[Entry], new: Iterable[Entry]) -> list[tuple[str, str, str]]:
    """``(path, what was there, what is there now)`` of every place where two calls differ."""
    before, now = dict(old), dict(new)
    return [
        (path, _say(before.get(path)), _say(now.get(path)))
        for path in dict.fromkeys([*before, *now])
        if before.get(path) != now.get(path)
    ]


def _say(entry: Any) -> str:
    if entry is None:
        return "not given"
    if isinstance(entry, TensorArgument):
        grad = " with gradient" if entry.requires_grad else ""
        return f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}{grad}"
    kind, held = entry
    return f"a {kind} of {list(held)}" if isinstance(held, tuple) else repr(held)


def _autocast(region: tuple[str, torch.dtype] | None) -> str:
    return "off" if region is None else f"{region[0]} {region[1]}"


def covers(old: CallKey, new: CallKey) -> bool:
    """Whether the graph of one key serves another: it may give a gradient that nobody asks for."""
    if replace(new, entries=old.entries) != old or len(old.entries) != len(new.entries):
        return False
    for (path, before), (other, now) in zip(old.entries, new.entries, strict=True):
        if isinstance(now, TensorArgument) and not now.requires_grad:
            before, now = without_gradient(before), without_gradient(now)
        if path != other or before != now:
            return False
    return True


def without_gradient(entry: Any) -> Any:
    """An entry whose tensor asks for no gradient."""
    return replace(entry, requires_grad=False) if isinstance(entry, TensorArgument) else entry
