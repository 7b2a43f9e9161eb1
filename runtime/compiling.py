"""Whether `torch.compile` is taking down what runs."""

from __future__ import annotations

from torch._guards import TracingContext


def is_compiling() -> bool:
    """Whether the operators that run are taken down by `torch.compile`.

    Its tracer (AOTAutograd) runs our Python on fake tensors: what a graph of operators cannot hold
    must then be left out.
    """
    return TracingContext.try_get() is not None
