"""Samples of `ir/rules/extremum.py`."""

import torch

from samples.sample import Sample, booleans, integers, normal

_x = normal(4, 6, 12)
_ties = integers(3, 4, 12).double().requires_grad_()
_nan = normal(4, 12, grad=False)
_nan[1, 5] = torch.nan
_nan.requires_grad_()
_flags = booleans(4, 6, 12)
_sparse = torch.zeros(4, 12)
_sparse[2, 7] = 1

SAMPLES = (
    *(
        sample
        for name in ("max", "min")
        for sample in (
            Sample(f"aten.a{name}.default", (_x, [1])),
            Sample(f"aten.a{name}.default", (_x, [0, 2], True), label="kept"),
            Sample(f"aten.a{name}.default", (_x,), label="all"),
            Sample(f"aten.a{name}.default", (_ties, [1]), label="ties"),
            Sample(f"aten.a{name}.default", (_ties, [0, 1]), label="ties, all"),
            Sample(f"aten.a{name}.default", (_nan, [1]), label="not a number"),
            Sample(f"aten.{name}.default", (_x,)),
            Sample(f"aten.{name}.default", (_ties,), label="ties"),
            Sample(f"aten.{name}.dim", (_x, 1)),
            Sample(f"aten.{name}.dim", (_x, -1, True), label="kept"),
            Sample(f"aten.{name}.dim", (_ties, 1), label="ties"),
            Sample(f"aten.{name}.dim", (_nan, 1), label="not a number"),
            Sample(f"aten.{name}.dim", (integers(9, 4, 12), 0), label="integers"),
            Sample(f"aten.arg{name}.default", (_x, 1)),
            Sample(f"aten.arg{name}.default", (_x, -1, True), label="kept"),
            Sample(f"aten.arg{name}.default", (_ties, 1), label="ties"),
            Sample(f"aten.arg{name}.default", (normal(12),), label="1-d"),
            Sample(f"aten.arg{name}.default", (_x,), label="flat", unsplit=True),
        )
    ),
    Sample("aten.aminmax.default", (_x,), {"dim": 1}),
    Sample("aten.aminmax.default", (_x,), {"dim": -1, "keepdim": True}, label="kept"),
    Sample("aten.aminmax.default", (_x,), label="all"),
    Sample("aten.logsumexp.default", (_x, [1])),
    Sample("aten.logsumexp.default", (_x, [0, 2], True), label="kept"),
    Sample(
        "aten.logsumexp.default",
        ((normal(4, 12, grad=False) * 50 + 150).requires_grad_(), [1]),
        label="large",
    ),
    *(
        sample
        for name in ("any", "all")
        for sample in (
            Sample(f"aten.{name}.default", (_flags,)),
            Sample(f"aten.{name}.default", (_sparse,), label="one entry"),
            Sample(f"aten.{name}.dim", (_flags, 1)),
            Sample(f"aten.{name}.dim", (_sparse, -1, True), label="kept"),
            Sample(f"aten.{name}.dim", (_sparse.to(torch.uint8), 1), label="bytes"),
            Sample(f"aten.{name}.dims", (_flags, [0, 2])),
            Sample(f"aten.{name}.dims", (_flags,), label="all"),
        )
    ),
)
