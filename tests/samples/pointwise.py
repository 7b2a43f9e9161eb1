"""Samples of the pointwise operators: one for each in common use, several for the linear ones."""

from __future__ import annotations

import torch

from samples.sample import Sample, booleans, integers, normal, positive

_UNARY = (
    "abs", "absolute", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "ceil", "celu",
    "clone", "cos", "cosh", "deg2rad", "digamma", "elu", "erf", "erfc", "erfinv", "exp", "exp2",
    "expm1", "floor", "frac", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "isfinite", "isinf", "isnan", "leaky_relu", "lgamma", "log", "log10", "log1p", "log2",
    "log_sigmoid", "logical_not", "logit", "mish", "nan_to_num", "neg", "negative", "positive",
    "rad2deg", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign",
    "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "special_entr", "sqrt",
    "square", "tan", "tanh", "trunc",
)  # fmt: skip

_BINARY = (
    "arctan2.default", "atan2.default", "copysign.Tensor", "fmax.default", "fmin.default",
    "fmod.Tensor", "hypot.default", "isclose.default", "logaddexp.default",
    "logaddexp2.default", "maximum.default", "minimum.default", "pow.Tensor_Tensor",
    "remainder.Tensor", "xlogy.Tensor",
    "eq.Tensor", "ge.Tensor", "greater.Tensor", "greater_equal.Tensor", "gt.Tensor", "le.Tensor",
    "less.Tensor", "less_equal.Tensor", "logical_and.default", "logical_or.default",
    "logical_xor.default", "lt.Tensor", "ne.Tensor", "not_equal.Tensor",
    "add.Tensor", "div.Tensor", "divide.Tensor", "mul.Tensor",
    "multiply.Tensor", "rsub.Tensor", "sub.Tensor", "subtract.Tensor", "true_divide.Tensor",
)  # fmt: skip

_WITH_NUMBER = (
    "add.Scalar", "add.Tensor", "clamp.default", "clamp_max.default", "clamp_min.default",
    "div.Scalar", "div.Tensor", "divide.Scalar", "eq.Scalar", "fmod.Scalar",
    "ge.Scalar", "greater.Scalar", "greater_equal.Scalar", "gt.Scalar", "le.Scalar", "less.Scalar",
    "less_equal.Scalar", "lt.Scalar", "mul.Scalar", "mul.Tensor", "multiply.Scalar", "ne.Scalar",
    "not_equal.Scalar", "pow.Tensor_Scalar", "remainder.Scalar", "rsub.Scalar", "sub.Scalar",
    "sub.Tensor", "subtract.Scalar", "true_divide.Scalar",
)  # fmt: skip

_INTEGER = (
    "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "gcd",
)  # fmt: skip


def _unary(name: str) -> Sample:
    return Sample(f"aten.{name}.default", (positive(12, 4),))


def _binary(name: str) -> Sample:
    """The second operand is broadcast along the first dimension."""
    return Sample(f"aten.{name}", (positive(12, 4), positive(4, seed=1)))


def _with_number(name: str) -> Sample:
    return Sample(f"aten.{name}", (positive(12, 4), 0.5), label="number")


def _integer(name: str) -> Sample:
    overload = "default" if name == "gcd" else "Tensor"
    return Sample(f"aten.{name}.{overload}", (integers(9, 12, 4), integers(9, 12, 1, seed=1)))


