"""What one operator call keeps in memory, observed rather than tabulated.

The call runs on fake tensors (shapes without data) under autograd's own saved-tensor hooks. Seen
are which operands and results autograd keeps for backward, what it keeps besides (softmax
statistics, masks, indices), which results are views, and what is used for a moment only. The
backward runs in the same way. Equal calls are observed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.fused import FUSED, WAITS
from autopar.ir.graph import Node, map_values
from autopar.ir.steps import STEPS

#: Finds what runs an operator of a given name on tensors.
Resolve = Callable[[str], Callable[..., Any]]

#: How many observations of each kind are remembered.
_REMEMBERED = 1 << 15
#: How many calls that ran forward wait for their backward, which then need not run them again.
_WAITING = 1 << 10


@dataclass(frozen=True)
class Spec:
    """A tensor without its data. Strides count elements; `grad`: it carries a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False

    def __repr__(self) -> str:
        # Calls are told apart by it, thousands of times; that of a dataclass is slow.
        return f"{self.shape}{self.stride}{self.dtype}{self.grad}"

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype, grad: bool = False) -> Spec:
        stride, size = [], 1
        for extent in reversed(shape):
            stride.append(size)
            size *= max(extent, 1)
        return Spec(tuple(shape), tuple(reversed(stride)), dtype, grad)

    def resized(self, shape: Sequence[int]) -> Spec:
        """A tensor of another shape whose dimensions lie in memory in the same order, densely."""
        stride, size = [0] * len(shape), 1
        for d in sorted(range(len(shape)), key=lambda d: (self.stride[d], -d)):
            if self.stride[d]:
                stride[d] = size
                size *= max(shape[d], 1)
        return Spec(tuple(shape), tuple(stride), self.dtype, self.grad)

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage that holds the tensor and nothing else."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def empty(self, device: str = "cpu") -> Tensor:
        grad = self.grad and (self.dtype.is_floating_point or self.dtype.is_complex)
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(grad)


