"""`as_strided`, which reads memory rather than a tensor: made a function of the tensor.

The IR knows no strides, and a rank's piece has other ones than the whole. So the tensor is put
into the order in which its elements lay in memory when it was traced, and the operator of the IR
reads them as if they were dense::

    %y = aten.as_strided(%x, size, stride, offset)       %x of strides (1, 4)
    ==>
    %p = aten.permute(%x, [1, 0])
    %y = autopar.as_strided(%p, size, stride, offset)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.trace_alias import NotFunctionalError

OPERATOR = "autopar.as_strided"


@dataclass(frozen=True)
class Strided:
    """What a call of `as_strided` reads.

    order:
        the dimensions of the operand from the outermost in memory to the innermost
    size, stride, offset:
        of the result, counted from the operand's first element
    """

    order: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def strided(
    operand: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> Strided:
    """Raises NotFunctionalError where memory is read that is not the operand's own."""
    strides = operand.stride()
    order = tuple(sorted(range(operand.dim()), key=lambda d: (-strides[d], d)))
    base = int(operand.storage_offset())
    start = (base if offset is None else offset) - base
    last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    dense = operand.permute(order).is_contiguous()
    if not dense or start < 0 or (0 not in size and last >= operand.numel()):
        raise NotFunctionalError("as_strided, which reads memory of another tensor,")
    return Strided(order, tuple(size), tuple(stride), start)
