"""Samples of `ir/rules/softmax.py`."""

import torch

from samples.sample import Sample, normal

_x = normal(4, 6, 12)
_huge = (normal(4, 12, grad=False) * 50 + 150).requires_grad_()
# One rank's whole block of a row is masked out.
_masked = normal(4, 12, grad=False)
_masked[:, :6] = -torch.inf
_masked.requires_grad_()

SAMPLES = tuple(
    Sample(op, args, label=label)
    for name in ("softmax", "log_softmax")
    for op, args, label in (
        (f"aten.{name}.int", (_x, -1), "last"),
        (f"aten.{name}.int", (_x, 0), "first"),
        (f"aten.{name}.int", (normal(12), 0), "1-d"),
        (f"aten.{name}.int", (_x.detach().float(), 1, torch.float64), "to float64"),
        (f"aten.{name}.int", (_huge, 1), "large logits"),
        (f"aten.{name}.int", (_masked, 1), "masked logits"),
        (f"aten._{name}.default", (_x, 2, False), ""),
    )
)
