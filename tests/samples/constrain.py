"""Samples of the operators that are an identity: a layout constraint, a check of a decision."""

from __future__ import annotations

import torch

from samples.sample import Sample, normal

_DECISIONS = ([torch.tensor(True), torch.tensor(False)], [True, False], ["a.py:1", "a.py:2"])

SAMPLES = (
    Sample("autopar.constrain", (normal(12, 4),)),
    Sample("autopar.checked", (normal(12, 4), *_DECISIONS)),
)
