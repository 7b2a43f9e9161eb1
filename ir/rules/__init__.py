"""Operator rules in families; `rule_for` finds the one of a call."""

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
    indexing,
    joining,
    loss,
    mean,
    norm,
    pointwise,
    pooling,
    reduction,
    reshape,
    scattering,
    softmax,
    sorting,
    views,
)
from autopar.ir.rules.registry import register, register_fallback, registered, rule_for

__all__ = ["register", "register_fallback", "registered", "rule_for"]
