"""Samples of reshapes: merging, splitting, regrouping, sizes of one, sizes to infer."""

from __future__ import annotations

from samples.sample import Sample, integers, normal

SAMPLES = (
    Sample("aten.view.default", (normal(4, 6, 12), [4, 6, 4, 3]), label="split heads"),
    Sample("aten.view.default", (normal(4, 6, 4, 3), [4, 6, 12]), label="merge heads"),
    Sample("aten.view.default", (normal(4, 6, 12), [-1, 12]), label="merge batch, inferred"),
    Sample("aten.view.default", (normal(24, 12), [4, 6, -1]), label="split batch, inferred"),
    Sample("aten.view.default", (normal(4, 12), [48]), label="flatten"),
    Sample("aten.view.default", (normal(12), [3, 4]), label="vector"),
    Sample("aten.view.default", (normal(6, 4), [4, 6]), label="no common boundary"),
    Sample("aten.view.default", (normal(3, 4), [4, 3]), label="nothing in common", unsplit=True),
    Sample("aten.view.default", (normal(4, 3, 4), [4, 4, 3]), label="common first dimension"),
    Sample("aten.view.default", (normal(3, 4, 12), [4, 3, 12]), label="common last dimension"),
    Sample("aten.view.default", (normal(12, 6), [4, 18]), label="chain of divisors"),
    Sample("aten.view.default", (normal(2, 3, 2, 2), [4, 6]), label="four to two"),
    Sample("aten.view.default", (normal(1, 12, 1, 4), [12, 4, 1]), label="sizes of one"),
    Sample("aten.view.default", (normal(12, 1), [12]), label="drop a size of one"),
    Sample("aten.view.default", (normal(1, 1), []), label="to a scalar", unsplit=True),
    Sample("aten.view.default", (normal(), [1, 1]), label="from a scalar", unsplit=True),
    Sample("aten.view.default", (integers(9, 4, 12), [4, 3, 4]), label="integers"),
    Sample("aten.view.default", (normal(12, 4),), {"size": [3, 4, 4]}, label="keyword"),
    Sample("aten._unsafe_view.default", (normal(4, 6, 12), [24, 12])),
    Sample("aten.view_copy.default", (normal(4, 12), [4, 3, 4])),
    Sample("aten.reshape.default", (normal(4, 12), [4, 3, 4])),
    Sample("aten.reshape.default", (normal(12, 4).t(), [4, 3, 4]), label="strided"),
    Sample("aten.flatten.using_ints", (normal(4, 12, 2, 3), 1), label="from the second"),
    Sample("aten.flatten.using_ints", (normal(4, 12, 2), 0, -2), label="to the last but one"),
    Sample("aten.view_as.default", (normal(4, 12), normal(4, 3, 4, grad=False))),
    Sample("aten.reshape_as.default", (normal(4, 12), normal(4, 4, 3))),
)
