"""Samples of writing by index: adding, overwriting, and values that are broadcast."""

from __future__ import annotations

import torch

from samples.sample import Sample, booleans, integers, normal

_DISTINCT = torch.tensor([4, 1, 5, 2])

SAMPLES = (
    Sample("aten.index_put.default", (normal(6, 12), [_DISTINCT], normal(4, 12))),
    Sample(
        "aten.index_put.default", (normal(6, 12), [integers(6, 4)], normal(4, 12), True), {}, "add"
    ),
    Sample(
        "aten.index_put.default",
        (normal(12, 6), [None, integers(6, 4)], normal(12, 4), True),
        label="add to second",
    ),
    Sample(
        "aten.index_put.default",
        (normal(6, 12), [integers(6, 4)], normal(12), True),
        {},
        "add, row",
    ),
    Sample("aten.index_put.default", (normal(6, 12), [_DISTINCT], normal()), label="scalar"),
    Sample(
        "aten.index_put.default",
        (normal(6, 3, 12), [integers(6, 4, 1), integers(3, 3)], normal(4, 3, 12), True),
        label="broadcast indices",
    ),
    Sample(
        "aten.index_put.default",
        (normal(6, 4), [booleans(6, 4)], normal()),
        {},
        "mask",
        unsplit=True,
    ),
    Sample(
        "aten.index_put.default",
        (booleans(6, 12), [integers(6, 4)], booleans(4, 12), True),
        label="add truth values",
    ),
    Sample(
        "aten._unsafe_index_put.default", (normal(6, 12), [integers(6, 4)], normal(4, 12), True)
    ),
    Sample("aten.index_add.default", (normal(6, 12), 0, integers(6, 4), normal(4, 12))),
    Sample(
        "aten.index_add.default",
        (normal(12, 6), -1, integers(6, 4), normal(12, 4)),
        {"alpha": 2},
        label="scaled",
    ),
    Sample("aten.index_copy.default", (normal(6, 12), 0, _DISTINCT, normal(4, 12))),
    Sample("aten.index_fill.int_Scalar", (normal(6, 12), 0, _DISTINCT, 0)),
    Sample("aten.index_fill.int_Scalar", (normal(12, 6), 1, _DISTINCT, 2.0), label="number"),
    Sample("aten.index_fill.int_Tensor", (normal(6, 12), 0, _DISTINCT, normal())),
    Sample("aten.scatter_add.default", (normal(12, 6), 1, integers(6, 12, 4), normal(12, 4))),
    Sample(
        "aten.scatter_add.default",
        (normal(6, 12), 0, integers(6, 4, 12), normal(4, 12)),
        label="first",
    ),
    Sample(
        "aten.scatter_add.default",
        (normal(12, 6, 4), 1, integers(6, 12, 4, 2), normal(12, 6, 4, grad=False)),
        label="in part",
    ),
    Sample(
        "aten.scatter.src",
        (normal(12, 6), 1, _DISTINCT.expand(12, 4).clone(), normal(12, 4)),
    ),
    Sample("aten.scatter.value", (normal(12, 6), 1, integers(6, 12, 2), 0)),
    Sample("aten.scatter.value", (normal(12, 6), 1, integers(6, 12, 1), 1.5), label="number"),
    Sample(
        "aten.scatter.value",
        (normal(12, 6), 1, integers(6, 4, 2), 1.5),
        label="in part",
        unsplit=True,
    ),
    Sample(
        "aten.scatter.reduce",
        (normal(12, 6, grad=False), 1, integers(6, 12, 4), normal(12, 4, grad=False)),
        {"reduce": "multiply"},
    ),
    Sample(
        "aten.scatter.value_reduce",
        (normal(12, 6, grad=False), 1, integers(6, 12, 4), 2.0),
        {"reduce": "add"},
    ),
    Sample(
        "aten.scatter_reduce.two",
        (normal(12, 6), 1, integers(6, 12, 4), normal(12, 4), "sum"),
        label="sum",
    ),
    Sample(
        "aten.scatter_reduce.two",
        (normal(12, 6), 1, integers(6, 12, 4), normal(12, 4), "amax"),
        {"include_self": False},
        label="largest",
    ),
    Sample("aten.scatter.value", (normal(), 0, integers(1), 1.5), label="scalar", unsplit=True),
    Sample(
        "aten.masked_scatter.default",
        (normal(2, 4, 12), booleans(2, 4, 1), normal(2, 4, 12)),
        label="rows",
    ),
    Sample("aten.masked_scatter.default", (normal(4, 6), booleans(4, 6), normal(30)), unsplit=True),
)
