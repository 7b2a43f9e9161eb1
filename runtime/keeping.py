"""What is kept for the backward pass: parts of an emitted graph that keep something else.

`Kept` runs one call and keeps what autograd saves for it in another form or place. `Recomputed`
runs a region of calls and keeps only what they read from outside; the backward pass runs them
again, drawing the same random numbers and making the same collectives, on every rank alike.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from autopar.ir.keep import COMPRESS, COMPRESS8, OFFLOAD
from autopar.ir.packed import INDICES
from autopar.runtime.compiling import is_compiling
from autopar.runtime.gathered import Saved, saved_gather
from autopar.runtime.groups import RankContext, current
from autopar.runtime.packing import (
    Form,
    HostCopy,
    Like,
    OnHost,
    eight_bit,
    lossless,
)
from autopar.runtime.random import Snapshot, replayed, snapshot


class Kept(nn.Module):
    """Runs a call and keeps what its backward needs as a policy says.

    policy:
        of `autopar.ir.keep`; "" keeps everything but gathered copies that can be gathered again
    op:
        the operator of the call
    resident:
        which of the arguments are kept in any case (parameters, inputs), where they are
    """

    def __init__(self, run: fx.GraphModule, policy: str, op: str, resident: Sequence[bool]) -> None:
        super().__init__()
        self.run, self.policy, self.op, self.resident = run, policy, op, tuple(resident)

    @_disable_dynamo
    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled() or is_compiling():
            return self.run(*args)
        with self.hooks(args):
            return self.run(*args)

    def hooks(self, args: Sequence[Tensor]) -> saved_tensors_hooks:
        """What sees the tensors that autograd saves."""
        stay = {
            x.untyped_storage()._cdata for x, here in zip(args, self.resident, strict=True) if here
        }
        form = _former(self.policy, self.op, args)

        def pack(x: Tensor) -> Tensor | Saved | Form:
            again = saved_gather(x)
            if again is not None:
                return again
            # Autograd would otherwise hold the node that made the tensor, which holds this.
            x = x.detach()
            if form is None or x.untyped_storage()._cdata in stay:
                return x
            return form(x) or x

        return saved_tensors_hooks(pack, _open)


def _open(packed: Tensor | Saved | Form) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.open()


def _former(policy: str, op: str, args: Sequence[Tensor]):  # type: ignore[no-untyped-def]
    if policy == OFFLOAD:
        return _on_host
    if policy not in (COMPRESS, COMPRESS8):
        return None
    dims = INDICES.get(op, 0)
    plane = math.prod(args[0].shape[-dims:]) if dims else 0
    return lossless(op, plane) if policy == COMPRESS else eight_bit(op, plane)


#: Storage -> its copies on the host, by version; as long as it is alive.
_COPIES: dict[int, dict[int, weakref.ref[HostCopy]]] = {}


def _on_host(x: Tensor) -> OnHost | None:
    """A tensor on the host; one copy serves all that operators save of a storage."""
    if not x.numel() or x.is_conj() or x.is_neg():
        return None
    storage = x.untyped_storage()
    if storage._cdata not in _COPIES:
        _COPIES[storage._cdata] = {}
        weakref.finalize(storage, _COPIES.pop, storage._cdata, None).atexit = False
    copies = _COPIES[storage._cdata]
    known = copies.get(x._version)
    found = known() if known is not None else None
    if found is None:
        found = HostCopy.of(x)
        copies[x._version] = weakref.ref(found)
    return OnHost(found, Like.of(x), int(x.storage_offset()))


class Recomputed(Kept):
    """Runs a region whose backward computes it again.

    policy, resident:
        how what the region reads from outside is kept
    early:
        whether running it again stops when all that is needed is there; not where a rank might
        stop before a collective that others wait in
    """

    def __init__(
        self, run: fx.GraphModule, policy: str, resident: Sequence[bool], early: bool
    ) -> None:
        super().__init__(run, policy, "", resident)
        self.early = early

    @_disable_dynamo
    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled() or is_compiling():
            return self.run(*args)
        context = current()
        start = snapshot(context)
        with self.hooks(args):
            return checkpoint(
                self.run,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,  # random operators draw from the context's numbers
                context_fn=lambda: (contextlib.nullcontext(), _Again(context, start)),
                early_stop=self.early,
            )


class _Again:
    """A context that a region is run again in, each time that backward needs it.

    Backward may run in another thread, in which no rank is active.
    """

    def __init__(self, context: RankContext, start: Snapshot) -> None:
        self._context, self._start = context, start
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._context.active())
        self._entered.enter_context(replayed(self._context, self._start))

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)
