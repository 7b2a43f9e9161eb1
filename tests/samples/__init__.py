"""Sample calls of every operator that has a rule, one module per family.

Each module holds a tuple `SAMPLES`; a new module is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from samples.sample import Sample


def all_samples() -> tuple[Sample, ...]:
    """Every sample of every module of this package, modules in alphabetical order."""
    return samples_of(*sorted(m.name for m in pkgutil.iter_modules(__path__)))


def samples_of(*families: str) -> tuple[Sample, ...]:
    """The samples of the named modules."""
    found: list[Sample] = []
    for family in families:
        found.extend(getattr(importlib.import_module(f"samples.{family}"), "SAMPLES", ()))
    return tuple(found)


__all__ = ["Sample", "all_samples", "samples_of"]
