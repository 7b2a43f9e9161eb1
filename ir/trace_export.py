"""Running torch.export on a guarded model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.ir.calling import CONSTANT_TYPES, children_of
from autopar.ir.errors import TraceError
from autopar.ir.trace_errors import explain
from autopar.ir.trace_functions import functions_kept
from autopar.ir.trace_random import python_draws_refused
from autopar.ir.trace_replace import FunctionsReplaced
from autopar.ir.trace_retry import Fallbacks
from autopar.ir.trace_watch import (
    caches_off,
    changes_noted,
    checkpoints_noted,
    conversions_checked,
    distributions_unchecked,
    random_state_kept,
    state_kept,
)


@dataclass(frozen=True)
class Exported:
    """An exported program, what was checkpointed in it, and the notes made on the way."""

    program: torch.export.ExportedProgram
    checkpointed: tuple[str, ...]
    notes: tuple[str, ...]


def model_device(model: nn.Module, args: Any) -> torch.device:
    """Where the model lives: the device of its first tensor, or of the first input."""
    for tensor in [*model.parameters(), *model.buffers(), *pytree.tree_leaves(args)]:
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu")


def export(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exported:
    """`torch.export.export(strict=False)` with gradients on; the model comes out as it went in.

    Raises TraceError with the user's line where it fails.
    """
    device = model_device(model, (args, kwargs))
    with torch.inference_mode(False):
        example_args, example_kwargs = pytree.tree_map(
            lambda leaf: _own(leaf, device), (tuple(args), dict(kwargs))
        )
    fallbacks = Fallbacks(model, args, kwargs)
    try:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(_quiet())
            enter(random_state_kept())
            enter(torch.inference_mode(False))
            enter(torch.enable_grad())
            notes = list(enter(caches_off(model)))
            stack.callback(fallbacks.restore)
            while True:
                try:
                    exported = _guarded_export(model, example_args, example_kwargs, fallbacks)
                    break
                except Exception as error:
                    if not fallbacks.learn(error):
                        raise
    except Exception as error:  # export lets any exception of the model through
        raise explain(error, model) from error
    program, checkpointed, state_notes = exported
    notes += state_notes + fallbacks.all_notes()
    modules = dict(model.named_modules())
    notes += [
        f"{name or 'the model itself'}: checkpointed, computed again in the backward pass"
        if name in modules
        else f"{name}: checkpointed, but no module: traced as a plain call"
        for name in checkpointed
    ]
    return Exported(program, tuple(checkpointed), tuple(notes))


def _guarded_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fallbacks: Fallbacks
) -> tuple[torch.export.ExportedProgram, list[str], list[str]]:
    """One try: the program, what was checkpointed, and notes."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(state_kept(model))
        enter(fallbacks.prepared())
        checkpointed = enter(checkpoints_noted(model))
        enter(functions_kept())
        enter(python_draws_refused())
        enter(conversions_checked())
        enter(distributions_unchecked())
        enter(_outputs_checked(model))

        def once() -> torch.export.ExportedProgram:
            replaced = FunctionsReplaced(loops=fallbacks.loops)
            handle = model.register_forward_hook(lambda *call: replaced.returned(call[-1]))
            try:
                with fallbacks.active(), replaced:
                    return torch.export.export(model, args, kwargs, strict=False)
            finally:
                handle.remove()

        program, notes = _settled_export(model, once)
    return program, checkpointed, notes


def _settled_export(
    model: nn.Module, once: Callable[[], torch.export.ExportedProgram]
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Export, and again where `forward` changes Python data, to see whether that matters.

    A flag that is set once and leaves the graph as it was is harmless. Anything else, such as a
    step counter, would be frozen, and is refused with TraceError.
    """
    with changes_noted(model) as changes:
        program = once()
    frozen = [change for change in changes if change.frozen]
    if frozen:
        for change in frozen:
            vars(change.module)[change.name] = change.new
        with changes_noted(model) as later:
            again = once()
        moving = [change for change in later if change.frozen]
        if moving or _text(program) != _text(again):
            raise TraceError(
                f"{(moving or frozen)[0]}, and a trace would freeze it. "
                f"Keep it in a buffer (register_buffer) and compute with that"
            )
    return program, [
        f"{change}; the compiled module does not"
        for change in changes
        if not change.frozen and not type(change.module).__module__.startswith("torch.")
    ]


def _text(program: torch.export.ExportedProgram) -> str:
    """A graph and its constants as text, to compare two traces."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return "\n".join([*(str(m.graph) for m in modules), str(program.constants)])


def _own(leaf: Any, device: torch.device) -> Any:
    """An example input that is nothing else as well, on the model's device if one is meta.

    A tensor that is given twice, or that the model holds, would be taken for one: a later call
    may give others.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if "meta" not in (leaf.device.type, device.type) or leaf.device == device:
        if leaf.is_inference():
            return leaf.clone()  # which autograd may save
        return leaf.detach().requires_grad_(leaf.requires_grad)
    # Only shape and dtype count, and zeros are valid as indices, masks and numbers.
    moved = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return moved.requires_grad_(leaf.requires_grad)


def ambient_autocast(device: torch.device) -> tuple[str, torch.dtype] | None:
    """The autocast that is on around the caller, for the device the model lives on."""
    kind = "cpu" if device.type == "meta" else device.type
    if not torch.is_autocast_enabled(kind):
        return None
    return kind, torch.get_autocast_dtype(kind)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what export prints about itself away from the user; failures are explained by us."""
    # Imported here: it brings the whole of torch's compiler in, seconds that only tracing needs.
    import torch.export._trace as export_trace

    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # `print` is what export shows its partial graph with when it fails.
        with (
            warnings.catch_warnings(),
            mock.patch.object(export_trace, "print", lambda *_, **__: None, create=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _outputs_checked(model: nn.Module) -> Iterator[None]:
    """Look at the model's output before export does: name what it cannot hold."""

    def look(module: nn.Module, args: Any, output: Any) -> None:
        _check_output(output, "output")

    handle = model.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _check_output(value: Any, path: str) -> None:
    """Register plain dataclasses as containers; refuse other objects by their path."""
    if dataclasses.is_dataclass(type(value)) and pytree.tree_is_leaf(value):
        torch.export.register_dataclass(type(value))  # type: ignore[arg-type]
    children = children_of(value)
    if children is not None:
        for _, suffix, child in children:
            _check_output(child, path + suffix)
    elif not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, *CONSTANT_TYPES)):
        kind = type(value).__name__
        way_out = (
            "Call the model with use_cache=False"
            if "Cache" in kind
            else "Return tensors, or tuples, lists, dicts or dataclasses of them"
        )
        raise TraceError(f"{path}: a {kind} cannot be returned from a traced model. {way_out}")
