"""Samples of sums, of reductions that stay whole, and of scans."""

from __future__ import annotations

from samples.sample import Sample, booleans, integers, normal, positive

SAMPLES = (
    Sample("aten.sum.default", (normal(12, 4),)),
    Sample("aten.sum.default", (normal(),), label="scalar", unsplit=True),
    Sample("aten.sum.default", (booleans(12, 4),), label="masks"),
    Sample("aten.sum.dim_IntList", (normal(12, 4), [1])),
    Sample("aten.sum.dim_IntList", (normal(12, 4, 3), [-1, 0], True), label="kept"),
    Sample("aten.sum.dim_IntList", (normal(12, 4), []), label="empty list"),
    Sample("aten.sum.dim_IntList", (normal(12, 4), None, True), label="none, kept"),
    Sample("aten.sum.dim_IntList", (integers(9, 12, 4), [0]), label="integers"),
    Sample("aten.nansum.default", (normal(12, 4), [0])),
    Sample("aten.count_nonzero.default", (booleans(12, 4),)),
    Sample("aten.count_nonzero.default", (booleans(12, 4), 1), label="one dimension"),
    Sample("aten.count_nonzero.dim_IntList", (integers(3, 12, 4), [0, 1])),
    Sample("aten.prod.default", (normal(12),), unsplit=True),
    Sample("aten.prod.dim_int", (normal(12, 4), 1)),
    Sample("aten.prod.dim_int", (normal(4, 12), 0, True), label="kept"),
    Sample("aten.linalg_vector_norm.default", (normal(12, 4), 2, [1])),
    Sample("aten.linalg_vector_norm.default", (normal(12, 4), 3, [0], True), label="kept"),
    Sample("aten.norm.Scalar", (normal(12, 4),), unsplit=True),
    Sample("aten.norm.ScalarOpt_dim", (normal(12, 4), 2, [-1])),
    Sample(
        "aten.norm.ScalarOpt_dim_dtype", (normal(12, 4), 2, [1], True), {"dtype": normal().dtype}
    ),
    Sample("aten.norm.ScalarOpt_dtype", (normal(12), 2), {"dtype": normal().dtype}, unsplit=True),
    Sample("aten.kthvalue.default", (normal(12, 6), 2)),
    Sample("aten.median.default", (normal(12),), unsplit=True),
    Sample("aten.median.dim", (normal(12, 5), -1, True)),
    Sample("aten.nanmedian.default", (normal(12),), unsplit=True),
    Sample("aten.nanmedian.dim", (normal(5, 12), 0)),
    Sample("aten.mode.default", (integers(3, 12, 5),)),
    Sample("aten.cumsum.default", (normal(12, 4), -1)),
    Sample("aten.cumsum.default", (booleans(12, 4), 0), label="masks"),
    Sample("aten.cumsum.default", (normal(), 0), label="scalar", unsplit=True),
    Sample("aten.cumprod.default", (positive(12, 4), 1)),
    Sample("aten.logcumsumexp.default", (normal(12, 4), 1)),
    Sample("aten.cummax.default", (normal(12, 4), 1)),
    Sample("aten.cummin.default", (normal(4, 12), 0)),
    Sample("aten.histc.default", (positive(12, 4, grad=False), 5, 0, 1)),
    Sample("aten.histc.default", (positive(12, grad=False), 5), label="range found", unsplit=True),
    Sample("aten.linalg_norm.default", (normal(12, 4), None, [1], True)),
    Sample("aten.trace.default", (normal(4, 4),), unsplit=True),
)
