"""Numbers that a model computes from its own constants: known while it is traced.

A convolution that keeps its stride in a buffer and pads by what it computes from it, or a mask
made of ones whose places are listed with ``nonzero``, looks data-dependent to export, yet no input
has a part in it. Small whole numbers in buffers, and tensors that `forward` fills by itself, are
followed through a trace: each function of known tensors alone is run on their values as well.
Where Python asks such a tensor for a number it gets it, and a result whose shape depends on known
values becomes a constant.

A buffer can be loaded with something else later, so the graph checks on every call that each
buffer whose numbers were taken still holds them (``autopar.checked``, see `trace_decisions`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.ir.trace_random import RandomNoted

#: Elements up to which a tensor is followed; sizes, indices and masks of places are small.
_MOST = 1 << 14
#: Elements of a buffer up to which its numbers are taken; each is written into a check.
_MOST_OF_BUFFER = 16
#: Functions that fill a tensor with what their arguments say.
_FILLS = {"ones", "zeros", "full", "arange", "tensor", "eye", "linspace", "tril_indices"}
_FILLS |= {"triu_indices", "as_tensor", "scalar_tensor"}
#: Those that fill one of the shape of another, with the number they fill it with.
_LIKE = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0}
#: Functions whose result has a shape that depends on values.
_SHAPED_BY_VALUES = {"nonzero", "argwhere", "unique", "masked_select", "bincount"}
_SHAPED_BY_VALUES |= {"repeat_interleave", "unique_consecutive"}
#: Functions with a whole number among their arguments that may be given as a tensor.
_COUNTED = {"multinomial", "roll", "narrow", "repeat_interleave", "topk", "arange", "one_hot"}
#: Ways to ask a tensor for the numbers it holds.
_READS = {"item", "tolist", "__bool__", "is_nonzero", "__int__", "__index__", "__float__"}
_READS |= {"__format__"}


@dataclass(frozen=True)
class _Known:
    """A value, and the buffers that it comes from. `fake` is held so that its id stays its own."""

    fake: Tensor
    value: Tensor
    buffers: frozenset[str]


def held_numbers(model: nn.Module) -> dict[str, Tensor]:
    """The small buffers of whole numbers of a model, by name, as they are now."""
    return {
        name: b.detach().clone()
        for name, b in model.named_buffers()
        if b.numel() <= _MOST_OF_BUFFER
        and not b.is_floating_point()
        and not b.is_complex()
        and b.device.type != "meta"
    }


class KnownNumbers(TorchFunctionMode):
    """Follows known tensors through one trace of `model`, whose buffers hold `numbers`.

    seen:
        is told of every call that asks a known tensor for its numbers
    """

    def __init__(
        self,
        model: nn.Module,
        numbers: Mapping[str, Tensor],
        seen: Callable[[Any, tuple[Any, ...]], None] = lambda func, args: None,
    ) -> None:
        super().__init__()
        self._model, self._numbers, self._seen = model, numbers, seen
        self._known: dict[int, _Known] = {}
        self._checked: set[str] = set()
        self._seeded = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._seeded:
            self._seed()
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = [self._of(x) for x in tensors]
        if _writes(name, kwargs):
            self._forget(tensors, known)
            return func(*args, **kwargs)
        sources = [k for k in known if k is not None]
        if tensors and len(sources) == len(tensors):
            if name in _READS:
                self._take(sources)
                self._seen(func, args)
                return self._run(func, args, kwargs)
            if self._shaped_by_values(name, args):
                return self._constant(func, args, kwargs, sources)
        made = self._call(func, name, args, kwargs)
        if isinstance(made, Tensor) and name in _LIKE and _is_small(made):
            with _disable_current_modes():
                value = torch.full(made.shape, _LIKE[name], dtype=made.dtype, device=made.device)
            self._note(made, value, ())
        elif (sources and len(sources) == len(tensors)) or (not tensors and name in _FILLS):
            self._follow(made, func, args, kwargs, sources)
        return made

    def _seed(self) -> None:
        """Know the buffers, once they are what a trace makes of them."""
        for name, buffer in self._model.named_buffers():
            if name in self._numbers and isinstance(buffer, FakeTensor):
                self._seeded = True
                value = self._numbers[name]
                self._known[id(buffer)] = _Known(buffer, value, frozenset([name]))

    def _of(self, x: Tensor) -> _Known | None:
        if not isinstance(x, FakeTensor):
            return None
        found = self._known.get(id(x))
        return found if found is not None and found.fake is x else None

    def _run(self, func: Any, args: Any, kwargs: Any, noted: RandomNoted | None = None) -> Any:
        """A function on the values of its known arguments; `noted` sees what it draws."""

        def value(x: Any) -> Any:
            found = self._of(x) if isinstance(x, Tensor) else None
            return x if found is None else found.value

        given, options = pytree.tree_map(value, (args, dict(kwargs)))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.no_grad())
            stack.enter_context(DisableTorchFunction())
            if noted is not None:
                stack.enter_context(noted)
            return func(*given, **options)

    def _follow(
        self, made: Any, func: Any, args: Any, kwargs: Any, sources: Sequence[_Known]
    ) -> None:
        """Know the results of a function of known tensors, unless they are large or drawn."""
        results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
        if not results or not all(isinstance(x, FakeTensor) and _is_small(x) for x in results):
            return
        noted = RandomNoted()
        try:
            made = self._run(func, args, kwargs, noted)
        except Exception:  # what cannot be run beside the trace is not known
            return
        values = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
        if noted.found or [x.shape for x in values] != [x.shape for x in results]:
            return
        for fake, real in zip(results, values, strict=True):
            self._note(fake, real, sources)

    def _note(self, fake: Tensor, value: Tensor, sources: Sequence[_Known]) -> None:
        buffers = frozenset(name for k in sources for name in k.buffers)
        self._known[id(fake)] = _Known(fake, value, buffers)

    def _forget(self, tensors: Sequence[Tensor], known: Sequence[_Known | None]) -> None:
        """Know nothing more of a tensor that is written to, nor of what shares its memory."""
        for x, k in zip(tensors, known, strict=True):
            if k is not None:
                memory = x.untyped_storage()._cdata
                self._known = {
                    key: one
                    for key, one in self._known.items()
                    if one.fake.untyped_storage()._cdata != memory
                }

    def _take(self, sources: Sequence[_Known]) -> None:
        """Check in the graph that the buffers behind some values hold what they held."""
        names = {name for k in sources for name in k.buffers} - self._checked
        buffers = dict(self._model.named_buffers()) if names else {}
        for name in sorted(names):
            self._checked.add(name)
            held, buffer = _numbers(self._numbers[name]), buffers[name]
            same = (buffer == torch.tensor(held, device=buffer.device)).all()
            where = f"the buffer {name!r}, whose numbers {held} were taken as constants"
            torch.ops.autopar_trace.decided(same, True, where)

    def _shaped_by_values(self, name: str, args: tuple[Any, ...]) -> bool:
        if name == "__getitem__":
            return any(
                isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
                for x in pytree.tree_leaves(args[1:])
            )
        return name in _SHAPED_BY_VALUES or (name == "where" and len(args) == 1)

    def _constant(self, func: Any, args: Any, kwargs: Any, sources: Sequence[_Known]) -> Any:
        """The result of a function of known tensors, as constants of the trace."""
        self._take(sources)

        def lifted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            made = torch.tensor(_numbers(value), dtype=value.dtype, device=value.device)
            made = made.reshape(value.shape)
            self._note(made, value, ())
            return made

        return pytree.tree_map(lifted, self._run(func, args, kwargs))

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The function itself, given numbers where sizes are known tensors.

        A list of numbers cannot be told from a list of tensors, but a function that wants tensors
        refuses numbers.
        """
        deep = name in _COUNTED

        def number(x: Any) -> _Known | None:
            found = self._of(x) if isinstance(x, Tensor) else None
            whole = found is not None and x.dim() == 0 and not x.is_floating_point()
            return found if whole and x.dtype != torch.bool else None

        def numbers(item: Any, inside: bool) -> Any:
            if isinstance(item, (tuple, list)) and type(item) in (tuple, list):
                return type(item)(numbers(x, True) for x in item)
            if isinstance(item, slice):
                return slice(*(numbers(x, True) for x in (item.start, item.stop, item.step)))
            found = number(item) if inside else None
            if found is None:
                return item
            taken.append(found)
            return _numbers(found.value)

        taken: list[_Known] = []
        first = args[:1] if deep and name != "arange" else ()
        given = (*first, *(numbers(x, deep) for x in args[len(first) :]))
        options = {key: numbers(x, deep) for key, x in kwargs.items()}
        if taken:
            try:
                made = func(*given, **options)
            except TypeError:
                return func(*args, **kwargs)
            self._take(taken)
            return made
        return func(*args, **kwargs)


def _writes(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__") or _is_augmented(name) or "out" in kwargs


def _is_augmented(name: str) -> bool:
    """Whether a method is that of an operator such as ``+=``."""
    return name in {f"__i{op}__" for op in _AUGMENTED}


_AUGMENTED = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lshift", "rshift", "matmul", "div"),
)


def _is_small(x: Tensor) -> bool:
    return all(isinstance(n, int) for n in x.shape) and x.numel() <= _MOST


def _numbers(value: Tensor) -> Any:
    """What a real tensor holds, as Python numbers."""
    with _disable_current_modes():
        return value.tolist()
