"""Errors of the assignment solver, which stands apart from the rest of the compiler."""

from __future__ import annotations


class ProblemError(ValueError):
    """A problem (or the file it is read from) is malformed; the message names the part."""


class InfeasibleError(ValueError):
    """No assignment is possible, or none was found under the memory limit.

    Attributes:
        peak: the smallest peak memory that was reached, or None when no assignment of
            finite cost exists at all.
        peak_bound: a lower bound on the peak of every assignment, or None as above.
        proven: whether it is proven that no assignment exists; False says the time ran out.
    """

    def __init__(
        self,
        message: str,
        *,
        peak: float | None = None,
        peak_bound: float | None = None,
        proven: bool = True,
    ) -> None:
        super().__init__(message)
        self.peak = peak
        self.peak_bound = peak_bound
        self.proven = proven
