"""Samples of reading and writing by strides."""

from __future__ import annotations

from samples.sample import Sample, normal

SAMPLES = (
    Sample("autopar.as_strided", (normal(12, 6), [12, 2, 4], [6, 2, 1], 0), label="windows"),
    Sample("autopar.as_strided", (normal(12, 6), [12, 2, 3], [6, 3, 1], 0), label="no overlap"),
    Sample("autopar.as_strided", (normal(4, 6), [3, 7], [6, 1], 0), label="across", unsplit=True),
    Sample("autopar.as_strided", (normal(24), [5, 8], [4, 1], 0), label="flat", unsplit=True),
    Sample(
        "autopar.as_strided_scatter",
        (normal(4, 6, grad=False), normal(2, 3, grad=False), [2, 3], [6, 2], 1),
        unsplit=True,
    ),
)
