"""Samples of the operators that move, drop, add, repeat or take a part of dimensions."""

from __future__ import annotations

import torch

from samples.sample import Sample, integers, normal

_REORDERED = (
    Sample("aten.permute.default", (normal(4, 12, 3), [2, 0, 1])),
    Sample("aten.permute.default", (normal(4, 12, 3), [-1, 0, -2]), label="negative"),
    Sample("aten.transpose.int", (normal(4, 12, 3), 0, -1)),
    Sample("aten.t.default", (normal(4, 12),)),
    Sample("aten.t.default", (normal(12),), label="vector"),
    Sample("aten.mT.default", (normal(4, 12, 3),)),
    Sample("aten.mH.default", (normal(4, 12, 3),)),
    Sample("aten.adjoint.default", (normal(4, 12),)),
    Sample("aten.numpy_T.default", (normal(4, 12),)),
    Sample("aten.movedim.int", (normal(4, 12, 3), 0, 2)),
    Sample("aten.movedim.intlist", (normal(4, 12, 3), [0, 1], [1, 2])),
    Sample("aten.moveaxis.int", (normal(4, 12, 3), -1, 0)),
    Sample("aten.moveaxis.intlist", (normal(4, 12, 3), [2], [0])),
    Sample("aten.swapaxes.default", (normal(4, 12, 3), 0, 1)),
    Sample("aten.swapdims.default", (normal(4, 12, 3), 1, 2)),
)

_SAME = (
    Sample("aten.alias.default", (normal(4, 12),)),
    Sample("aten.contiguous.default", (normal(4, 12),)),
    Sample("aten.detach.default", (normal(4, 12),)),
    Sample("aten.lift_fresh_copy.default", (normal(4, 12),)),
    Sample("aten.alias.default", (normal(),), label="scalar", unsplit=True),
)

_EXPANDED = (
    Sample("aten.expand.default", (normal(12, 1), [12, 4])),
    Sample("aten.expand.default", (normal(1, 12), [4, 6, -1]), label="new dimension"),
    Sample("aten.expand.default", (normal(1, 1, 4, 1), [12, -1, -1, 6]), label="kept sizes of one"),
    Sample("aten.expand.default", (normal(), [12]), label="scalar"),
    Sample("aten.expand.default", (normal(12, 4), [12, 4]), label="no change"),
    Sample("aten.broadcast_to.default", (normal(12, 1), [4, 12, 6])),
    Sample("aten.expand_as.default", (normal(12, 1), normal(4, 12, 6, grad=False))),
)

_SQUEEZED = (
    Sample("aten.unsqueeze.default", (normal(4, 12), 1)),
    Sample("aten.unsqueeze.default", (normal(4, 12), -1), label="last"),
    Sample("aten.unsqueeze.default", (normal(), 0), label="scalar", unsplit=True),
    Sample("aten.squeeze.dim", (normal(4, 1, 12), 1)),
    Sample("aten.squeeze.dim", (normal(2, 12), 0), label="not a size of one"),
    Sample("aten.squeeze.dim", (normal(2, 12, 1), -1), label="negative"),
    Sample("aten.squeeze.dims", (normal(1, 12, 1, 4), [0, -2])),
    Sample("aten.squeeze.dims", (normal(1, 2, 12), [0, 1]), label="one not a size of one"),
    Sample("aten.squeeze.default", (normal(1, 2, 1),), unsplit=True),
    Sample("aten.squeeze.default", (normal(1, 1),), label="to a scalar", unsplit=True),
)

