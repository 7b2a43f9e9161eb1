"""Samples of `ir/rules/mean.py`."""

import torch

from samples.sample import Sample, integers, normal

_x = normal(4, 6, 12)
_flat = torch.ones(4, 12, dtype=torch.float64).requires_grad_()
_far = (normal(4, 12, grad=False) + 1e4).requires_grad_()

_DIMS = ([1], [0, 2], [-1], None)

SAMPLES = (
    Sample("aten.mean.default", (_x,)),
    Sample("aten.mean.default", (integers(9, 4, 12),), {"dtype": torch.float64}, label="cast"),
    *(Sample("aten.mean.dim", (_x, dims), label=f"{dims}") for dims in _DIMS),
    Sample("aten.mean.dim", (_x, [0, 2], True), label="kept"),
    *(
        sample
        for name in ("var", "std", "var_mean", "std_mean")
        for sample in (
            Sample(f"aten.{name}.default", (_x,)),
            Sample(f"aten.{name}.default", (_x, False), label="biased"),
            Sample(f"aten.{name}.dim", (_x, [1]), label="one"),
            Sample(f"aten.{name}.dim", (_x, [0, -1], False, True), label="kept"),
            Sample(f"aten.{name}.dim", (_far, [1]), label="far from zero"),
            Sample(f"aten.{name}.dim", (_flat, [1]), label="all equal"),
            Sample(f"aten.{name}.correction", (_x,)),
            Sample(
                f"aten.{name}.correction", (_x, [2]), {"correction": 0, "keepdim": True}, "kept"
            ),
        )
    ),
)
