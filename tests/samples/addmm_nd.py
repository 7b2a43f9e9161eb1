"""Samples of `ir/rules/addmm_nd.py`."""

from samples.sample import Sample, normal

_b, _w = normal(12), normal(4, 12)

SAMPLES = (
    Sample("autopar.addmm_nd", (_b, normal(6, 4), _w)),
    Sample("autopar.addmm_nd", (_b, normal(4, 6, 4), _w), label="3-d"),
)
