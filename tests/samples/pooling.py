"""Samples of pooling and resizing, with and without a batch."""

from __future__ import annotations

from samples.sample import Sample, normal

_PLANES = (normal(4, 6, 4, 6), normal(4, 12, 6), normal(2, 4, 4, 2, 4))

SAMPLES = (
    Sample("aten.avg_pool1d.default", (_PLANES[1], [2])),
    Sample("aten.avg_pool2d.default", (_PLANES[0], [2, 2], [1, 1], [1, 1])),
    Sample("aten.avg_pool2d.default", (_PLANES[1], 3, 1), label="no batch"),
    Sample("aten.avg_pool3d.default", (_PLANES[2], 2)),
    Sample("aten.adaptive_avg_pool1d.default", (_PLANES[1], [1])),
    Sample("aten.adaptive_avg_pool2d.default", (_PLANES[0], [1, 1])),
    Sample("aten.adaptive_avg_pool2d.default", (_PLANES[1], [3, 4]), label="no batch"),
    Sample("aten.adaptive_avg_pool3d.default", (_PLANES[2], [1, 2, 1])),
    Sample("aten._adaptive_avg_pool2d.default", (_PLANES[0], [2, 3])),
    Sample("aten._adaptive_avg_pool3d.default", (_PLANES[2], [1, 2, 1])),
    Sample("aten.max_pool1d.default", (_PLANES[1], [2], [1], [1])),
    Sample("aten.max_pool2d.default", (_PLANES[0], 3, 2, 1)),
    Sample("aten.max_pool3d.default", (_PLANES[2], 2)),
    Sample("aten.max_pool1d_with_indices.default", (_PLANES[1], [2])),
    Sample("aten.max_pool2d_with_indices.default", (_PLANES[0], [2, 3])),
    Sample("aten.max_pool3d_with_indices.default", (_PLANES[2], [2, 1, 2])),
    Sample("aten.adaptive_max_pool1d.default", (_PLANES[1], [2])),
    Sample("aten.adaptive_max_pool2d.default", (_PLANES[0], [2, 3])),
    Sample("aten.adaptive_max_pool3d.default", (_PLANES[2], [2, 1, 2])),
    Sample("aten.upsample_nearest1d.default", (_PLANES[1], [9])),
    Sample("aten.upsample_nearest1d.vec", (_PLANES[1], None, [2.0])),
    Sample("aten.upsample_nearest2d.default", (_PLANES[0], [8, 9])),
    Sample("aten.upsample_nearest2d.vec", (_PLANES[0], None, [2.0, 2.0])),
    Sample("aten.upsample_linear1d.default", (_PLANES[1], [9], False)),
    Sample("aten.upsample_linear1d.vec", (_PLANES[1], [9], True, None)),
    Sample("aten.upsample_bilinear2d.default", (_PLANES[0], [8, 9], True)),
    Sample("aten.upsample_bilinear2d.vec", (_PLANES[0], None, False, [2.0, 1.5])),
    Sample("aten.upsample_bicubic2d.default", (_PLANES[0], [8, 9], False)),
    Sample("aten.upsample_bicubic2d.vec", (_PLANES[0], [8, 9], False, None)),
)
