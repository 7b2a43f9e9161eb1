"""Giving first values to a model that came without any, one module at a time.

The model's own code initialises it. It runs on the skeleton, whose parameters are fake; whichever
of them it touches is replaced, for as long as one module is initialised, by a whole real tensor,
of which every rank then keeps its piece. So a rank never holds much more than its share, and the
values do not depend on the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar import agreement
from autopar.face import Face
from autopar.ir.errors import NoValuesError, PlanError
from autopar.materialise import no_value
from autopar.muster import meet

InitFn = Callable[[nn.Module], Any]

#: Whole tensors that are held at a time, in bytes, before those that are done are cut.
HELD_BYTES = 256 << 20

#: Questions about a tensor that do not need its values.
_ABOUT = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_floating_point", "is_complex"}
)
#: Properties of a tensor that are tensors over its values.
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def initialise(parallel: Face, init_fn: InitFn | None = None) -> None:
    """Give values to the parameters and buffers of a parallel module that have none.

    init_fn:
        called with every module of the model, children before parents, as `nn.Module.apply` does.
        Default: what the model brings along: `_init_weights(module)` of a Hugging Face model (and
        of models inside it), else the `reset_parameters()` of each module.

    All ranks call it together and draw the same numbers: from PyTorch's default generator where
    all ranks stand at the same place in it, else as rank 0 does.

    Raises NotCompiledError before the module is compiled, and NoValuesError, naming them, where
    parameters are left that nothing gives a value to.
    """
    skeleton = parallel.skeleton()
    if init_fn is not None and not callable(init_fn):
        raise PlanError(f"init_fn: expected a function of one module, got {init_fn!r}")
    names = {id(t): n for n, t in (*skeleton.named_parameters(), *skeleton.named_buffers())}
    values = _Values(parallel, names)
    meet(parallel.context, "initialise")
    state = torch.get_rng_state()
    first, *others = agreement.gather(parallel.context, state)
    alike = all(torch.equal(first, other) for other in others)
    try:
        torch.set_rng_state(first)
        with torch.no_grad(), values:
            for module, run in _calls(skeleton, init_fn):
                run(module)
                values.keep_pieces()
    finally:
        if not alike:
            torch.set_rng_state(state)
    parallel.mark_filled(*values.filled)
    left = sorted(parallel.without_values)
    if left:
        raise NoValuesError(
            f"initialise: nothing gives values to {len(left)} parameters and buffers, {left[0]!r} "
            "among them. Give an init_fn(module) that does"
        )


def _calls(model: nn.Module, init_fn: InitFn | None) -> list[tuple[nn.Module, InitFn]]:
    """What to call with which module, in order."""
    found: list[tuple[nn.Module, InitFn]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, inherited: InitFn) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        own = _per_module(module) if init_fn is None else None
        for child in module.children():
            visit(child, own or inherited)
        found.append((module, own or inherited))

    visit(model, init_fn or _reset)
    return found


def _per_module(module: nn.Module) -> InitFn | None:
    """`module._init_weights`, where it is a function of one module."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    return method if len(needed) == 1 else None


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


class _Values(TorchFunctionMode):
    """Lets functions that touch fake parameters have real ones."""

    def __init__(self, parallel: Face, names: dict[int, str]) -> None:
        super().__init__()
        self.filled: set[str] = set()
        self._parallel = parallel
        self._names = names
        self._real: dict[str, Tensor] = {}
        #: Real tensors that something else may still refer to.
        self._shared: set[str] = set()
        #: The largest tensor that was cut last: layers are often alike, and freed memory is not
        #: always given back.
        self._room: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched: dict[int, Tensor] = {}
        if _needs_values(func):
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            touched = {id(t): t for t in tensors if id(t) in self._names}
        if not touched:
            return func(*args, **kwargs)
        fakes = {id(self._real_of(self._names[key])): fake for key, fake in touched.items()}
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda t: self._real_of(self._names[id(t)]) if id(t) in touched else t,
            (args, kwargs),
        )
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and id(result) in fakes:
            result = fakes[id(result)]
        elif isinstance(result, Tensor):
            self._shared.update(self._names[key] for key in touched)
        if sum(t.nbytes for t in self._real.values()) > HELD_BYTES:
            self.keep_pieces(*(set(self._real) - self._shared - {self._names[k] for k in touched}))
        return result

    def _real_of(self, name: str) -> Tensor:
        if name not in self._real:
            self._real[name] = self._parallel.whole_value(name, self._room)
            if self._room is not None and self._real[name].data_ptr() == self._room.data_ptr():
                self._room = None
        return self._real[name]

    def keep_pieces(self, *names: str) -> None:
        """Cut the real tensors (default: all) to this rank's pieces, and let go of them."""
        for name in names or tuple(self._real):
            real = self._real.pop(name)
            if name not in self._shared and (self._room is None or real.nbytes > self._room.nbytes):
                self._room = real
            self._shared.discard(name)
            with torch._C.DisableTorchFunction():
                if name in self._parallel.without_values and not _left_empty(real):
                    self._parallel.set_whole(name, real)
                    self.filled.add(name)


def _needs_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VALUES
    return name not in _ABOUT and name not in ("__set__", "__delete__")


def _left_empty(tensor: Tensor) -> bool:
    """Whether a tensor still has elements that `no_value` filled."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == no_value(tensor.dtype)).any())
