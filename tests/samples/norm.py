"""Samples of `ir/rules/norm.py`."""

from samples.sample import Sample, normal, positive

_x = normal(4, 6, 12)
_w, _b = positive(12), normal(12)
_far = (normal(4, 12, grad=False) + 1e4).requires_grad_()
_image = normal(4, 12, 4, 3)

SAMPLES = (
    Sample("aten.layer_norm.default", (_x, [12], _w, _b)),
    Sample("aten.layer_norm.default", (_x, [12], _w), label="no bias"),
    Sample("aten.layer_norm.default", (_x, [12], None, None, 1e-3), label="no affine map"),
    Sample(
        "aten.layer_norm.default",
        (_x, [6, 12], normal(6, 12), normal(6, 12, seed=1)),
        label="two dimensions",
    ),
    Sample("aten.layer_norm.default", (normal(12), [12], _w, _b), label="1-d"),
    Sample("aten.layer_norm.default", (_far, [12], _w, _b), label="far from zero"),
    Sample("aten.rms_norm.default", (_x, [12], _w)),
    Sample("aten.rms_norm.default", (_x, [12], None, 1e-5), label="no weight"),
    Sample("aten.rms_norm.default", (_x, [6, 12], normal(6, 12)), label="two dimensions"),
    Sample("aten.group_norm.default", (_image, 6, _w, _b)),
    Sample("aten.group_norm.default", (_image, 4), label="no affine map"),
    Sample("aten.group_norm.default", (normal(4, 12), 12, _w, _b), label="2-d"),
    Sample(
        "aten.instance_norm.default", (_image, _w, _b, None, None, True, 0.1, 1e-5, False)
    ),
    Sample(
        "aten.instance_norm.default",
        (_image, None, None, positive(12, grad=False), positive(12, grad=False), True, 0.1, 1e-5,
         False),
        label="with running statistics",
        unsplit=True,
    ),
    Sample("aten._weight_norm.default", (normal(12, 4, 3), positive(12, 1, 1), 0)),
    Sample("aten._weight_norm.default", (normal(4, 4, 12), positive(1, 1, 12), 2), label="last"),
    Sample("aten._weight_norm.default", (normal(4, 12), positive(), -1), label="all", unsplit=True),
)  # fmt: skip
