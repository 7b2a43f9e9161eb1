"""Samples of reading by index."""

from __future__ import annotations

from samples.sample import Sample, booleans, integers, normal

SAMPLES = (
    Sample("aten.index.Tensor", (normal(6, 12), [integers(6, 4)])),
    Sample("aten.index.Tensor", (normal(6, 4), [integers(6, 2, 12)]), label="two dimensions"),
    Sample("aten.index.Tensor", (normal(12, 6), [None, integers(6, 4)]), label="second"),
    Sample(
        "aten.index.Tensor",
        (normal(3, 6, 12), [integers(3, 4), integers(6, 4)]),
        label="neighbours",
    ),
    Sample(
        "aten.index.Tensor",
        (normal(3, 12, 6), [integers(3, 4), None, integers(6, 4)]),
        label="apart",
    ),
    Sample(
        "aten.index.Tensor",
        (normal(12, 3, 6, 2), [None, integers(3, 4, 1), integers(6, 1, 6)]),
        label="broadcast",
    ),
    Sample("aten.index.Tensor", (normal(6, 12), [integers(6)]), label="scalar"),
    Sample(
        "aten.index.Tensor",
        (normal(3, 6), [integers(3), integers(6, 12)]),
        label="scalar and vector",
    ),
    Sample("aten.index.Tensor", (integers(9, 6, 12), [integers(6, 4)]), label="integers"),
    Sample("aten.index.Tensor", (normal(12, 4), [booleans(12)]), label="mask", unsplit=True),
    Sample("aten._unsafe_index.Tensor", (normal(6, 12), [integers(6, 4)])),
    Sample("aten.index_select.default", (normal(6, 12), 0, integers(6, 4))),
    Sample("aten.index_select.default", (normal(12, 6), -1, integers(6, 4)), label="last"),
    Sample("aten.index_select.default", (normal(12, 6), 1, integers(6)), label="scalar index"),
    Sample(
        "aten.index_select.default", (normal(), 0, integers(1, 1)), label="scalar", unsplit=True
    ),
    Sample("aten.gather.default", (normal(12, 6), 1, integers(6, 12, 4))),
    Sample("aten.gather.default", (normal(6, 12), 0, integers(6, 4, 12)), label="first"),
    Sample("aten.gather.default", (normal(12, 6), -1, integers(6, 4, 4)), label="in part"),
    Sample("aten.gather.default", (normal(12, 6), -1, integers(6, 1, 4)), label="one row"),
    Sample("aten.gather.default", (normal(12, 6), -1, integers(6, 12, 1)), label="one of each row"),
    Sample("aten.gather.default", (normal(), 0, integers(1)), label="scalar", unsplit=True),
    Sample("aten.take_along_dim.default", (normal(12, 6), integers(6, 12, 4), 1)),
    Sample("aten.take_along_dim.default", (normal(12, 6), integers(6, 1, 4), 1), label="broadcast"),
    Sample("aten.take_along_dim.default", (normal(1, 6), integers(6, 12, 4), -1), label="expanded"),
    Sample(
        "aten.take_along_dim.default", (normal(12), integers(12, 4)), label="flat", unsplit=True
    ),
    Sample("aten.take.default", (normal(3, 4), integers(12, 6, 2))),
)
