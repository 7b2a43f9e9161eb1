"""Samples of gated linear units."""

from __future__ import annotations

from samples.sample import Sample, normal

SAMPLES = (
    Sample("aten.glu.default", (normal(4, 6, 12),)),
    Sample("aten.glu.default", (normal(12, 4, 6), 1), label="middle dimension"),
)
