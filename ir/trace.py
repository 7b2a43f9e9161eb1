"""Tracing: from an `nn.Module` and an example call to a functional IR graph.

The work is shared out as follows::

    trace            the entry point and what it returns
    trace_export     runs torch.export with the model guarded (caches off, state restored)
    trace_read       reads the exported program: its sources, outputs and updates
    trace_watch      sees what export would drop without a word, and changed Python state
    trace_random     random numbers that are drawn while a model is traced
    trace_errors     turns a failure of export into one sentence with the user's line
    trace_retry      what to do where export stops at Python that depends on data:
    trace_decisions    truth values frozen, and checked when the graph runs
    trace_known        numbers that a model computes from its own constants
    trace_numbers      other numbers out of tensors, as symbols
    trace_modules      modules as one operator
    trace_functions  custom autograd functions as one operator
    trace_replace    functions that are traced as something else:
    trace_grouped      products over the pieces of a split
    trace_loops        loops over the experts that were hit
    trace_convert    reads the exported program into IR nodes
    trace_regions    stretches of it whose shapes depend on data
    trace_special    calls that become other calls
    trace_strided    `as_strided` as a function of its tensor
    trace_alias      makes in-place writes functional
    trace_spelling   one spelling per operation, sizes as true sizes
    trace_names      names of values
    trace_origin     module path and source line of a node
    trace_grad       which results carry a gradient
    trace_draws      random numbers that are drawn for nothing
    normalise        simplifies the graph that comes out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.calling import CallSignature
from autopar.ir.graph import Graph
from autopar.ir.normalise import normalise
from autopar.ir.trace_draws import separate_draws
from autopar.ir.trace_export import ambient_autocast, export, model_device
from autopar.ir.trace_read import Reader, StateTensor

__all__ = ["Program", "StateTensor", "trace"]


@dataclass(frozen=True)
class Program:
    """A traced model: a graph, and what is needed to call it as the model is called.

    graph:
        sources first (parameters, buffers, constants, inputs), then calls in execution order.
        There is one ``input`` node per tensor of `signature`, in the same order, used or not; a
        parameter, buffer or constant has a node only where the graph uses or updates it. No call
        writes to its operands; `graph.updates` lists the new values of buffers. Nodes under
        autocast have ``attrs["autocast"] = (device type, dtype)``; nodes of a checkpointed module
        have ``attrs["recompute"]``, its path.
    signature:
        binds ``(*args, **kwargs)`` of a later call to the input tensors
    out_spec:
        the structure of the model's output; `graph.outputs` are its leaves
    params, buffers:
        canonical name -> the tensor's description, the unused ones included
    constants:
        the tensors that `forward` captured or made from Python data, by the `target` of their node
    device:
        where the model was traced. Calls that name a device name this one, so that running
        elsewhere means replacing it.
    training:
        whether the model was in training mode
    notes:
        what the user should know, one sentence each
    """

    graph: Graph
    signature: CallSignature
    out_spec: pytree.TreeSpec
    params: Mapping[str, StateTensor]
    buffers: Mapping[str, StateTensor]
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    training: bool
    notes: tuple[str, ...] = ()

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's own output structure around the flat `outputs` of the graph."""
        return pytree.tree_unflatten(list(outputs), self.out_spec)


def trace(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Program:
    """Trace `model` on one example call; the model comes out as it went in.

    args, kwargs:
        the example call. Its tensors may be on the meta device; a model on the meta device may be
        given real tensors. Only their shapes and dtypes count.

    Raises InputError where the call does not fit the model, and TraceError, with the user's line
    and what to change, where the model cannot be traced.
    """
    kwargs = dict(kwargs or {})
    signature = CallSignature.of(model.forward, args, kwargs)
    exported = export(model, args, kwargs)
    device = model_device(model, (args, kwargs))
    autocast = ambient_autocast(device)
    read = Reader(model, signature, autocast, exported.checkpointed)
    graph = separate_draws(read.graph(exported.program), device)
    spec = exported.program.call_spec.out_spec
    assert spec is not None
    return Program(
        graph=normalise(graph),
        signature=signature,
        out_spec=spec,
        params=read.params,
        buffers=read.buffers,
        constants=read.constants,
        device=device,
        training=model.training,
        notes=exported.notes,
    )
