"""What to do when export stops at Python that depends on the values of tensors.

Tried one after the other, and only where the example call has real data to look at (before that,
once, masks that only a traced model makes are left out):

1. a mixture of experts that loops over the experts that were hit is traced in an implementation
   of fixed shapes, where its model has one;
2. truth values are frozen, and checked when the graph runs (`trace_decisions`), what the model
   computes from its own constants is known (`trace_known`), and other whole numbers out of tensors
   stay symbols (`trace_numbers`); loops over the experts that were hit become grouped products
   (`trace_loops`);
3. the module at fault, and others of its class, become one operator each (`trace_modules`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.ir.errors import AutoparError, InputError
from autopar.ir.trace_decisions import Decisions, Replaying, record
from autopar.ir.trace_errors import experts_module, frames_of, is_data_dependent, running_modules
from autopar.ir.trace_known import KnownNumbers, held_numbers
from autopar.ir.trace_loops import is_unfit_loop
from autopar.ir.trace_modules import Caller, Observed, modules_whole, observe_modules
from autopar.ir.trace_numbers import numbers_stay_symbols
from autopar.ir.trace_watch import caches_off, state_kept

#: Where transformers makes attention masks.
_MASKS = "transformers.masking_utils"


@contextlib.contextmanager
def _masks_as_without_a_trace() -> Iterator[None]:
    """Let transformers leave out attention masks that mask nothing, as it does on real tensors.

    Some of its models can take no mask: their attention is over fewer places than it covers. That
    a mask which is given has no padding is a decision on data, frozen and checked like others.
    """
    module = sys.modules[_MASKS]
    with contextlib.ExitStack() as stack:
        for name in ("is_torchdynamo_exporting", "is_tracing"):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, lambda *given: False))
        yield


#: How often export is tried again; each time something else has been learnt.
_TRIES = 12


class Fallbacks:
    """What was learnt from failures so far, for one model and example call.

    loops:
        whether loops over hit experts are to be taken apart (`trace_loops`)
    notes:
        what the user should know of it, one sentence each
    """

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._decisions: Decisions | None = None
        self._observed: dict[str, Observed] = {}
        self._callers: list[Caller] = []
        self._experts: list[tuple[Any, Any]] = []
        self._unfit: set[type] = set()
        self._tries = 0
        self._masks_left_out = False
        self._follow_numbers = False
        self.loops = False
        self.notes: list[str] = []

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """The model with the modules that are kept whole."""
        with modules_whole(list(self._observed.values())) as self._callers:
            yield

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What is to hold during one export of the prepared model."""
        for caller in self._callers:
            caller.restart()
        with contextlib.ExitStack() as stack:
            if self._decisions is not None:
                replaying = stack.enter_context(Replaying(self._decisions))
                if self._follow_numbers:
                    stack.enter_context(numbers_stay_symbols(self._model))
                    known = KnownNumbers(self._model, held_numbers(self._model), replaying.skip)
                    stack.enter_context(known)
            if self._masks_left_out:
                stack.enter_context(_masks_as_without_a_trace())
            yield

    def restore(self) -> None:
        """Put the model's configuration back."""
        for config, name in self._experts:
            config._experts_implementation = name
        self._experts.clear()

    def learn(self, error: BaseException) -> bool:
        """Whether something was changed that may get export over this error."""
        self._tries += 1
        if self._tries > _TRIES:
            return False
        if self.loops and is_unfit_loop(error):
            self.loops = False
            return True
        if not is_data_dependent(error):
            if self._follow_numbers:
                # It may stand in the way of what would go without it.
                self._follow_numbers = self.loops = False
                return True
            first, self._masks_left_out = not self._masks_left_out, True
            return first and _MASKS in sys.modules
        frames = frames_of(error)
        if self._switch_experts(frames):
            return True
        if not self._has_data():
            return False
        try:
            with state_kept(self._model), caches_off(self._model):
                if self._decisions is None:
                    self._decisions = record(self._model, self._args, self._kwargs, set())
                    self._follow_numbers = self.loops = True
                    return True
                return self._keep_whole(frames)
        except AutoparError:
            raise
        except Exception as failure:
            self._refuse_failing(failure)
            return False

    def _refuse_failing(self, failure: Exception) -> None:
        """Say so where it is the model itself that cannot run the example call."""
        try:
            with state_kept(self._model), caches_off(self._model), torch.no_grad():
                self._model(*self._args, **self._kwargs)
        except Exception as error:
            raise InputError(
                f"{type(self._model).__name__} fails on the example call by itself, with "
                f"{type(error).__name__}: {str(error).strip()[:300]}"
            ) from failure

    def _switch_experts(self, frames: Sequence[FrameType]) -> bool:
        module = experts_module(frames)
        config = getattr(module, "config", None)
        before = getattr(config, "_experts_implementation", None)
        if module is None or config is None or before in ("batched_mm", "grouped_mm"):
            return False
        doubles = any(p.dtype == torch.float64 for p in module.parameters())
        # PyTorch has no grouped product of double precision.
        name = "batched_mm" if doubles else "grouped_mm"
        self._experts.append((config, before))
        config._experts_implementation = name
        self.notes.append(
            f"{type(module).__name__}: its loop over the experts that were hit depends on data; "
            f"traced with experts_implementation={name!r}"
        )
        return True

    def _has_data(self) -> bool:
        tensors = [
            *self._model.parameters(),
            *self._model.buffers(),
            *(x for x in pytree.tree_leaves((self._args, self._kwargs)) if isinstance(x, Tensor)),
        ]
        return not any(t.device.type == "meta" for t in tensors)

    def _keep_whole(self, frames: Sequence[FrameType]) -> bool:
        """Keep the innermost running module whole that is not kept yet, with all of its class."""
        paths = {id(m): path for path, m in self._model.named_modules()}
        running = [m for m in running_modules(frames) if paths.get(id(m))]
        tried = [type(one.module) for one in self._observed.values()]
        for module in running:
            if type(module) in tried:
                # What is called with a shape out of data is kept whole by a module around it.
                self._unfit.add(type(module))
        chosen = next((m for m in reversed(running) if type(m) not in self._unfit), None)
        if chosen is None:
            return False
        alike = [p for p, m in self._model.named_modules() if p and type(m) is type(chosen)]
        modules = dict(self._model.named_modules())
        before = [p for p in self._observed if type(modules[p]) not in self._unfit]
        kept = [p for p in (*before, *alike) if not any(p.startswith(f"{q}.") for q in alike)]
        found = observe_modules(self._model, self._args, self._kwargs, list(dict.fromkeys(kept)))
        self._observed = {one.path: one for one in found if one.outputs}
        if paths[id(chosen)] not in self._observed:
            return False
        ignored = {id(one.module) for one in self._observed.values()}
        if self._decisions is not None:
            self._decisions = record(self._model, self._args, self._kwargs, ignored)
        return True

    def all_notes(self) -> list[str]:
        """The notes, the modules that are kept whole included."""
        return self.notes + [
            f"{path} ({type(one.module).__name__}): its Python depends on the values of tensors, "
            f"so it runs whole on every rank"
            for path, one in self._observed.items()
        ]
