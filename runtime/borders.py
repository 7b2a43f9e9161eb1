"""The borders of a block: entries that a rank needs of its neighbours' blocks, and their gradients.

Every rank gives the first and the last entries of its block to all, in one collective, and takes
what borders on its own. The gradients go back the same way and add up where they came from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.cut import piece_sizes
from autopar.ir.layout import REPLICATE
from autopar.runtime.collectives import all_gather
from autopar.runtime.groups import current
from autopar.runtime.splits import Split


def with_borders(
    x: Tensor, dim: int, split: Split, factor: str, unit: int, borders: tuple[int, int],
    fill: float = 0.0,
) -> Tensor:  # fmt: skip
    """`x` with some more entries before and after it along `dim`.

    unit:
        how many entries of `x` one of the factor stands for
    borders:
        how many entries are added before and after
    fill:
        stands for entries outside of the whole tensor
    """
    found = [(axes, size) for name, axes, size in split if name == factor]
    left, right = borders
    if not found or not (left or right):
        return _padded(x, dim, left, right, fill)
    (axes, whole), context = found[0], current()
    sizes = tuple(n * unit for n in piece_sizes(whole, context.mesh.sizes_of(axes)))
    index = context.group(axes).index
    if min(sizes) < max(left, right):
        # Some neighbour has less than is needed of it.
        everything = all_gather(x, axes, dim, REPLICATE, sizes=sizes)
        padded = _padded(everything, dim, left, right, fill)
        return padded.narrow(dim, sum(sizes[:index]), sizes[index] + left + right)
    edges = torch.cat([x.narrow(dim, 0, right), x.narrow(dim, x.shape[dim] - left, left)], dim)
    everyone = all_gather(edges, axes, dim, REPLICATE)
    width, last = left + right, len(sizes) - 1
    # The outermost ranks take an edge too, and put `fill` in its place: so every rank's backward
    # has the same collectives.
    before = everyone.narrow(dim, max(index - 1, 0) * width + right, left)
    after = everyone.narrow(dim, min(index + 1, last) * width, right)
    parts = [_kept(before, index > 0, fill), x, _kept(after, index < last, fill)]
    return torch.cat(parts, dim)


def _kept(x: Tensor, inside: bool, fill: float) -> Tensor:
    return torch.where(torch.tensor(inside, device=x.device), x, fill)


def _padded(x: Tensor, dim: int, left: int, right: int, fill: float) -> Tensor:
    if not (left or right):
        return x
    amounts = [0] * (2 * (x.dim() - dim))
    amounts[-2:] = [left, right]
    return F.pad(x, amounts, value=fill)
