"""Samples of `ir/rules/batch_norm.py`."""

from samples.sample import Sample, normal, positive

_w, _b = positive(6), normal(6)
_mean, _var = normal(6, grad=False), positive(6, grad=False)
_shapes = (normal(12, 6), normal(4, 6, 4), normal(4, 6, 3, 4))

SAMPLES = (
    *(
        Sample(
            "autopar.batch_norm_train", (x, _w, _b, _mean, _var, 0.1, 1e-5), label=f"{x.dim()}-d"
        )
        for x in _shapes
    ),
    Sample(
        "autopar.batch_norm_train",
        (normal(1, 6, 3, 4), _w, _b, _mean, _var, 0.1, 1e-5),
        label="one image",
    ),
    Sample(
        "autopar.batch_norm_train",
        (_shapes[1], None, None, _mean, _var, 0.3, 1e-3),
        label="no affine map",
    ),
    *(
        Sample(
            "aten.batch_norm.default",
            (x, _w, _b, None, None, True, 0.1, 1e-5, False),
            label=f"without running statistics, {x.dim()}-d",
        )
        for x in _shapes
    ),
    Sample(
        "aten.batch_norm.default",
        (_shapes[2], _w, _b, _mean, _var, False, 0.1, 1e-5, False),
        label="evaluation",
    ),
    Sample(
        "aten.batch_norm.default",
        (_shapes[2], None, None, _mean, _var, False, 0.1, 1e-5, False),
        label="evaluation, no affine map",
    ),
    Sample(
        "aten._native_batch_norm_legit_no_training.default",
        (_shapes[2], _w, _b, _mean, _var, 0.1, 1e-5),
    ),
)
