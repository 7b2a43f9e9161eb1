"""Modules that a trace cannot look into: run as they are, each as one operator.

A module whose Python depends on the values of its tensors (a loop over the experts that were hit,
a size read out of a tensor) cannot be a graph. Where the example call has real data, the module
is run once to see what it returns, and becomes a call that stays whole (see `whole`) of its
inputs, parameters and buffers::

    %y = autopar_whole.Experts_3fa2c1.default([%x, %index, %w1, %w2])

Every rank runs it on whole tensors.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from autopar.ir.calling import CONSTANT_TYPES
from autopar.ir.errors import TraceError
from autopar.ir.trace_random import RandomNoted
from autopar.ir.whole import TensorType, Whole, operator_for


class ShapeOfDataError(TraceError):
    """A module cannot be one operator by itself: the shapes of its inputs depend on data."""


@dataclass
class Observed:
    """One module as it ran on real data.

    outputs, flops:
        what each of its calls returned, tensors as their types, and how many floating point
        operations it took
    skeleton:
        the module without its weights
    """

    path: str
    module: nn.Module
    skeleton: nn.Module
    outputs: list[Any] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    random: bool = False


class _Counted(TorchDispatchMode):
    """Adds up the floating point operations of what runs while it is active, in `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=made))
        return made


def observe_modules(
    model: nn.Module, args: Any, kwargs: Any, paths: Sequence[str]
) -> list[Observed]:
    """Run the model once, looking at the modules of some paths; it comes out as it went in.

    Raises TraceError for a module that could not be one operator.
    """
    found = [
        Observed(path, module, _skeleton(module))
        for path in paths
        for module in [model.get_submodule(path)]
    ]
    before = [(b, b.detach().clone()) for b in model.buffers()]
    noted, counter = RandomNoted(), _Counted()
    with contextlib.ExitStack() as stack:
        for one in found:
            stack.enter_context(_watched(one, noted, counter))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(noted)
        stack.enter_context(counter)
        model(*args, **kwargs)
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    return found


@contextlib.contextmanager
def _watched(one: Observed, noted: RandomNoted, counter: _Counted) -> Iterator[None]:
    drawn: list[int] = []
    worked: list[int] = []
    versions: list[list[int]] = []

    def begin(module: nn.Module, args: Any) -> None:
        drawn.append(len(noted.found))
        worked.append(counter.flops)
        versions.append([b._version for b in module.buffers()])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        one.random |= len(noted.found) > drawn.pop()
        if versions.pop() != [b._version for b in module.buffers()]:
            raise TraceError(
                f"{one.path} ({type(module).__name__}): changes its buffers in a call whose "
                f"Python depends on the values of tensors, which cannot be traced"
            )
        one.flops.append(counter.flops - worked.pop())
        one.outputs.append(pytree.tree_map(_describe, output))

    handles = (one.module.register_forward_pre_hook(begin), one.module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        grad = leaf.is_floating_point() or leaf.is_complex()
        return TensorType(tuple(leaf.shape), leaf.dtype, grad)
    return leaf


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of a module with its parameters and buffers on the meta device."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {}
    for t in tensors:
        empty = torch.empty_like(t, device="meta")
        is_parameter = isinstance(t, nn.Parameter)
        memo[id(t)] = nn.Parameter(empty, t.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)


@contextlib.contextmanager
def modules_whole(observed: Sequence[Observed]) -> Iterator[list[Caller]]:
    """Make every call of the observed modules one operator; yields what stands for them."""
    callers = [Caller(one) for one in observed]
    for one, caller in zip(observed, callers, strict=True):
        vars(one.module)["forward"] = caller
    try:
        yield callers
    finally:
        for one in observed:
            vars(one.module).pop("forward", None)


class Caller:
    """Stands for the `forward` of one module."""

    def __init__(self, one: Observed) -> None:
        self._one = one
        self._calls = 0

    def restart(self) -> None:
        """The next call is the first one of a run."""
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        one = self._one
        output, flops = one.outputs[self._calls], one.flops[self._calls]
        self._calls += 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensor_places = [isinstance(leaf, Tensor) for leaf in leaves]
        self._refuse(constants, given)
        state = {**dict(one.module.named_parameters()), **dict(one.module.named_buffers())}
        kept, out_spec = pytree.tree_flatten(output)
        results = tuple(leaf for leaf in kept if isinstance(leaf, TensorType))
        name = f"the module {one.path!r} ({type(one.module).__name__})"
        if not results:
            raise TraceError(f"{name} returns no tensors, and its Python depends on tensors")
        recipe = _Recipe(one.skeleton, tuple(state), spec, tuple(constants), tuple(tensor_places))
        key = f"{one.path} {constants!r} {tensor_places!r} {kept!r}"
        whole = Whole(recipe, results, needs_data=True, random=one.random, flops=flops, what=name)
        operands = [*given, *state.values()]
        made = operator_for(type(one.module).__name__, key, one.skeleton, whole)(operands)
        made = iter((made,) if isinstance(made, Tensor) else made)
        filled = [next(made) if isinstance(leaf, TensorType) else leaf for leaf in kept]
        return pytree.tree_unflatten(filled, out_spec)

    def _refuse(self, constants: Sequence[Any], given: Sequence[Tensor]) -> None:
        strange = next((c for c in constants if not isinstance(c, CONSTANT_TYPES)), None)
        if strange is not None:
            raise TraceError(
                f"{self._one.path}: is called with a {type(strange).__name__}, and its Python "
                f"depends on the values of tensors, so that it cannot be traced"
            )
        if any(not isinstance(size, int) for t in given for size in t.shape):
            raise ShapeOfDataError(
                f"{self._one.path}: data-dependent, it is called with a tensor whose shape depends "
                f"on tensor values"
            )


@dataclass(frozen=True)
class _Recipe:
    """Runs a module on given tensors.

    names:
        of its parameters and buffers, the last operands
    spec, constants, tensors:
        the structure of its arguments: what each leaf is, and which of them are tensors
    """

    skeleton: nn.Module
    names: tuple[str, ...]
    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    tensors: tuple[bool, ...]
    #: One run at a time: the weights are put into the skeleton for the time of a call.
    lock: Any = field(default_factory=threading.Lock, compare=False)

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        count = sum(self.tensors)
        given = iter(operands[:count])
        state = dict(zip(self.names, operands[count:], strict=True))
        leaves = [
            next(given) if is_tensor else constant
            for constant, is_tensor in zip(self.constants, self.tensors, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with self.lock:
            output = torch.func.functional_call(self.skeleton, state, args, kwargs)
        return tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
