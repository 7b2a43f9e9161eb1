"""A sum over the ranks that is returned and that nobody has looked at yet.

A training loop asks for the backward pass of its loss first, and for the number later, if at all.
Where ranks wait for each other's losses in between, whatever holds one of them up in the forward
pass holds up all. So the sum is only started; the tensor that is returned stands for it, and any
operator that reads the tensor waits. Its gradient is known without it: every rank's own term has
the gradient of the sum.

That is done on CPUs, where waiting means that the process stands still. Collectives of other
devices run in a stream of their own anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from autopar.runtime.collectives import AllReduce
from autopar.runtime.compiling import is_compiling
from autopar.runtime.groups import Group, Landing, RankContext, current

#: What makes a tensor like another one, and does not look at it.
_LIKE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.ones_like.default: torch.ones,
    torch.ops.aten.zeros_like.default: torch.zeros,
}


#: What training loops do with a loss before its backward pass: it is done when that is there.
_ARITHMETIC = frozenset(
    getattr(getattr(torch.ops.aten, name), kind)
    for name in ("add", "div", "mul", "sub")
    for kind in ("Tensor", "Scalar")
)


class Awaited(Tensor):
    """A tensor that is on its way: the first operator that reads it waits.

    What operators give are plain tensors, but for sums and products of numbers. Those are worked
    out as soon as what they are made of has arrived, before anybody can write to it.
    """

    _landing: Landing | None
    _landed: Tensor | None
    _made_of_it: list[weakref.ref[Awaited]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, landing: Landing) -> Awaited:
        return Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=like.dtype, device=like.device
        )

    def __init__(self, like: Tensor, landing: Landing) -> None:
        self._landing, self._landed, self._made_of_it = landing, None, []

    @property
    def has_landed(self) -> bool:
        return self._landed is not None

    def wait(self) -> Tensor:
        """The tensor itself."""
        if self._landing is not None:
            landing, self._landing = self._landing, None
            try:
                self._landed = landing()
            except BaseException:
                self._landing = landing  # whoever asks again is told again
                raise
            for made in self._made_of_it:
                later = made()
                if later is not None:
                    later.settle()
        assert self._landed is not None
        return self._landed

    def settle(self) -> None:
        """Wait, unless somebody does already."""
        if self._landing is not None:
            self.wait()

    def _plain(self) -> Tensor:
        return self.wait().detach().requires_grad_(self.requires_grad)

    # What reads memory without an operator.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        return self._plain().__format__(spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self._plain().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain().numpy(*args, **kwargs)

    def data_ptr(self) -> int:
        return self.wait().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.wait().untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _LIKE and isinstance(args[0], Awaited):
            # The backward pass starts from ones.
            how = {"dtype": args[0].dtype, "device": args[0].device}
            how |= {key: item for key, item in (kwargs or {}).items() if item is not None}
            how.pop("memory_format", None)
            return _LIKE[func](args[0].shape, **how)
        given = args, kwargs or {}
        if func in _ARITHMETIC and all(x.dim() == 0 for x in args if isinstance(x, Tensor)):
            return _later(func, *given)
        args, kwargs = pytree.tree_map_only(Awaited, Awaited.wait, given)
        return func(*args, **kwargs)


def _later(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What an operator gives for numbers of which some are on their way."""
    # What is there may be written to until then.
    args = tuple(
        x
        if isinstance(x, Awaited) and not x.has_landed
        else x.clone()
        if isinstance(x, Tensor)
        else x
        for x in args
    )
    pending = [x for x in args if isinstance(x, Awaited)]
    if not pending:
        return func(*args, **kwargs)
    like = func(*(torch.ones_like(x) if isinstance(x, Awaited) else x for x in args), **kwargs)
    made = Awaited(
        like, lambda: func(*(x.wait() if isinstance(x, Awaited) else x for x in args), **kwargs)
    )
    for x in pending:
        x._made_of_it.append(weakref.ref(made))
    return made


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        landing = group.start_all_reduce(x.detach().clone(memory_format=torch.contiguous_format))
        made = ctx.made = Awaited(x, landing)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        made: Awaited = ctx.made
        # When the backward pass is over, the sum has long been there.
        torch.autograd.Variable._execution_engine.queue_callback(made.settle)
        return grad, None


#: The last of a rank that nobody may have waited for.
_LATEST: WeakKeyDictionary[RankContext, Awaited] = WeakKeyDictionary()


@_disable_dynamo
def all_reduce_returned(
    x: Tensor, axes: tuple[str, ...], to: str, *, reduced: torch.dtype | None = None
) -> Tensor:
    """The step ``autopar.all_reduce`` to I, of a value that is returned and read by nothing."""
    context = current()
    group = context.group(axes)
    waits = x.device.type == "cpu" and group.size > 1 and not is_compiling()
    if not (waits and x.requires_grad and torch.is_grad_enabled()):
        return AllReduce(group, to, reduced=reduced)(x)
    settle(context)
    made = _Returned.apply(x, group)
    _LATEST[context] = made
    return made


def settle(context: RankContext) -> None:
    """Wait for what a rank returned before, which has long been there."""
    earlier = _LATEST.pop(context, None)
    if earlier is not None:
        earlier.wait()