_LINEAR = (
    Sample("aten.add.Tensor", (normal(12, 4), normal(12, 4, seed=1)), label="same shape"),
    Sample("aten.add.Tensor", (normal(12, 4), normal(12, 1)), {"alpha": 3}, label="alpha"),
    Sample("aten.add.Tensor", (normal(12, 4), normal()), label="scalar tensor"),
    Sample("aten.add.Tensor", (normal(12, 4), 0), label="zero"),
    Sample("aten.add.Tensor", (normal(4, 1), normal(1, 12)), label="both broadcast"),
    Sample("aten.add.Tensor", (normal(12), integers(5, 12)), label="with integers"),
    Sample("aten.add.Tensor", (normal(12), normal(12, grad=False)), label="one gradient"),
    Sample("aten.add.Tensor", (normal(), normal(seed=1)), label="scalars", unsplit=True),
    Sample("aten.mul.Tensor", (normal(2, 12, 4), normal(12, 1)), label="broadcast"),
    Sample("aten.mul.Tensor", (normal(12, 4), booleans(12, 4)), label="mask"),
    Sample("aten.mul.Tensor", (normal(12), normal(12, seed=1)), label="vectors"),
    Sample("aten.div.Tensor", (normal(4, 12), positive(4, 1)), label="broadcast"),
    Sample("aten.div.Tensor", (integers(9, 12), 2), label="integers"),
    Sample("aten.div.Tensor_mode", (normal(12), positive(12)), {"rounding_mode": None}),
    Sample("aten.div.Tensor_mode", (normal(12), positive(12)), {"rounding_mode": "floor"}, "floor"),
    Sample("aten.divide.Tensor_mode", (normal(12), positive(12)), {"rounding_mode": "trunc"}),
    Sample("aten.div.Scalar_mode", (normal(12), 0.3), {"rounding_mode": "floor"}),
    Sample("aten.divide.Scalar_mode", (normal(12), 0.3), {"rounding_mode": "floor"}),
    Sample("aten.lerp.Scalar", (normal(12, 4), normal(12, 4, seed=1), 0.3)),
    Sample("aten.lerp.Tensor", (normal(12, 4), normal(12, 4, seed=1), positive(4))),
    Sample("aten.addcmul.default", (normal(12, 4), normal(12, 4, seed=1), normal(4))),
    Sample("aten.addcdiv.default", (normal(12, 4), normal(12, 1), positive(4)), {"value": 2.0}),
    Sample("aten.where.self", (booleans(12, 4), normal(12, 4), normal(4))),
    Sample("aten.where.self", (booleans(12, 1), normal(4), normal()), label="broadcast"),
    Sample("aten.where.ScalarOther", (booleans(12, 4), normal(12, 4), 0)),
    Sample("aten.where.ScalarOther", (booleans(12, 4), normal(), -2.5), label="scalar tensor"),
    Sample("aten.where.ScalarSelf", (booleans(12, 4), 1.5, normal(12, 4))),
    Sample("aten.where.Scalar", (booleans(12, 4), 1.5, 0.0)),
    Sample("aten.masked_fill.Scalar", (normal(12, 4), booleans(4), 0)),
    Sample("aten.masked_fill.Scalar", (normal(12, 4), booleans(12, 4), -1e9), label="number"),
    Sample("aten.masked_fill.Tensor", (normal(12, 4), booleans(12, 1), normal())),
    Sample("aten.copy.default", (normal(12, 4, grad=False), normal(4, grad=False))),
    Sample("aten.fill.Scalar", (normal(12, 4), 2.0)),
    Sample("aten.fill.Tensor", (normal(12, 4), normal())),
    Sample("aten.complex.default", (normal(12), normal(12, seed=1))),
    Sample("aten.polar.default", (positive(12), normal(12, seed=1))),
    Sample("aten.real.default", (torch.complex(normal(12), normal(12)).detach(),)),
    Sample("aten.imag.default", (torch.complex(normal(12), normal(12)).detach(),)),
    Sample("aten.clone.default", (normal(12, 4),), {"memory_format": torch.contiguous_format}),
)

_CASTS = (
    Sample("aten._to_copy.default", (normal(12, 4),), {"dtype": torch.float64}),
    Sample("aten._to_copy.default", (normal(12, 4),), {"dtype": torch.int64}, "to integers"),
    Sample("aten._to_copy.default", (integers(9, 12),), {"dtype": torch.float64}, "to float"),
    Sample("aten._to_copy.default", (booleans(12),), {"dtype": torch.float64}, "from bool"),
    Sample("aten.to.dtype", (normal(12, 4), torch.float64)),
    Sample("aten.to.dtype_layout", (normal(12, 4),), {"dtype": torch.float64}),
    Sample("aten.to.device", (normal(12, 4), torch.device("cpu"), torch.float64)),
    Sample("aten.to.other", (normal(12, 4), normal(12, 4, seed=1))),
    Sample("aten.type_as.default", (normal(12, 4), normal(12, 4, seed=1))),
)

_OTHERS = (
    Sample("aten.pow.Scalar", (2.0, normal(12, 4))),
    Sample("aten.pow.Tensor_Scalar", (normal(12, 4), 3), label="cube"),
    Sample("aten.clamp.default", (normal(12, 4), -0.5, 0.5), label="both"),
    Sample("aten.clamp.Tensor", (normal(12, 4), normal(4, grad=False), None)),
    Sample("aten.threshold.default", (normal(12, 4), 0.1, 20.0)),
    Sample("aten.round.decimals", (normal(12, 4),), {"decimals": 1}),
    Sample("aten.gelu.default", (normal(12, 4),), {"approximate": "tanh"}, "tanh"),
    Sample("aten.__and__.Scalar", (integers(9, 12), 3)),
    Sample("aten.__or__.Scalar", (integers(9, 12), 3)),
    Sample("aten.bitwise_not.default", (booleans(12, 4),)),
    Sample("aten.bitwise_and.Tensor", (booleans(12, 4), booleans(4)), label="masks"),
    Sample("aten.floor_divide.Scalar", (integers(99, 12, 4), 7)),
    Sample("aten.floor_divide.default", (normal(12, 4, grad=False), positive(4, grad=False))),
    Sample("aten.heaviside.default", (normal(12, 4, grad=False), normal(4, grad=False))),
    Sample("aten.frexp.Tensor", (normal(12, 4, grad=False),)),
    Sample("aten.prelu.default", (normal(4, 12, 2), normal(12))),
    Sample("aten.prelu.default", (normal(4, 12), normal(1)), label="one slope"),
    Sample("aten._prelu_kernel.default", (normal(4, 12), normal(1, 12))),
    Sample("aten.native_dropout_backward.default", (normal(12), booleans(12), 2.0)),
)

SAMPLES = (
    *map(_unary, _UNARY),
    *map(_binary, _BINARY),
    *map(_with_number, _WITH_NUMBER),
    *map(_integer, _INTEGER),
    *_LINEAR,
    *_CASTS,
    *_OTHERS,
)
