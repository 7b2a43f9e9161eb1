"""Samples of `ir/rules/dropout.py`."""

from samples.sample import Sample, normal, positive

_x = normal(4, 6, 12)
_pattern = normal(4, 12, grad=False)
_f64 = {"dtype": _x.dtype}

SAMPLES = (
    *(
        Sample(f"aten.{name}.default", (_x, p, train), label=f"p={p} train={train}")
        for name in ("alpha_dropout", "dropout", "feature_dropout", "native_dropout")
        for p, train in ((0.3, True), (0.0, True), (0.3, False), (1.0, True))
    ),
    Sample("aten.feature_dropout.default", (normal(4, 12, 2, 2), 0.5, True), label="images"),
    Sample("aten.rand.default", ([4, 12],), _f64),
    Sample("aten.randn.default", ([4, 12],), _f64),
    Sample("aten.randn.default", ([4],), label="small, default dtype"),
    Sample("aten.randint.default", (5, [4, 12])),
    Sample("aten.randint.low", (2, 9, [4, 12])),
    Sample("aten.normal.float_float", (1.0, 2.0, [4, 12])),
    Sample("aten.rand_like.default", (_pattern,)),
    Sample("aten.randn_like.default", (_pattern,)),
    Sample("aten.randint_like.default", (_pattern, 5)),
    Sample("aten.randint_like.low_dtype", (_pattern, 2, 9)),
    Sample("aten.uniform.default", (_pattern, -1.0, 2.0)),
    Sample("aten.normal_functional.default", (_pattern, 1.0, 2.0)),
    Sample("aten.exponential.default", (_pattern, 2.0)),
    Sample("aten.uniform.default", (normal(4, 12),), label="with a gradient"),
    Sample("aten.exponential.default", (normal(4, 12),), label="with a gradient"),
    Sample("aten.bernoulli.p", (_pattern, 0.3)),
    Sample("aten.bernoulli.default", (positive(4, 12),), label="with a gradient"),
    Sample("aten.bernoulli.default", (positive(4, 12, grad=False),)),
    Sample("aten.randperm.default", (12,), unsplit=True),
    Sample("aten.multinomial.default", (positive(4, 12, grad=False), 2), unsplit=True),
)
