"""Samples of Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from samples.sample import Sample, normal

_REAL = normal(4, 12, 6)


def _complex() -> Tensor:
    parts = normal(4, 12, 6, 2, grad=False)
    return torch.view_as_complex(parts).requires_grad_()


SAMPLES = (
    *(Sample(f"aten.fft_{n}.default", (_complex(),)) for n in ("fft", "ifft", "irfft", "hfft")),
    *(Sample(f"aten.fft_{n}.default", (_REAL,)) for n in ("rfft", "ihfft")),
    Sample("aten.fft_rfft.default", (_REAL, 8, 1), label="padded, middle dimension"),
    *(Sample(f"aten.fft_{n}.default", (_complex(),)) for n in ("fft2", "ifft2", "irfft2")),
    Sample("aten.fft_rfft2.default", (_REAL, None, [0, 2])),
    Sample("aten.fft_fftn.default", (_complex(),), unsplit=True),
    Sample("aten.fft_fftn.default", (_complex(), [4, 4]), label="given sizes"),
    Sample("aten.fft_ifftn.default", (_complex(), None, [1, 2])),
    Sample("aten.fft_rfftn.default", (_REAL, None, [2])),
    Sample("aten.fft_irfftn.default", (_complex(), None, [2])),
    Sample("aten.fft_fftshift.default", (_REAL, [1])),
    Sample("aten.fft_ifftshift.default", (_REAL, [1, 2])),
)
