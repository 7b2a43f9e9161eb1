"""Samples at sizes that do not divide: each sample again with 12 as 7, 6 as 5 and 4 as 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.operators import resolve
from samples.sample import Sample

#: Old size -> new one, tried in turn: all sizes at once, else those that the call can change.
_SIZES: tuple[dict[int, int], ...] = ({12: 7, 6: 5, 4: 3}, {12: 7}, {6: 5}, {4: 3})


#: Operators whose integers are no sizes or indices that may be changed: where groups of rows end.
FIXED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


def resized(sample: Sample) -> Iterator[Sample]:
    """The sample at other sizes, wherever the operator takes them."""
    for sizes in _SIZES if sample.op not in FIXED else ():
        args, kwargs = _mapped(sample.args, sizes), _mapped(sample.kwargs, sizes)
        try:
            with torch.random.fork_rng(devices=[]):
                resolve(sample.op)(*args, **kwargs)
        except (RuntimeError, IndexError):
            continue
        changed = " ".join(f"{old}->{new}" for old, new in sizes.items())
        yield replace(
            sample, args=args, kwargs=kwargs, label=f"{sample.label} {changed}", unsplit=False
        )
        if len(sizes) > 1:
            return


def _mapped(item: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(item, Tensor):
        return _cropped(item, sizes)
    if isinstance(item, (tuple, list)):
        return type(item)(_mapped(part, sizes) for part in item)
    if isinstance(item, dict):
        return {key: _mapped(part, sizes) for key, part in item.items()}
    if isinstance(item, int) and not isinstance(item, bool):
        return sizes.get(item, item)
    return item


def _cropped(x: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """The first part of a tensor; indices and classes stay within the new sizes."""
    y = x.detach()
    for d, size in enumerate(x.shape):
        y = y.narrow(d, 0, sizes.get(size, size))
    if not (y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool):
        y = torch.where(y < 0, y, y % min(sizes.values()))
    return y.clone().requires_grad_(x.requires_grad)
