"""Samples of convolutions: groups, spatial forms, with and without batch and bias."""

from __future__ import annotations

from samples.sample import Sample, normal

_PLAIN = (
    Sample("aten.conv1d.default", (normal(4, 6, 8), normal(12, 6, 3), normal(12), [1], [1])),
    Sample("aten.conv2d.default", (normal(2, 4, 5, 5), normal(6, 4, 3, 3), normal(6), [2, 2])),
    Sample("aten.conv2d.default", (normal(2, 4, 5, 5), normal(6, 4, 3, 3)), label="no bias"),
    Sample(
        "aten.conv2d.default", (normal(4, 5, 5), normal(6, 4, 3, 3), normal(6)), label="no batch"
    ),
    Sample("aten.conv3d.default", (normal(2, 2, 3, 4, 3), normal(4, 2, 2, 2, 2), normal(4))),
    Sample(
        "aten.conv2d.default",
        (normal(2, 3, 8, 12), normal(4, 3, 2, 3), normal(4), [2, 3]),
        label="patches",
    ),
    Sample("aten.conv2d.default", (normal(2, 3, 4, 6), normal(4, 3, 1, 1)), label="1x1"),
    Sample(
        "aten.conv2d.default",
        (normal(2, 3, 4, 6), normal(4, 3, 1, 1), None, [2, 2]),
        label="strided 1x1",
    ),
    Sample(
        "aten.conv2d.default",
        (normal(2, 3, 4, 6), normal(4, 3, 1, 3), None, [1, 1], [0, 1]),
        label="1x3",
    ),
    Sample("aten.conv1d.padding", (normal(4, 6, 8), normal(12, 6, 3), normal(12), [1], "same")),
    Sample(
        "aten.conv1d.padding", (normal(4, 6, 8), normal(2, 6, 2), None, [2], "valid"), {}, "valid"
    ),
    Sample("aten.conv2d.padding", (normal(2, 4, 5, 5), normal(6, 4, 3, 3), None, [1, 1], "same")),
    Sample(
        "aten.conv3d.padding",
        (normal(2, 2, 3, 3, 3), normal(4, 2, 3, 3, 3), None, [1, 1, 1], "same"),
    ),
    Sample(
        "aten.convolution.default",
        (normal(2, 4, 5), normal(6, 4, 3), normal(6), [1], [1], [1], False, [0], 1),
    ),
)

_GROUPED = (
    Sample(
        "aten.conv1d.default",
        (normal(2, 12, 5), normal(12, 1, 3), normal(12), [1], [1], [1], 12),
        label="depthwise",
    ),
    Sample(
        "aten.conv2d.default",
        (normal(2, 4, 4, 4), normal(8, 2, 3, 3), normal(8), [1, 1], [1, 1], [1, 1], 2),
        label="two groups",
    ),
    Sample(
        "aten.conv1d.default",
        (normal(2, 12, 5), normal(6, 4, 3)),
        {"groups": 3},
        label="keyword",
    ),
    Sample(
        "aten.convolution.default",
        (normal(2, 4, 5), normal(6, 2, 3), None, [1], [1], [1], False, [0], 2),
        label="grouped",
    ),
)

_TRANSPOSED = (
    Sample("aten.conv_transpose1d.default", (normal(4, 6, 5), normal(6, 12, 3), normal(12), [2])),
    Sample("aten.conv_transpose2d.input", (normal(2, 4, 3, 3), normal(4, 6, 2, 2), normal(6))),
    Sample("aten.conv_transpose3d.input", (normal(2, 2, 2, 3, 2), normal(2, 4, 2, 2, 2))),
    Sample(
        "aten.conv_transpose1d.default",
        (normal(2, 4, 5), normal(4, 3, 3), normal(6), [2], [1], [1], 2),
        label="grouped",
    ),
    Sample(
        "aten.convolution.default",
        (normal(2, 4, 5), normal(4, 6, 3), normal(6), [2], [1], [1], True, [1], 1),
        label="transposed",
    ),
)

SAMPLES = (
    *_PLAIN,
    *_GROUPED,
    *_TRANSPOSED,
    Sample("aten.im2col.default", (normal(4, 6, 5, 4), [2, 3], [1, 1], [0, 1], [1, 1])),
    Sample("aten.im2col.default", (normal(12, 5, 4), [2, 3], [1, 1], 0, [1, 1]), label="no batch"),
)
