"""How a traced model is called: binding a call's arguments to the graph's input tensors.

The graph has one input per *tensor* of the example call. A later call may spell its arguments
differently (by position or by keyword, defaults given or left out); everything that is not a
tensor was frozen into the graph and must be the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.ir.errors import InputError

#: The non-tensor values a graph can freeze.
CONSTANT_TYPES = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class TensorArgument:
    """One tensor the graph takes.

    path:
        where it sits in the call, e.g. ``input_ids`` or ``batch['x'][0]``
    shape, dtype:
        what the graph was made for
    requires_grad:
        whether a gradient flows back to it
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True)
class CallSignature:
    """Binds the arguments of a call to the flat list of the graph's input tensors.

    parameters:
        the signature of the model's `forward`
    example:
        parameter name -> what the example call gave it, with a `TensorArgument` in the place of
        each tensor. Parameters that were left to their defaults are absent.
    order:
        the tensors in the order of the graph's inputs
    """

    parameters: inspect.Signature
    example: Mapping[str, Any]
    order: tuple[TensorArgument, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The path of each input tensor, in the order of the graph's inputs."""
        return tuple(argument.path for argument in self.order)

    @staticmethod
    def of(
        forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallSignature:
        """The signature that an example call of `forward` fixes.

        The tensors are ordered as they are met in `args`, then in `kwargs`. Raises InputError
        where the call does not fit `forward` or holds a value that cannot be frozen.
        """
        parameters = inspect.signature(forward)
        given = _bind(parameters, args, kwargs)
        example = {name: _describe(value, name) for name, value in given.items()}
        positional = [name for name in given if name not in kwargs]
        keyword = [name for name in kwargs if name in given]
        order = [
            leaf
            for name in positional + keyword
            for leaf in pytree.tree_leaves(example[name])
            if isinstance(leaf, TensorArgument)
        ]
        return CallSignature(parameters, example, tuple(order))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The input tensors of one call, in the order of the graph's inputs.

        Raises InputError, naming the argument, where the call differs from the example in
        structure, shape, dtype or in a value that was frozen.
        """
        given = _bind(self.parameters, args, kwargs)
        found: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys([*self.example, *given]):
            default = self._default(name)
            got = given.get(name, default)
            if name not in self.example and got is default:
                continue
            if name not in self.example and default is inspect.Parameter.empty:
                raise InputError(
                    f"{name}: unexpected argument, the module was compiled without it. "
                    f"It takes {', '.join(self.names) or 'no tensors'}"
                )
            expected = self.example[name] if name in self.example else _describe(default, name)
            if got is inspect.Parameter.empty:
                raise InputError(f"{name}: missing argument, the module was compiled with it")
            _match(name, expected, got, found)
        return [found[argument.path] for argument in self.order]

    def _default(self, name: str) -> Any:
        parameter = self.parameters.parameters.get(name)
        return parameter.default if parameter is not None else inspect.Parameter.empty


def _bind(
    parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Argument name -> value, in signature order; `**kwargs` are spread under their own names."""
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the call does not fit forward{parameters}: {error}") from None
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        else:
            given[name] = value
    return given


#: What `flatten_call` says of one place in a call: a tensor, a constant with its type, a container.
Entry = tuple[str, Any]


def flatten_call(
    parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Entry, ...], dict[str, torch.Tensor]]:
    """What makes two calls the same but for the contents of their tensors, and those tensors.

    Returns hashable entries ``(path, what is there)`` in the order of the signature, equal for
    equal calls however they are spelled (by position or keyword, defaults given or left out), and
    the tensors by path. Raises InputError where the call does not fit the signature or holds what
    cannot be frozen.
    """
    given = _bind(parameters, args, kwargs)
    for name, parameter in parameters.parameters.items():
        if name not in given and isinstance(parameter.default, CONSTANT_TYPES):
            given[name] = parameter.default
    named = [name for name in parameters.parameters if name in given]
    entries: list[Entry] = []
    tensors: dict[str, torch.Tensor] = {}
    for name in (*named, *sorted(given.keys() - named)):
        _flatten(name, given[name], entries, tensors)
    return tuple(entries), tensors


def _flatten(path: str, value: Any, entries: list[Entry], tensors: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        here = TensorArgument(path, tuple(value.shape), value.dtype, value.requires_grad)
        entries.append((path, here))
    elif isinstance(value, CONSTANT_TYPES):
        entries.append((path, (type(value).__name__, value)))
    else:
        children = children_of(value)
        if children is None:
            raise _not_traceable(path, value)
        kind = "dict" if isinstance(value, dict) else type(value).__qualname__
        if kind == "dict":
            children.sort(key=lambda child: child[0])
        entries.append((path, (kind, tuple(key for key, _, _ in children))))
        for _, suffix, child in children:
            _flatten(path + suffix, child, entries, tensors)


def _not_traceable(path: str, value: Any) -> InputError:
    return InputError(
        f"{path}: cannot be traced, got a {type(value).__name__}. Pass tensors, numbers, "
        f"strings, None, or tuples, lists and dicts of them; a dataclass of tensors can be "
        f"registered with torch.export.register_dataclass"
    )


def children_of(tree: Any) -> list[tuple[str, str, Any]] | None:
    """(key, path suffix, child) of each child of a container; None for a leaf."""
    if pytree.tree_is_leaf(tree):
        return None
    kind = pytree.SUPPORTED_NODES[pytree._get_node_type(tree)]
    if kind.flatten_with_keys_fn is None:
        children, _ = kind.flatten_fn(tree)
        return [(str(i), f"[{i}]", child) for i, child in enumerate(children)]
    pairs, _ = kind.flatten_with_keys_fn(tree)
    return [(_key(key), str(key), child) for key, child in pairs]


def _key(entry: Any) -> str:
    """The key, index or field name of a pytree's key entry, as a user writes it."""
    for field in ("key", "idx", "name"):
        if hasattr(entry, field):
            return str(getattr(entry, field))
    return str(entry)


def _describe(value: Any, path: str) -> Any:
    """`value` with a `TensorArgument` for each tensor; refuses what cannot be frozen."""

    def describe(keys: Any, leaf: Any) -> Any:
        here = path + pytree.keystr(keys)
        if isinstance(leaf, torch.Tensor):
            return TensorArgument(here, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, CONSTANT_TYPES):
            return leaf
        raise _not_traceable(here, leaf)

    return pytree.tree_map_with_path(describe, value)


def _say(value: Any) -> str:
    """A short description of an argument for an error message."""
    if isinstance(value, (torch.Tensor, TensorArgument)):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, CONSTANT_TYPES):
        return repr(value)
    return f"a {type(value).__name__}"


def _match(path: str, expected: Any, got: Any, found: dict[str, torch.Tensor]) -> None:
    """Compare one argument with the example's, collecting its tensors by path."""
    if isinstance(expected, TensorArgument):
        if not isinstance(got, torch.Tensor):
            raise InputError(f"{path}: expected {_say(expected)}, got {_say(got)}")
        if tuple(got.shape) != expected.shape:
            raise InputError(
                f"{path}: expected shape {expected.shape}, got {tuple(got.shape)}. The module was "
                f"compiled for the first shape; with shapes='recompile' it follows the other"
            )
        if got.dtype != expected.dtype:
            raise InputError(
                f"{path}: expected dtype {expected.dtype}, got {got.dtype}. "
                f"Convert it with .to({expected.dtype})"
            )
        if got.requires_grad and not expected.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{path}: requires grad, but the example it was compiled with did not, so no "
                f"gradient would reach it. Compile with an example that requires grad, or detach it"
            )
        found[path] = got
        return
    entries = children_of(expected)
    if entries is not None:
        given = children_of(got)
        if given is None or not _same_kind(type(expected), type(got)):
            raise InputError(f"{path}: expected {_say(expected)}, got {_say(got)}")
        by_key = {key: child for key, _, child in given}
        keys = [key for key, _, _ in entries]
        if len(keys) != len(given) or set(keys) != set(by_key):
            raise InputError(f"{path}: expected the entries {keys}, got {list(by_key)}")
        for key, suffix, entry in entries:
            _match(path + suffix, entry, by_key[key], found)
        return
    if isinstance(got, torch.Tensor) and expected is None:
        raise InputError(
            f"{path}: expected None, got {_say(got)}. The module was compiled without this input; "
            f"give it in the example inputs to compile with it"
        )
    if isinstance(got, torch.Tensor) or type(got) is not type(expected) or got != expected:
        raise InputError(
            f"{path}: expected {_say(expected)}, got {_say(got)}. Its value was frozen when the "
            f"module was compiled; compile again to change it"
        )


def _same_kind(expected: type, got: type) -> bool:
    """Dict subclasses are told apart by their keys only, as a call's keywords are."""
    return expected is got or (issubclass(expected, dict) and issubclass(got, dict))
