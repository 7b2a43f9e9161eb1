"""A sample of the layout constraint, an identity."""

from __future__ import annotations

from samples.sample import Sample, normal

SAMPLES = (Sample("autopar.constrain", (normal(12, 4),)),)
