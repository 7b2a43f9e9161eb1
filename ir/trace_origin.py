"""Where a node of an exported program comes from, in the user's own words."""

from __future__ import annotations

import functools
import linecache
import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.graph import Origin

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
#: What export appends to the path of a module that is called more than once.
_CALL_COUNT = re.compile(r"@\d+$")


def origin_of(meta: Mapping[str, Any]) -> Origin:
    """The origin that an exported node's `meta` tells."""
    module, kind = _innermost_module(meta.get("nn_module_stack"))
    file, line, code = user_line(meta.get("stack_trace") or "")
    return Origin(module, kind, file, line, code)


def _innermost_module(stack: Mapping[str, tuple[str, Any]] | None) -> tuple[str, str]:
    """The dotted path and the class name of the innermost module of export's module stack."""
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    name = kind if isinstance(kind, str) else kind.__qualname__
    return _CALL_COUNT.sub("", path), name.rpartition(".")[2]


@functools.lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> tuple[str, int, str]:
    """File, line and code of the innermost frame outside torch (of any frame, failing that)."""
    frames = [
        (m["file"], int(m["line"]))
        for m in _FRAME.finditer(stack_trace)
        if not m["file"].startswith("<")
    ]
    if not frames:
        return "", 0, ""
    ours = [frame for frame in frames if not is_torch_file(frame[0])]
    file, line = (ours or frames)[-1]
    return file, line, linecache.getline(file, line).strip()


def is_torch_file(file: str) -> bool:
    """Whether a source file belongs to torch itself (or to no file at all)."""
    return file.startswith((_TORCH_FOLDER, "<"))
