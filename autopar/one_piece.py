"""A parallel module inside of `torch.compile`.

Dynamo, which reads Python, is shown one call of the whole module; the tracer behind it
(AOTAutograd) runs that call on fake tensors and takes down the operators of the graph and of its
backward, collectives included. So nothing of what the module does in Python breaks the graph.

What a graph of operators cannot hold is left out: ranks do not compare their calls, and the
gradients of a bucket are not handed to parameters behind autograd's back but returned
(`autopar.runtime.fused`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.ir.calling import Entry, TensorArgument
from autopar.ir.errors import TraceError


@cache
def call_in_one_piece() -> Callable[..., Any]:
    """The call ``(module, flags, args, kwargs)`` of a parallel module that Dynamo does not look
    into. A graph is kept for each value of `flags`."""
    # Imported here: it is the whole of torch's compiler, seconds that tracing needs in any case.
    from torch._dynamo import nonstrict_trace

    def run(module: Any, flags: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return module._run(args, kwargs)

    marked: Callable[..., Any] = nonstrict_trace(run)
    return marked


def of_fixed_sizes(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of a call with sizes that are numbers: our graphs are of fixed shapes, so
    `torch.compile` must not leave a size open that it has seen change."""

    def fixed(entry: Any) -> Any:
        if not isinstance(entry, TensorArgument):
            return entry
        return replace(entry, shape=tuple(map(int, entry.shape)))

    return tuple((path, fixed(entry)) for path, entry in entries)


def whole_if_differentiable(out: Tensor) -> Tensor:
    """An output as a compiled graph may return it: the backward pass of such a graph takes no
    DTensor for granted, and fails where only some of its outputs are differentiated."""
    if isinstance(out, DTensor) and out.requires_grad and torch.is_grad_enabled():
        return out.full_tensor()
    return out


def require_compilable(
    name: str,
    *,
    known: bool,
    exact: bool = False,
    accumulating: bool = False,
    policies: bool = False,
) -> None:
    """Refuse what a compiled graph would get wrong, or could not do as it was asked to.

    known:
        whether the module has a graph for the call
    exact:
        whether that graph draws from PyTorch's own generator (``exact_rng=True``)
    accumulating:
        whether the call is inside of `no_sync`
    policies:
        whether the user asked for something else than to keep all for a backward pass

    Raises TraceError.
    """
    if not known:
        raise TraceError(
            f"torch.compile of {name}: there is no graph for such a call yet, and ranks cannot "
            "agree on one while they compile. Call the module once like this outside of "
            "torch.compile"
        )
    if accumulating:
        raise TraceError(
            f"torch.compile of {name}: a compiled graph sums gradients over the ranks in every "
            "backward pass, so no_sync would spare nothing. Leave it away, gradients add up to the "
            "same; or call the module itself, not the compiled one, inside of it"
        )
    if policies:
        raise TraceError(
            f"torch.compile of {name}: the compiler decides itself what is kept for the backward "
            "pass, so its memory policy would not be followed. Leave memory_policy away, or call "
            "the module itself"
        )
    if exact:
        raise TraceError(
            f"torch.compile of {name}: with exact_rng=True it draws from PyTorch's own generator, "
            "which a compiled graph cannot. Leave exact_rng away, or compile it in evaluation mode"
        )
