"""The smaller forms in which operators keep what their backward reads, and their sizes.

Without loss: of a ReLU the sign, of a dropout which entries were dropped, of a max-pool the indices
in as few bytes as they need and of its input the shape (Gist, Jain et al. 2018). With loss: floats
in 8 bits.
"""

from __future__ import annotations

import math

import torch

from autopar.ir.graph import Node
from autopar.ir.keep import COMPRESS8

#: Operators whose backward reads only whether an element of what they keep is positive.
SIGNS = frozenset({"aten.relu.default", "aten.leaky_relu.default"})
#: Operators that keep a mask of zeros and one other value.
MASKS = frozenset(
    {
        "autopar.alpha_dropout",
        "autopar.dropout",
        "autopar.feature_dropout",
        "autopar.native_dropout",
    }
)
#: Operators that keep indices into a plane of so many dimensions, and their input for its shape.
INDICES = {
    "aten.max_pool2d.default": 2,
    "aten.max_pool2d_with_indices.default": 2,
    "aten.max_pool3d.default": 3,
    "aten.max_pool3d_with_indices.default": 3,
}
#: Elements that share one scale in 8 bits.
BLOCK = 256
#: Tensors of fewer elements are kept as they are.
SMALLEST = 64


def index_dtype(count: int) -> torch.dtype | None:
    """The smallest dtype that tells so many places apart; None where int64 is."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if count - 1 <= torch.iinfo(dtype).max:
            return dtype
    return None


def packed_bytes(
    node: Node, form: str, dtype: torch.dtype, nbytes: int, plane: int, is_input: bool
) -> int:
    """Bytes of what a call keeps of a tensor in a compressed form; `nbytes` where it has none.

    dtype, nbytes:
        of the tensor
    plane:
        how many places indices of a max-pool tell apart
    is_input:
        whether it is the call's first operand
    """
    count = nbytes // dtype.itemsize
    if count < SMALLEST:
        return nbytes
    bits = math.ceil(count / 8)
    if dtype == torch.bool:
        return bits
    if node.op in INDICES:
        narrow = index_dtype(plane)
        if is_input:
            return 0
        return count * narrow.itemsize if dtype == torch.int64 and narrow else nbytes
    if not dtype.is_floating_point:
        return nbytes
    if node.op in SIGNS:
        return bits
    if node.op in MASKS:
        return bits + dtype.itemsize
    if form == COMPRESS8:
        return count + math.ceil(count / BLOCK) * dtype.itemsize
    return nbytes


def packing_bytes(node: Node, form: str, dtype: torch.dtype, nbytes: int) -> int:
    """Bytes in use while a call makes the compressed form of a tensor, beside the two of them.

    dtype, nbytes:
        of the tensor
    """
    count = nbytes // dtype.itemsize
    rounds = form == COMPRESS8 and dtype.is_floating_point and count >= SMALLEST
    if not rounds or node.op in SIGNS | MASKS | INDICES.keys():
        return 0
    return nbytes + count  # scaled, and which of them are not finite
