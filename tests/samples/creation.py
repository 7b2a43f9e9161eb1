"""Samples of `ir/rules/creation.py`."""

import torch

from samples.sample import Sample, normal

_pattern = normal(4, 12, grad=False)

SAMPLES = (
    Sample("aten.arange.default", (12,)),
    Sample("aten.arange.default", (12,), {"dtype": torch.float64}, label="float64"),
    Sample("aten.arange.start", (3, 15)),
    Sample("aten.arange.start_step", (0, 1.2, 0.1), {"dtype": torch.float64}),
    Sample("aten.arange.start_step", (12, 0, -1), label="down"),
    Sample("aten.linspace.default", (0, 1, 12), {"dtype": torch.float64}),
    Sample("aten.eye.default", (4,)),
    Sample("aten.eye.m", (4, 6)),
    Sample("aten.full.default", ([4, 12], 7)),
    Sample("aten.full.default", ([], 7), label="scalar", unsplit=True),
    Sample("aten.zeros.default", ([4, 12],), {"dtype": torch.float64}),
    Sample("aten.ones.default", ([4, 6],)),
    Sample("aten.empty.memory_format", ([4, 12],), unspecified=True),
    Sample("aten.new_zeros.default", (_pattern, [6, 4])),
    Sample("aten.new_ones.default", (_pattern, [6, 4])),
    Sample("aten.new_full.default", (_pattern, [6, 4], 3.0)),
    Sample("aten.new_empty.default", (_pattern, [6, 4]), unspecified=True),
    Sample("aten.zeros_like.default", (_pattern,)),
    Sample("aten.ones_like.default", (_pattern,)),
    Sample("aten.full_like.default", (_pattern, 3.0)),
    Sample("aten.empty_like.default", (_pattern,), unspecified=True),
    Sample("aten.scalar_tensor.default", (3.0,), unsplit=True),
    Sample("aten.tril_indices.default", (3, 3, -1), unsplit=True),
    Sample("aten.triu_indices.default", (4, 3), unsplit=True),
)
