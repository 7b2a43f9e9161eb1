"""Samples of sorting, searching and membership."""

from __future__ import annotations

import torch

from samples.sample import Sample, integers, normal

_SEQUENCE = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
_ROWS = torch.linspace(-1.0, 1.0, 60, dtype=torch.float64).reshape(12, 5)

SAMPLES = (
    Sample("aten.sort.default", (normal(12, 4),)),
    Sample("aten.sort.default", (normal(4, 12), 0, True), label="descending"),
    Sample("aten.sort.default", (normal(),), label="scalar", unsplit=True),
    Sample("aten.sort.stable", (integers(3, 12, 4),), {"stable": True, "dim": -1}),
    Sample("aten.argsort.default", (normal(12, 4), 1)),
    Sample("aten.argsort.stable", (integers(3, 12, 4),), {"stable": True}),
    Sample("aten.msort.default", (normal(4, 12),)),
    Sample("aten.topk.default", (normal(12, 6), 2)),
    Sample("aten.topk.default", (normal(6, 12), 3, 0, False), label="smallest"),
    Sample("aten.bucketize.Tensor", (normal(12, 4, grad=False), _SEQUENCE)),
    Sample("aten.searchsorted.Tensor", (_SEQUENCE, normal(12, 4, grad=False))),
    Sample("aten.searchsorted.Tensor", (_ROWS, normal(12, 4, grad=False)), label="by row"),
    Sample(
        "aten.searchsorted.Tensor",
        (_SEQUENCE, normal(12, grad=False)),
        {"sorter": torch.arange(5)},
        label="sorter",
        unsplit=True,
    ),
    Sample("aten.isin.Tensor_Tensor", (integers(9, 12, 4), torch.tensor([1, 5]))),
    Sample("aten.isin.Tensor_Tensor", (integers(9, 12, 4), torch.tensor(3)), label="scalar"),
    Sample("aten.isin.Tensor_Scalar", (integers(9, 12, 4), 3)),
    Sample("aten.one_hot.default", (integers(3, 12, 4), 3)),
    Sample("aten.one_hot.default", (integers(3, 12, 4),), label="inferred", unsplit=True),
)
