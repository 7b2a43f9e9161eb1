"""Samples of convolutions and pooling whose spatial dimensions may be split."""

from __future__ import annotations

from samples.sample import Sample, normal

_LINE = normal(2, 4, 12)
_PLANE = normal(1, 2, 8, 12)


def _line(label: str, taps: int, **more: object) -> Sample:
    """A convolution of 12 places, with 6 output channels."""
    groups = more.get("groups", 1)
    assert isinstance(groups, int)
    weight = normal(6, 4 // groups, taps)
    return Sample("aten.conv1d.default", (_LINE, weight, normal(6)), more, f"borders, {label}")


def _spread(label: str, taps: int, **more: object) -> Sample:
    """A transposed convolution of 12 places."""
    return Sample(
        "aten.conv_transpose1d.default", (_LINE, normal(4, 3, taps), normal(3)), more,
        f"borders, {label}",
    )  # fmt: skip


SAMPLES = (
    _line("3 wide", 3, padding=[1]),
    _line("5 wide", 5, padding=[2]),
    _line("causal by half", 3, stride=[2], padding=[1]),
    _line("3 wide, every third", 3, stride=[3], padding=[1]),
    _line("4 wide, every second", 4, stride=[2], padding=[1]),
    _line("dilated", 3, padding=[2], dilation=[2]),
    _line("wider than a piece", 11, padding=[5]),
    _line("grouped", 3, padding=[1], groups=2),
    _line("one wide, every second", 1, stride=[2]),
    Sample("aten.conv1d.padding", (_LINE, normal(6, 4, 4), None, [1], "same"), {}, "even and same"),
    Sample("aten.conv2d.default", (_PLANE, normal(4, 2, 3, 3), normal(4), [1, 2], [1, 1])),
    Sample(
        "aten.conv2d.default", (_PLANE, normal(4, 2, 3, 4), None, [1, 1], [1, 0]),
        label="one side only",
    ),
    Sample("aten.conv3d.default", (normal(1, 2, 4, 2, 4), normal(2, 2, 3, 1, 3), None,
                                  [1, 1, 1], [1, 0, 1])),
    Sample(
        "aten.convolution.default",
        (_LINE, normal(6, 4, 3), None, [1], [1], [1], False, [0], 1),
        label="borders",
    ),
    _spread("2 wide, every second", 2, stride=[2]),
    _spread("4 wide, every second", 4, stride=[2], padding=[1]),
    _spread("3 wide", 3, padding=[1]),
    _spread("3 wide, every second, one more", 3, stride=[2], padding=[1], output_padding=[1]),
    _spread("5 wide, every third", 5, stride=[3], padding=[1]),
    _spread("dilated", 3, padding=[2], dilation=[2]),
    _spread("2 wide, every third", 2, stride=[3], output_padding=[1]),
    Sample(
        "aten.conv_transpose2d.input",
        (_PLANE, normal(2, 3, 4, 4), normal(3), [2, 2], [1, 1]),
        label="borders",
    ),
    Sample("aten.conv_transpose3d.input", (normal(1, 2, 4, 2, 4), normal(2, 2, 3, 1, 3), None,
                                           [1, 1, 1], [1, 0, 1]), label="borders"),
    Sample(
        "aten.convolution.default",
        (_LINE, normal(4, 3, 4), None, [2], [1], [1], True, [0], 1),
        label="borders, transposed",
    ),
    Sample("aten.max_pool1d.default", (_LINE, [3], [2], [1]), label="borders"),
    Sample("aten.max_pool2d.default", (_PLANE, 3, 2, 1), label="borders"),
    Sample("aten.max_pool2d.default", (_PLANE, [3, 1], [2, 1], 0, 1, True), label="reaching out"),
    Sample("aten.max_pool2d.default", (_PLANE, 2), label="tiles"),
    Sample("aten.max_pool3d.default", (normal(1, 2, 4, 2, 4), 3, 1, 1), label="borders"),
    Sample("aten.avg_pool1d.default", (_LINE, [3], [1], [1]), label="borders"),
    Sample("aten.avg_pool2d.default", (_PLANE, 3, 1, 1), label="borders"),
    Sample("aten.avg_pool2d.default", (_PLANE, 4, 2, 1, False, True, 5), label="divisor"),
    Sample("aten.avg_pool2d.default", (_PLANE, 3, 1, 1, False, False), label="not counted"),
    Sample("aten.avg_pool3d.default", (normal(1, 2, 4, 3, 4), 3, 1, 1), label="borders"),
    Sample("aten.upsample_nearest2d.vec", (_PLANE, None, [2.0, 1.5]), label="repeated"),
    Sample("aten.col2im.default", (normal(4, 12, 6), [4, 6], [2, 2], [1, 1], 0, [2, 2])),
    Sample("aten.col2im.default", (normal(12, 6), [4, 6], [2, 2], [1, 1], 0, [2, 2]),
           label="no batch"),
)  # fmt: skip
