"""Samples of `ir/rules/loss.py`."""

import torch

from samples.sample import Sample, booleans, integers, normal, positive

_logits, _ids = normal(4, 12), integers(12, 4)
_image, _labels = normal(4, 6, 4), integers(6, 4, 4)
_pixels, _pixel_labels = normal(2, 4, 4, 2), integers(4, 2, 4, 2)
_weight, _six = positive(12, grad=False), positive(6, grad=False)
_ignored = _labels.masked_fill(booleans(4, 4), -100)
# The first half of the batch counts nothing at all: its rank has an empty mean.
_half_ignored = torch.tensor([-100, -100, 3, 11])
_all_ignored = torch.tensor([-100] * 4)
_huge = (normal(4, 12, grad=False) * 150).requires_grad_()

_CE = "aten.cross_entropy_loss.default"
_CALLS = (
    (_logits, _ids, None, 1),
    (_logits, _ids, None, 2),
    (_logits, _ids, None, 0),
    (_logits, _ids, _weight, 1),
    (_logits, _ids, _weight, 0),
    (_logits, _half_ignored, _weight, 1),
    (_logits, _half_ignored, _weight, 2),
    (_image, _labels, None, 1),
    (_image, _ignored, _six, 1),
    (_image, _ignored, _six, 0),
    (_pixels, _pixel_labels, None, 1),
    (normal(12), torch.tensor(7), None, 1),
)
_CROSS = [Sample(_CE, call, label=f"call {k}") for k, call in enumerate(_CALLS)]
_SMOOTH = [
    Sample(_CE, (*call, -100, 0.1), label=f"smoothed call {k}") for k, call in enumerate(_CALLS)
]
_LOG = torch.log_softmax
_NLL = [
    Sample(
        f"aten.{name}.default",
        (_LOG(call[0].detach(), 1 if call[0].dim() > 1 else 0).requires_grad_(), *call[1:]),
        label=f"call {k}",
    )
    for k, call in enumerate(_CALLS)
    for name, ranks in (("nll_loss", (1, 2)), ("nll_loss2d", (4,)), ("nll_loss_nd", (1, 2, 3, 4)))
    if call[0].dim() in ranks
]

_SHARES = torch.softmax(normal(4, 6, 4, grad=False), 1).requires_grad_()
_x, _y = normal(4, 6), normal(4, 6, seed=1)
_p, _q = positive(4, 6), positive(4, 6, seed=1, grad=False)
_signs = (booleans(4, 6).double() * 2 - 1).requires_grad_(False)
_row = positive(6, grad=False)
_ELEMENTWISE = [
    Sample(f"aten.{name}.default", (*args, reduction), kwargs, label=f"reduction {reduction}")
    for reduction in (0, 1, 2)
    for name, args, kwargs in (
        ("binary_cross_entropy", (_p, _q, None), {}),
        ("binary_cross_entropy", (_p, _q, positive(4, 6, seed=3, grad=False)), {}),
        ("binary_cross_entropy_with_logits", (_x, _q, None, None), {}),
        ("binary_cross_entropy_with_logits", (_x, _q, None, _row), {}),
        ("hinge_embedding_loss", (_x, _signs, 1.0), {}),
        ("kl_div", (_x, _p), {}),
        ("kl_div", (_x, _y), {"log_target": True}),
        ("l1_loss", (_x, _y), {}),
        ("margin_ranking_loss", (_x, _y, _signs, 0.1), {}),
        ("mse_loss", (_x, _y), {}),
        ("poisson_nll_loss", (_x, _q, True, False, 1e-8), {}),
        ("soft_margin_loss", (_x, _signs), {}),
        ("smooth_l1_loss", (_x, _y), {}),
        ("huber_loss", (_x, _y), {}),
    )
]

SAMPLES = (
    *_CROSS,
    *_SMOOTH,
    Sample(_CE, (_huge, _ids), label="large logits"),
    Sample(_CE, (_logits, _all_ignored), label="nothing counts"),
    Sample(_CE, (_image, _SHARES), label="probabilities"),
    Sample(_CE, (_image, _SHARES, _six, 1, -100, 0.2), label="probabilities, smoothed"),
    Sample(_CE, (_image, _SHARES, None, 0), label="probabilities, unreduced"),
    Sample(_CE, (_image, _SHARES, None, 2), label="probabilities, summed"),
    *_NLL,
    *_ELEMENTWISE,
)