@dataclass(frozen=True)
class Call:
    """One operator call on tensors of known shapes and strides; equal calls behave alike.

    args, kwargs:
        as the operator takes them, a `Spec` in the place of each tensor
    run:
        what runs it on tensors
    autocast:
        (device type, dtype) of the autocast region it runs in
    on_meta:
        whether tensors of the meta device will do. They are much quicker than fake ones, which know
        what device they stand for; a bucket may hold hundreds of parameters. Reshards, in buckets
        or not, do the same on every device
    """

    key: str
    run: Callable[..., Any] = field(compare=False)
    args: tuple[Any, ...] = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)
    autocast: tuple[str, torch.dtype] | None = field(compare=False, default=None)
    on_meta: bool = field(compare=False, default=False)

    @staticmethod
    def make(node: Node, operands: Sequence[Spec], resolve: Resolve, where: str = "") -> Call:
        """The call of a node on tensors given in operand order.

        where:
            what the call depends on besides its arguments: the mesh its groups are on
        Raises whatever `resolve` raises.
        """
        queue = iter(operands)
        args, kwargs = map_values((node.args, node.kwargs), lambda _: next(queue))
        autocast = node.attrs.get("autocast")
        key = f"{where} {node.op} {args!r} {kwargs!r} {autocast!r}"
        on_meta = node.op == FUSED or node.op in STEPS
        return Call(key, resolve(node.op), args, kwargs, autocast, on_meta)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The tensors among the arguments, in operand order."""
        found: list[Spec] = []
        _mapped((self.args, self.kwargs), lambda x: found.append(x) if isinstance(x, Spec) else x)
        return tuple(found)


@dataclass(frozen=True)
class Forward:
    """What a forward call makes and keeps.

    Storages are numbered: first the operands' in their order, then the new ones.

    results:
        the tensors it returns
    homes:
        the storage that each result lies in; an operand's for a view
    fresh:
        bytes of each new storage that outlives the call
    saved:
        the storages that autograd keeps until the backward of this call
    workspace:
        bytes in use at the call's own peak beyond `fresh`
    """

    results: tuple[Spec, ...]
    homes: tuple[int, ...]
    fresh: tuple[int, ...]
    saved: frozenset[int]
    workspace: int


@dataclass(frozen=True)
class Backward:
    """What the backward of a call makes.

    Storages are numbered: first those of the results' gradients, then the operands', then the
    new ones.

    grads:
        the gradient of each operand, None where none flows
    homes:
        the storage of each gradient (-1 where there is none)
    fresh:
        bytes of each new storage
    workspace:
        bytes in use at the backward's own peak beyond `fresh`
    sending, sent:
        where it waits for a collective: the most bytes of its own that were in use until then,
        while the results' gradients are still there, and those that were in use then; None where
        it does not
    """

    grads: tuple[Spec | None, ...]
    homes: tuple[int, ...]
    fresh: tuple[int, ...]
    workspace: int
    sending: int | None = None
    sent: int = 0


@lru_cache(maxsize=_REMEMBERED)
def observe(call: Call) -> Forward:
    """Run a call on fake tensors. Raises whatever the operator raises where it does not fit."""
    run = _Run(call)
    _waiting[call] = run
    if len(_waiting) > _WAITING:
        _waiting.pop(next(iter(_waiting)), None)
    return run.forward


@lru_cache(maxsize=_REMEMBERED)
def observe_backward(call: Call, incoming: tuple[Spec | None, ...]) -> Backward:
    """Run the backward of a call; `incoming` are the gradients of its results."""
    run = _waiting.pop(call, None)
    return (run or _Run(call)).backward(incoming)


#: The calls that ran forward and not yet backward, the oldest first.
_waiting: dict[Call, _Run] = {}


class _Run:
    """One call run on fake tensors, with its autograd graph, for one backward."""

    def __init__(self, call: Call) -> None:
        self.fake = None if call.on_meta else FakeTensorMode()
        self.device = "meta" if call.on_meta else "cpu"
        with self._without_data():
            self._run(call)

    @contextmanager
    def _without_data(self) -> Iterator[None]:
        """Where tensors have no data, and gradients are recorded."""
        with torch.enable_grad(), ExitStack() as stack:
            if self.fake is not None:
                # Equal calls are observed once: a memory of single operators only costs time.
                stack.enter_context(disable_fake_tensor_cache(self.fake))
                stack.enter_context(self.fake)
            yield

    def _run(self, call: Call) -> None:
        self.operands = [spec.empty(self.device) for spec in call.specs]
        self.kept: dict[int, int] = {}
        queue = iter(self.operands)

        def fill(item: Any) -> Any:
            if isinstance(item, Spec):
                return next(queue)
            return torch.device("cpu") if isinstance(item, torch.device) else item

        args, kwargs = _mapped((call.args, call.kwargs), fill)
        autocast = torch.autocast("cpu", call.autocast[1]) if call.autocast else nullcontext()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        with LiveStorages() as live, hooks, autocast:
            made = call.run(*args, **kwargs)
        self.results = list(made) if isinstance(made, (tuple, list)) else [made]
        self.forward = self._describe(live.peak)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.kept[storage._cdata] = storage.nbytes()
        return tensor

    def _describe(self, peak: int) -> Forward:
        number = {storage_key(x): i for i, x in reversed(list(enumerate(self.operands)))}
        fresh: list[int] = []

        def home(key: int, nbytes: int) -> int:
            if key not in number:
                number[key] = len(self.operands) + len(fresh)
                fresh.append(nbytes)
            return number[key]

        homes = tuple(home(storage_key(x), x.untyped_storage().nbytes()) for x in self.results)
        saved = frozenset(home(key, nbytes) for key, nbytes in self.kept.items())
        return Forward(
            tuple(Spec.of(x) for x in self.results),
            homes,
            tuple(fresh),
            saved,
            max(peak - sum(fresh), 0),
        )

    def backward(self, incoming: tuple[Spec | None, ...]) -> Backward:
        with self._without_data():
            return self._backward(incoming)

    def _backward(self, incoming: tuple[Spec | None, ...]) -> Backward:
        flowing = [
            (result, spec.empty(self.device).detach())
            for result, spec in zip(self.results, incoming, strict=True)
            if spec is not None and result.requires_grad
        ]
        wanted = [x for x in self.operands if x.requires_grad]
        if not flowing or not wanted:
            return Backward((None,) * len(self.operands), (-1,) * len(self.operands), (), 0)
        with LiveStorages() as live:
            found = iter(
                torch.autograd.grad(
                    [result for result, _ in flowing],
                    wanted,
                    [grad for _, grad in flowing],
                    allow_unused=True,
                )
            )
        grads = [next(found) if x.requires_grad else None for x in self.operands]
        given = iter(grad for _, grad in flowing)
        arriving = [
            next(given) if spec is not None and result.requires_grad else None
            for result, spec in zip(self.results, incoming, strict=True)
        ]
        number = {
            storage_key(x): i
            for i, x in reversed(list(enumerate([*arriving, *self.operands])))
            if x is not None
        }
        fresh: list[int] = []
        homes = []
        for grad in grads:
            if grad is None:
                homes.append(-1)
                continue
            key = storage_key(grad)
            if key not in number:
                number[key] = len(arriving) + len(self.operands) + len(fresh)
                fresh.append(grad.untyped_storage().nbytes())
            homes.append(number[key])
        # What came and is sent from where it lies is there until it has arrived.
        lent = sum(n for key, n in live.lent.items() if number.get(key) not in homes)
        return Backward(
            tuple(None if g is None else Spec.of(g) for g in grads),
            tuple(homes),
            tuple(fresh),
            max(live.peak + lent - sum(fresh), 0),
            live.sending,
            live.sent + lent,
        )


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operators make while it is active.

    peak:
        the most bytes of such storages that were alive at one time
    sending, sent:
        the same up to where a bucket first waits for a collective, and what is alive then; None and
        0 where none does
    lent:
        the bytes of storages made before, by their key, that such a collective reads or writes
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self.sending: int | None = None
        self.sent = 0
        self.lent: dict[int, int] = {}
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is WAITS and self.sending is None:
            self.sending, self.sent = self.peak, self._live
        if func is WAITS:
            storage, key = args[0].untyped_storage(), storage_key(args[0])
            if key not in self._known:
                self.lent[key] = storage.nbytes()
        before = {storage_key(x) for x in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            key = storage_key(tensor)
            if key not in before and key not in self._known:
                storage = tensor.untyped_storage()
                self._known[key] = storage.nbytes()
                self._live += storage.nbytes()
                weakref.finalize(storage, self._gone, key).atexit = False
        self.peak = max(self.peak, self._live)
        return made

    def _gone(self, key: int) -> None:
        self._live -= self._known.pop(key)


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share their storage, as long as it is alive."""
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors among what an operator takes or gives; it knows no other containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _mapped(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """The arguments of a call with every one of them replaced, all the way down."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(item, fn) for item in tree)
    if isinstance(tree, dict):
        return {key: _mapped(item, fn) for key, item in tree.items()}
    return fn(tree)
