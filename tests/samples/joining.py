"""Samples of the operators that put tensors together or enlarge one."""

from __future__ import annotations

from samples.sample import Sample, integers, normal

SAMPLES = (
    Sample("aten.cat.default", ([normal(12, 4), normal(12, 2)], 1)),
    Sample("aten.cat.default", ([normal(4, 12), normal(2, 12), normal(6, 12)],), label="three"),
    Sample("aten.cat.default", ([normal(12, 4), normal(12, 4)], -1), label="negative"),
    Sample("aten.cat.default", ([normal(4), normal(2)],), label="vectors", unsplit=True),
    Sample("aten.cat.default", ([normal(12, 4), integers(9, 12, 4)], 1), label="with integers"),
    Sample("aten.cat.default", ([normal(0), normal(12, 4)],), label="legacy empty", unsplit=True),
    Sample("aten.concat.default", ([normal(12, 4), normal(12, 2)], 1)),
    Sample("aten.concatenate.default", ([normal(12, 4), normal(12, 2)], 1)),
    Sample("aten.stack.default", ([normal(12, 4), normal(12, 4, seed=1)],)),
    Sample("aten.stack.default", ([normal(12, 4), normal(12, 4, seed=1)], -1), label="last"),
    Sample("aten.stack.default", ([normal(), normal(seed=1)],), label="scalars", unsplit=True),
    Sample("aten.block_diag.default", ([normal(4, 2), normal(2, 6)],), unsplit=True),
    Sample("aten.pad.default", (normal(12, 4), [1, 2])),
    Sample("aten.pad.default", (normal(12, 4), [1, 2], "constant", -1.0), label="number"),
    Sample("aten.pad.default", (normal(12, 4, 3), [0, 0, 1, 0]), label="last untouched"),
    Sample("aten.pad.default", (normal(12, 4), [0, 0, 0, 0]), label="nothing"),
    Sample("aten.pad.default", (normal(12, 6), [-1, -2]), label="crop"),
    Sample("aten.pad.default", (normal(4, 12, 6), [1, 1], "reflect"), label="reflect"),
    Sample("aten.constant_pad_nd.default", (normal(12, 4), [1, 0])),
    Sample("aten.constant_pad_nd.default", (normal(12, 4), [1, 0], 2.0), label="number"),
    Sample("aten.reflection_pad1d.default", (normal(4, 12, 6), [1, 2])),
    Sample("aten.reflection_pad2d.default", (normal(4, 12, 3, 4), [1, 1, 2, 0])),
    Sample("aten.reflection_pad3d.default", (normal(4, 12, 3, 3, 2), [1, 1, 1, 0, 0, 1])),
    Sample("aten.replication_pad1d.default", (normal(4, 12, 6), [1, 2])),
    Sample("aten.replication_pad2d.default", (normal(4, 12, 3, 4), [1, 1, 2, 0])),
    Sample("aten.replication_pad3d.default", (normal(4, 12, 3, 3, 2), [1, 1, 1, 0, 0, 1])),
    Sample("aten.slice_scatter.default", (normal(12, 6), normal(12, 2), 1, 1, 3)),
    Sample("aten.slice_scatter.default", (normal(12, 6), normal(12, 6, seed=1), 0), label="all"),
    Sample("aten.select_scatter.default", (normal(12, 6), normal(12), 1, 2)),
    Sample("aten.diff.default", (normal(12, 6),)),
    Sample("aten.diff.default", (normal(6, 12), 2, 0), label="twice"),
    Sample("aten.diff.default", (normal(12, 6), 1, -1, normal(12, 1)), label="put before"),
    Sample(
        "aten.diff.default",
        (integers(9, 12, 6), 1, -1, None, integers(9, 12, 2)),
        label="put after",
    ),
)
