"""Samples of matrix products in all combinations of ranks, with and without a bias."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401  (registers the operator)

from samples.sample import Sample, integers, normal

_LINEAR = (
    Sample("aten.linear.default", (normal(4, 6, 12), normal(4, 12), normal(4))),
    Sample("aten.linear.default", (normal(6, 12), normal(4, 12)), label="no bias"),
    Sample("aten.linear.default", (normal(6, 12), normal(4, 12), None), label="bias None"),
    Sample("aten.linear.default", (normal(12), normal(4, 12), normal(4)), label="vector"),
    Sample("aten.linear.default", (normal(4, 12), normal(12)), label="one output"),
    Sample(
        "aten.linear.default",
        (normal(6, 12, grad=False), normal(4, 12), normal(4)),
        label="no gradient of the input",
    ),
)

_MATMUL = (
    Sample("aten.matmul.default", (normal(12), normal(12, seed=1)), label="vectors"),
    Sample("aten.matmul.default", (normal(4, 12), normal(12)), label="matrix, vector"),
    Sample("aten.matmul.default", (normal(12), normal(12, 4)), label="vector, matrix"),
    Sample("aten.matmul.default", (normal(4, 12), normal(12, 6)), label="matrices"),
    Sample("aten.matmul.default", (normal(2, 4, 12), normal(12)), label="batch, vector"),
    Sample("aten.matmul.default", (normal(12), normal(2, 12, 4)), label="vector, batch"),
    Sample("aten.matmul.default", (normal(2, 4, 12), normal(12, 6)), label="batch, matrix"),
    Sample("aten.matmul.default", (normal(4, 12), normal(2, 12, 6)), label="matrix, batch"),
    Sample("aten.matmul.default", (normal(2, 4, 12), normal(2, 12, 6)), label="batches"),
    Sample("aten.matmul.default", (normal(4, 1, 2, 3), normal(6, 3, 2)), label="broadcast"),
)

_PRODUCTS = (
    Sample("aten.mm.default", (normal(4, 12), normal(12, 6))),
    Sample("aten.bmm.default", (normal(4, 6, 12), normal(4, 12, 2))),
    Sample("aten.mv.default", (normal(4, 12), normal(12))),
    Sample("aten.dot.default", (normal(12), normal(12, seed=1))),
    Sample("aten.vdot.default", (normal(12), normal(12, seed=1))),
    Sample("aten.outer.default", (normal(12), normal(4))),
    Sample("aten.ger.default", (normal(12), normal(4))),
    Sample("aten.inner.default", (normal(4, 12), normal(2, 6, 12))),
    Sample("aten.inner.default", (normal(12), normal(12, seed=1)), label="vectors"),
    Sample("aten.inner.default", (normal(12), normal()), label="number", unsplit=True),
    Sample("aten.mm.default", (integers(9, 4, 12), integers(9, 12, 6)), label="integers"),
)

_SUMS = (
    Sample("aten.addmm.default", (normal(6), normal(4, 12), normal(12, 6))),
    Sample("aten.addmm.default", (normal(4, 6), normal(4, 12), normal(12, 6)), label="matrix"),
    Sample("aten.addmm.default", (normal(4, 1), normal(4, 12), normal(12, 6)), label="column"),
    Sample("aten.addmm.default", (normal(), normal(4, 12), normal(12, 6)), label="scalar"),
    Sample(
        "aten.addmm.default",
        (normal(6), normal(4, 12), normal(12, 6)),
        {"beta": 0.5, "alpha": 2.0},
        label="scaled",
    ),
    Sample("aten.baddbmm.default", (normal(4, 2, 3), normal(4, 2, 12), normal(4, 12, 3))),
    Sample(
        "aten.baddbmm.default", (normal(1, 3), normal(4, 2, 12), normal(4, 12, 3)), {}, "broadcast"
    ),
    Sample("aten.addbmm.default", (normal(2, 3), normal(4, 2, 12), normal(4, 12, 3))),
    Sample("aten.addmv.default", (normal(4), normal(4, 12), normal(12))),
    Sample("aten.addr.default", (normal(4, 12), normal(4), normal(12))),
    Sample("aten.bilinear.default", (normal(4, 6), normal(4, 12), normal(2, 6, 12), normal(2))),
    Sample("aten.bilinear.default", (normal(6), normal(4), normal(2, 6, 4)), label="no bias"),
)

_EINSUMS = (
    Sample("aten.einsum.default", ("bhqd,bhkd->bhqk", [normal(2, 4, 3, 6), normal(2, 4, 2, 6)])),
    Sample("aten.einsum.default", ("ij, jk", [normal(4, 12), normal(12, 6)]), label="implicit"),
    Sample(
        "aten.einsum.default", ("...i,oi->...o", [normal(2, 4, 12), normal(6, 12)]), label="dots"
    ),
    Sample(
        "aten.einsum.default", ("...i,...i", [normal(4, 12), normal(12)]), label="implicit dots"
    ),
    Sample("aten.einsum.default", ("IR,RP->PI", [normal(4, 12), normal(12, 6)]), label="capitals"),
    Sample("aten.einsum.default", ("ij->", [normal(4, 12)]), label="sum of all"),
    Sample("aten.einsum.default", ("ii->i", [normal(4, 4)]), label="diagonal", unsplit=True),
    Sample(
        "aten.einsum.default",
        ("ai,bi,ci->abc", [normal(4, 6), normal(2, 6), normal(3, 6)]),
        label="three operands",
    ),
    Sample("aten.einsum.default", ("ij,ij->ij", [normal(4, 1), normal(4, 12)]), label="broadcast"),
)

# Whole numbers, which bfloat16 holds exactly.
_ROWS = (integers(3, 16, 32) - 1).to(torch.bfloat16)
_WEIGHTS = (integers(3, 2, 32, 16) - 1).to(torch.bfloat16)
_ENDS = torch.tensor([6, 16], dtype=torch.int32)

_GROUPED = (
    Sample("aten._grouped_mm.default", (_ROWS, _WEIGHTS), {"offs": _ENDS}),
    Sample("transformers.grouped_mm_fallback.default", (normal(16, 12), normal(2, 12, 6), _ENDS)),
    Sample(
        "transformers.grouped_mm_fallback.default",
        (normal(12, 4), normal(12, 4, 6), torch.tensor([0, 0, 2, 5, 5, 6, 6, 6, 9, 11, 12, 12])),
        label="groups without rows",
    ),
)

SAMPLES = (*_LINEAR, *_MATMUL, *_PRODUCTS, *_SUMS, *_EINSUMS, *_GROUPED)
