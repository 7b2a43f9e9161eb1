"""Samples of `ir/rules/embedding.py`."""

from samples.sample import Sample, integers, normal

_ids, _table = integers(12, 4, 6), normal(12, 4)

SAMPLES = (
    Sample("aten.embedding.default", (_table, _ids)),
    Sample("aten.embedding.default", (_table, integers(12, 4))),
    Sample("aten.embedding.default", (_table, _ids, 0), label="padding in the first block"),
    Sample("aten.embedding.default", (_table, _ids, 7), label="padding in a later block"),
    Sample("aten.embedding.default", (_table, _ids, -1, True), label="scaled by frequency"),
    Sample("aten.embedding.default", (normal(12, 4, grad=False), _ids), label="frozen"),
)
