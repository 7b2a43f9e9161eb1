"""Operator rules in families; `rule_for` finds the one of a call."""

from autopar.ir import discovered  # noqa: F401  (asked last of all)
from autopar.ir.rules import (  # noqa: F401  (imported for the rules they register)
    addmm_nd,
    attention,
    batch_norm,
    constrain,
    contraction,
    convolution,
    creation,
    dropout,
    embedding,
    extremum,
    fourier,
    gated,
    indexing,
    joining,
    loss,
    mean,
    norm,
    pointwise,
    pooling,
    recurrent,
    reduction,
    reshape,
    scattering,
    softmax,
    sorting,
    strided,
    views,
    whole,
)
from autopar.ir.rules.registry import register, register_fallback, registered, rule_for

__all__ = ["register", "register_fallback", "registered", "rule_for"]
