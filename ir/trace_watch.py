"""What happens around a trace: things that torch.export would do or drop without a word.

Each function here is a context manager used by `trace_export` while `forward` runs under export.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributions
import torch.utils.checkpoint
from torch import nn

from autopar.ir.errors import TraceError

#: What every module holds; forward's own state is everything else.
_MODULE_FIELDS = frozenset(vars(nn.Module())) - {"training"}
_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_Absent = object()


@contextlib.contextmanager
def caches_off(model: nn.Module) -> Iterator[list[str]]:
    """Switch `use_cache` off in every config of a Hugging Face model; yields the notes about it.

    A key/value cache in the output is of no use to training and cannot be exported.
    """
    changed = []
    configs = {id(c): c for m in model.modules() for c in _configs(getattr(m, "config", None))}
    for config in configs.values():
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
            changed.append(config)
    try:
        yield ["config.use_cache was switched off while tracing"] if changed else []
    finally:
        for config in changed:
            config.use_cache = True


def _configs(config: Any) -> Iterator[Any]:
    """A config and the configs inside it (those of an encoder, a decoder, a text model)."""
    if not hasattr(config, "use_cache") and not hasattr(config, "sub_configs"):
        return
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        yield from _configs(getattr(config, name, None))


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random number generators of the CPU and of used GPUs as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextlib.contextmanager
def checkpoints_noted(model: nn.Module) -> Iterator[list[str]]:
    """Run checkpointed functions as ordinary calls; yields what was checkpointed.

    Modules are told by their path, other functions by their name.
    """
    found: list[str] = []
    paths = {id(m): path for path, m in model.named_modules()}
    module = torch.utils.checkpoint
    generator = module._checkpoint_without_reentrant_generator

    def note(function: Any) -> None:
        name = _checkpointed(function, paths)
        if name not in found:
            found.append(name)

    def watched(fn: Any, *args: Any, **kwargs: Any) -> Any:
        note(fn)
        return generator(fn, *args, **kwargs)

    def apply(fn: Any, preserve: Any, *args: Any) -> Any:
        note(fn)
        # The reentrant variant gives no gradient at all unless an input carries one.
        carried = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and carried):
            return fn(*args)

    plain = types.SimpleNamespace(apply=apply)
    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", watched),
        mock.patch.object(module, "CheckpointFunction", plain),
    ):
        yield found


def _checkpointed(function: Callable[..., Any], paths: dict[int, str]) -> str:
    owners: list[Any] = []
    while isinstance(function, functools.partial):
        owners += function.args[:1]
        function = function.func
    for owner in (function, getattr(function, "__self__", None), *owners):
        if id(owner) in paths:
            return paths[id(owner)]
    return getattr(function, "__qualname__", type(function).__name__)


@contextlib.contextmanager
def conversions_checked() -> Iterator[None]:
    """Let `module.to(…)` in forward pass where it changes nothing; refuse it where it does."""

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            converted = dtype is not None and (tensor.is_floating_point() or tensor.is_complex())
            if converted and tensor.dtype != dtype:
                raise TraceError(
                    f"forward converts {name!r} of a {type(module).__name__} from {tensor.dtype} "
                    f"to {dtype}. Convert the module before it is compiled, or convert the tensor "
                    f"where it is used"
                )
            if device is not None and tensor.device.type not in (device.type, "meta"):
                raise TraceError(
                    f"forward moves {name!r} of a {type(module).__name__} to {device}. Move the "
                    f"module before it is compiled"
                )
        return module

    with mock.patch.object(nn.Module, "to", to):
        yield


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Without the checks of `torch.distributions`, which look at the values of tensors."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


@dataclass(frozen=True)
class Change:
    """An attribute that `forward` set. `frozen`: it is Python data, which a trace would freeze."""

    path: str
    module: nn.Module
    name: str
    new: Any
    frozen: bool

    def __str__(self) -> str:
        where = f"{self.path or 'the model itself'} ({type(self.module).__name__})"
        verb = "changes" if self.frozen else "sets"
        return f"{where}: forward {verb} the attribute {self.name!r}"


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put every attribute, hook, parameter and buffer of every module back."""
    before = [(module, _snapshot(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, (fields, contents) in before:
            _restore(module, fields, contents)


@contextlib.contextmanager
def changes_noted(model: nn.Module) -> Iterator[list[Change]]:
    """Yields the attributes that `forward` sets, as they are when it returns.

    Export puts some of them back afterwards, so they are looked at from a hook.
    """
    before = [(path, module, _snapshot(module)) for path, module in model.named_modules()]
    found: list[Change] = []

    def look(*_: Any) -> None:
        found.clear()
        for path, module, (fields, contents) in before:
            olds = {**fields, **contents}
            for name in {**olds, **vars(module)}:
                if name in _MODULE_FIELDS:
                    continue
                old, new = olds.get(name, _Absent), vars(module).get(name, _Absent)
                if not _same(old, new):
                    found.append(Change(path, module, name, new, _is_data(old, new)))

    handle = model.register_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's attributes, and copies of those that are plain containers."""
    fields = dict(vars(module))
    contents = {k: _copied(v) for k, v in fields.items() if isinstance(v, (list, dict, set))}
    return fields, contents


def _copied(tree: Any) -> Any:
    """Containers copied, what they hold kept."""
    if isinstance(tree, dict):
        return {key: _copied(item) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_copied(item) for item in tree)
    return set(tree) if isinstance(tree, set) else tree


def _same(old: Any, new: Any) -> bool:
    """Whether an attribute is unchanged: containers by what they hold, as export copies them."""
    if type(old) is not type(new):
        return False
    if isinstance(old, _SCALARS):
        return bool(old == new)
    if isinstance(old, dict):
        return list(old) == list(new) and all(_same(v, new[k]) for k, v in old.items())
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True))
    return bool(old == new) if isinstance(old, (set, frozenset)) else old is new


def _is_data(old: Any, new: Any) -> bool:
    """Whether what is new is Python data, rather than tensors or objects."""
    if new is _Absent:
        return False
    gone = {repr(item) for item in _leaves(old)}
    return all(isinstance(item, _SCALARS) for item in _leaves(new) if repr(item) not in gone)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    if isinstance(tree, (list, tuple, set, frozenset)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]


def _restore(module: nn.Module, fields: dict[str, Any], contents: dict[str, Any]) -> None:
    now = vars(module)
    for name in [k for k in now if k not in fields]:
        del now[name]
    now.update(fields)
    for name, old in contents.items():
        container = fields[name]
        container.clear()
        container.extend(old) if isinstance(container, list) else container.update(old)
