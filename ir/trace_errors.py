"""From a failure inside export to one sentence with the user's line and the way out."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from autopar.ir.errors import AutoparError, HintError, TraceError
from autopar.ir.trace_origin import is_torch_file

_OUR_FILES = __file__.rsplit("trace_errors", 1)[0]

#: (what the message or the type's name holds, reason, way out), the first that fits is used.
_KNOWN = (
    (
        ("Found DynamicCache", "Found EncoderDecoderCache", "Cache in output"),
        "the output holds a key/value cache",
        "Call with use_cache=False",
    ),
    (
        ("data-dependent", "DataDependent", "GuardOnData", "Could not extract specialized integer"),
        "a Python decision or a size depends on the values of a tensor",
        "Use tensor operators of fixed shape (torch.where, masks, one_hot) instead of if, loops "
        "or indexing by data",
    ),
    (
        ("DynamicOutputShape", "dynamic shape"),
        "an operator gives a tensor whose shape depends on data",
        "Use torch.where or a mask instead of nonzero, unique or boolean indexing",
    ),
    (
        (".numpy()", "numpy() is not", "Cannot convert a tensor to numpy"),
        "a tensor leaves PyTorch for numpy",
        "Compute with tensor operators",
    ),
    (
        ("fake mode", "FakeTensor", "fake tensor"),
        "real tensors are mixed with the traced ones",
        "Make tensors inside forward, or register them with register_buffer",
    ),
)

#: The entries of `_KNOWN` that are about the values of tensors.
_DATA_DEPENDENT = (_KNOWN[1][0], _KNOWN[2][0])
#: Where transformers keeps which implementation of the experts a model runs.
_EXPERTS = "_experts_implementation"
_EXPERTS_WAY_OUT = (
    "This experts code loops over the experts that were hit: build the model with "
    "experts_implementation='batched_mm' or 'grouped_mm'"
)


def explain(error: BaseException, model: nn.Module) -> AutoparError:
    """The error to raise for a failure that came out of export."""
    chain = list(_chain(error))
    frames = [frame for e in chain for frame in _frames(e.__traceback__)]
    where = _where(frames, model)
    for e in chain:
        if isinstance(e, AutoparError):
            kind = type(e) if isinstance(e, (TraceError, HintError)) else TraceError
            return kind(f"{where}: {e}" if where else str(e))
    reason, way_out = _reason(chain, frames)
    return TraceError(f"{where or type(model).__name__}: {reason}. {way_out}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    return traceback.walk_tb(trace)


def _where(frames: list[tuple[FrameType, int]], model: nn.Module) -> str:
    """The module path, file, line and code of the innermost frame of the user's own."""
    paths = {id(m): path for path, m in model.named_modules()}
    inside = False
    module = place = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        owner = id(_first_argument(frame))
        if owner in paths and frame.f_code.co_name == "forward":
            inside = True
            module = paths[owner]
        if inside and not is_torch_file(file) and not file.startswith(_OUR_FILES):
            code = linecache.getline(file, line).strip()
            place = f"{file}:{line}" + (f", `{code}`" if code else "")
    if not place:
        return ""
    return f"{module or 'the model itself'} ({place})"


def _first_argument(frame: FrameType) -> object:
    """`self`, whatever the method calls it."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _reason(chain: list[BaseException], frames: list[tuple[FrameType, int]]) -> tuple[str, str]:
    held = (value for frame, _ in frames for value in frame.f_locals.values())
    if any(isinstance(value, PackedSequence) for value in held):
        return (
            "pack_padded_sequence takes the lengths out of a tensor, so that the graph would "
            "depend on data",
            "Run the recurrent layer on the padded batch and mask its output",
        )
    text = _text(chain)
    for marks, reason, way_out in _KNOWN:
        if any(mark in text for mark in marks):
            if marks in _DATA_DEPENDENT and experts_module([frame for frame, _ in frames]):
                way_out = _EXPERTS_WAY_OUT
            return reason, way_out
    last = chain[0]
    lines = [line.strip() for line in str(last).splitlines() if line.strip()]
    summary = lines[0].rstrip(".") if lines else "no message"
    return (
        f"torch.export failed with {type(last).__name__}: {summary[:300]}",
        "Change this line so that it uses tensor operators only",
    )


def experts_module(frames: Sequence[FrameType]) -> nn.Module | None:
    """The running module of experts whose implementation transformers lets one choose."""
    found = (m for m in running_modules(frames) if hasattr(type(m), "_apply_gate"))
    return next((m for m in found if hasattr(getattr(m, "config", None), _EXPERTS)), None)


def running_modules(frames: Sequence[FrameType]) -> list[nn.Module]:
    """The modules whose `forward` was running, the outermost first."""
    owners = (_first_argument(f) for f in frames if f.f_code.co_name == "forward")
    return [m for m in owners if isinstance(m, nn.Module)]


def frames_of(error: BaseException) -> list[FrameType]:
    """Every frame that an error went through, and those of its causes."""
    return [frame for e in _chain(error) for frame, _ in _frames(e.__traceback__)]


def is_data_dependent(error: BaseException) -> bool:
    """Whether export stopped because something depends on the values of tensors."""
    text = _text(list(_chain(error)))
    return any(mark in text for marks in _DATA_DEPENDENT for mark in marks)


def _text(chain: Sequence[BaseException]) -> str:
    return " ".join(f"{type(e).__name__}: {e}" for e in chain)