_PARTS = (
    Sample("aten.slice.Tensor", (normal(12, 6), 1, 1, 4)),
    Sample("aten.slice.Tensor", (normal(12, 6), 1, 0, 9223372036854775807), label="all"),
    Sample("aten.slice.Tensor", (normal(12, 6), 0, 0, 12), label="all, size spelled"),
    Sample("aten.slice.Tensor", (normal(12, 6),), label="defaults"),
    Sample("aten.slice.Tensor", (normal(12, 6), -1, -2), label="negative"),
    Sample("aten.slice.Tensor", (normal(12, 6), 1, 0, 6, 2), label="step"),
    Sample("aten.slice.Tensor", (normal(12, 6), 1, 2, 2), label="empty"),
    Sample("aten.narrow.default", (normal(12, 6), 1, 2, 3)),
    Sample("aten.narrow.default", (normal(12, 6), -1, 0, 6), label="all"),
    Sample("aten.unfold.default", (normal(4, 12, 3), 1, 3, 2)),
    Sample("aten.unfold.default", (normal(4, 12), -1, 4, 4), label="last"),
    Sample("aten.select.int", (normal(4, 12), 0, -1)),
    Sample("aten.select.int", (normal(4, 12), -1, 3), label="last"),
    Sample("aten.select.int", (normal(4), 0, 3), label="to a scalar", unsplit=True),
    Sample("aten.unbind.int", (normal(3, 12),)),
    Sample("aten.unbind.int", (normal(12, 2), -1), label="last"),
    Sample("aten.split.Tensor", (normal(4, 6, 12), 4, 2)),
    Sample("aten.split.Tensor", (normal(12, 5), 2, -1), label="uneven"),
    Sample("aten.split.Tensor", (normal(12, 4), 4, 1), label="one part"),
    Sample("aten.split.default", (normal(6, 12), [2, 4], 0)),
    Sample("aten.split.sizes", (normal(6, 12), [2, 4], 0)),
    Sample("aten.split_with_sizes.default", (normal(12, 6), [1, 2, 3], -1)),
    Sample("aten.unsafe_split_with_sizes.default", (normal(12, 6), [1, 5], 1)),
    Sample("aten.unsafe_split.Tensor", (normal(12, 6), 3, 1)),
    Sample("aten.chunk.default", (normal(12, 6), 2, -1)),
    Sample("aten.unsafe_chunk.default", (normal(12, 6), 3, 1)),
    Sample("aten.tensor_split.sections", (normal(12, 5), 2, 1)),
    Sample("aten.tensor_split.indices", (normal(12, 6), [1, 4], 1)),
    Sample("aten.diagonal.default", (normal(4, 12, 4), 0, 0, 2)),
    Sample("aten.diagonal.default", (normal(12, 4, 6), 1, -2, -1), label="offset"),
    Sample("aten.diagonal.default", (normal(4, 4),), label="matrix", unsplit=True),
    Sample("aten.diag_embed.default", (normal(12, 3),)),
    Sample("aten.diag_embed.default", (normal(12, 3), 1, 0, 2), label="around"),
)

_MOVED = (
    Sample("aten.flip.default", (normal(12, 4), [1])),
    Sample("aten.flip.default", (normal(12, 4, 3), [-1, -2]), label="two"),
    Sample("aten.roll.default", (normal(12, 4), [1], [1])),
    Sample("aten.roll.default", (normal(12, 4, 3), [1, -1], [-1, -2]), label="two"),
    Sample("aten.roll.default", (normal(12, 4), [5]), label="flattened", unsplit=True),
    Sample("aten.tril.default", (normal(12, 4, 4),)),
    Sample("aten.triu.default", (normal(12, 4, 4), 1)),
    Sample("aten.tril.default", (normal(4, 4), -1), label="matrix", unsplit=True),
)

_REPEATED = (
    Sample("aten.repeat.default", (normal(12, 4), [1, 3])),
    Sample("aten.repeat.default", (normal(12, 1), [1, 4]), label="size of one"),
    Sample("aten.repeat.default", (normal(12), [2, 3, 1]), label="new dimensions"),
    Sample("aten.repeat.default", (normal(12), [1, 1, 1]), label="new sizes of one"),
    Sample("aten.tile.default", (normal(12, 4), [2])),
    Sample("aten.repeat_interleave.self_int", (normal(12, 4), 3, 0)),
    Sample("aten.repeat_interleave.self_int", (normal(4, 12), 2, -1), label="last"),
    Sample("aten.repeat_interleave.self_int", (normal(12), 2), label="vector"),
    Sample("aten.repeat_interleave.self_int", (normal(12, 4), 2), label="flat", unsplit=True),
    Sample(
        "aten.repeat_interleave.self_int",
        (normal(4, 12), 2, 0),
        {"output_size": 8},
        label="size spelled",
    ),
)

_RECAST = (
    Sample("aten.view_as_real.default", (torch.complex(normal(12, 4), normal(12, 4)).detach(),)),
    Sample("aten.view_as_complex.default", (normal(12, 4, 2),)),
    Sample("aten.pixel_shuffle.default", (normal(4, 12, 4, 6), 2)),
    Sample("aten.pixel_unshuffle.default", (normal(2, 4, 8, 6), 2)),
    Sample("aten.permute.default", (integers(9, 4, 12), [1, 0]), label="integers"),
)

SAMPLES = (
    *_REORDERED,
    *_SAME,
    *_EXPANDED,
    *_SQUEEZED,
    *_PARTS,
    *_MOVED,
    *_REPEATED,
    *_RECAST,
)
