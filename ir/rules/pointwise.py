"""Pointwise operators: every dimension is parallel, small operands are broadcast.

PyTorch itself says which operators are pointwise (`torch.Tag.pointwise`), so they need no entry
here. The tables below say which of them are linear, and name those that miss the tag.
"""

from __future__ import annotations

import torch

from autopar.ir.declare import declare
from autopar.ir.graph import Node, Value
from autopar.ir.rule import Rule
from autopar.ir.rules.arguments import bind, dim_names, floating, notation, overload
from autopar.ir.rules.registry import register, register_fallback

#: Operator -> its linear groups, by the schema names of the arguments. A number in a group makes
#: the call affine, not linear, unless it is zero.
_LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {
    "_conj_physical": (("self",),),
    "_to_copy": (("self",),),
    "add": (("self", "other"),),
    "addcdiv": (("self", "tensor1"),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "clone": (("self",),),
    "complex": (("real", "imag"),),
    "copy": (("src",),),
    "div": (("self",),),
    "divide": (("self",),),
    "fill": (("value",),),
    "imag": (("self",),),
    "lerp": (("self", "end"),),
    "masked_fill": (("self", "value"),),
    "mul": (("self",), ("other",)),
    "multiply": (("self",), ("other",)),
    "native_dropout_backward": (("grad_output",),),
    "neg": (("self",),),
    "negative": (("self",),),
    "positive": (("self",),),
    "real": (("self",),),
    "rsub": (("self", "other"),),
    "sub": (("self", "other"),),
    "subtract": (("self", "other"),),
    "to": (("self",),),
    "true_divide": (("self",),),
    "type_as": (("self",),),
    "where": (("self", "other"),),
}

#: Operator -> the exponentials it is worth per element, forward and backward: what it takes on a
#: CPU, in the time of one exponential. Others are as fast as memory.
_SPECIAL: dict[str, tuple[int, int]] = {
    "celu": (1, 1),
    "cos": (1, 1),
    "cosh": (1, 1),
    "elu": (1, 1),
    "erf": (1, 1),
    "erfc": (1, 1),
    "exp": (1, 0),
    "exp2": (1, 0),
    "expm1": (1, 0),
    "gelu": (1, 2),
    "log": (1, 0),
    "log10": (1, 0),
    "log1p": (1, 0),
    "log2": (1, 0),
    "log_sigmoid": (3, 1),
    "logaddexp": (3, 2),
    "mish": (6, 7),
    "pow": (5, 5),
    "sigmoid": (1, 0),
    "silu": (1, 1),
    "sin": (1, 1),
    "sinh": (1, 1),
    "softplus": (3, 1),
    "tan": (3, 0),
    "tanh": (3, 0),
}
#: With the tangent in place of the error function.
_GELU_BY_TANH = (3, 3)
#: Exponents that are multiplications and roots.
_EASY_EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)


@register_fallback
def pointwise(node: Node) -> Rule | None:
    """Every operator that PyTorch tags as pointwise."""
    op = overload(node.op)
    if op is None or torch.Tag.pointwise not in op.tags:
        return None
    if torch.Tag.nondeterministic_seeded in op.tags or op._schema.is_mutable:
        return None
    if any(str(r.type) != "Tensor" for r in op._schema.returns):
        return None
    return _broadcast(node)


@register(
    "aten.__and__.Scalar",
    "aten.__and__.Tensor",
    "aten.__or__.Scalar",
    "aten.__or__.Tensor",
    "aten._prelu_kernel.default",
    "aten._to_copy.default",
    "aten.absolute.default",
    "aten.arctan2.default",
    "aten.complex.default",
    "aten.copy.default",
    "aten.divide.Scalar",
    "aten.divide.Scalar_mode",
    "aten.divide.Tensor",
    "aten.divide.Tensor_mode",
    "aten.fill.Scalar",
    "aten.fill.Tensor",
    "aten.floor_divide.Scalar",
    "aten.floor_divide.default",
    "aten.greater.Scalar",
    "aten.greater.Tensor",
    "aten.greater_equal.Scalar",
    "aten.greater_equal.Tensor",
    "aten.hardswish.default",
    "aten.imag.default",
    "aten.isclose.default",
    "aten.less.Scalar",
    "aten.less.Tensor",
    "aten.less_equal.Scalar",
    "aten.less_equal.Tensor",
    "aten.log_sigmoid.default",
    "aten.masked_fill.Tensor",
    "aten.multiply.Scalar",
    "aten.multiply.Tensor",
    "aten.negative.default",
    "aten.not_equal.Scalar",
    "aten.not_equal.Tensor",
    "aten.polar.default",
    "aten.real.default",
    "aten.rsub.Tensor",
    "aten.subtract.Scalar",
    "aten.subtract.Tensor",
    "aten.to.device",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.other",
    "aten.true_divide.Scalar",
    "aten.type_as.default",
    "aten.where.Scalar",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
)
def _broadcast(node: Node) -> Rule:
    terms = ["b*"] * len(node.operands), ["b*"] * len(node.results)
    return declare(
        node,
        f"{', '.join(terms[0])} -> {', '.join(terms[1])}",
        linear=_linear(node),
        flops_per_point=1,
        special_per_point=_special(node),
    )


def _special(node: Node) -> tuple[int, int]:
    """The exponentials that a call is worth per element, forward and backward."""
    kind = node.op.split(".")[1]
    if kind == "pow" and bind(node).get("exponent") in _EASY_EXPONENTS:
        return (0, 0)
    if kind == "gelu" and bind(node)["approximate"] == "tanh":
        return _GELU_BY_TANH
    return _SPECIAL.get(kind, (0, 0))


def _linear(node: Node) -> tuple[tuple[int, ...], ...]:
    """The groups of tensor operands in which this call is jointly linear."""
    kind = node.op.split(".")[1]
    arguments = bind(node)
    if arguments.get("rounding_mode") is not None:
        return ()
    tensors = [name for name, value in arguments.items() if isinstance(value, Value)]
    groups = []
    for group in _LINEAR.get(kind, ()):
        numbers = [name for name in group if name not in tensors]
        if len(numbers) == len(group) or any(arguments[name] != 0 for name in numbers):
            continue
        groups.append(tuple(tensors.index(name) for name in group if name in tensors))
    return floating(node, *groups)


@register("aten.prelu.default")
def prelu(node: Node) -> Rule:
    """``x`` [n, c, …] with one slope for each channel (dimension 1), or one for all."""
    rank, shared = len(node.operands[0].shape), node.operands[1].numel == 1
    dims = dim_names(rank, "d")
    slope = ["1"] * len(node.operands[1].shape) if shared else [dims[1]]
    return declare(node, notation([dims, slope], [dims]), flops_per_point=1)
