"""Names of values: readable, unique, and Python identifiers."""

from __future__ import annotations

import keyword
import re
from collections import Counter

_UNFIT = re.compile(r"\W+")


class Namer:
    """Hands out names; the second `linear` is `linear_1`."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: Counter[str] = Counter()

    def fresh(self, base: str) -> str:
        name = base
        while name in self._taken:
            self._counts[base] += 1
            name = f"{base}_{self._counts[base]}"
        self._taken.add(name)
        return name

    def parts(self, name: str, count: int) -> list[str]:
        """The names of the results of a call with several (or no) results."""
        return [self.fresh(f"{name}_out{i}") for i in range(count)]


def base_name(op: str) -> str:
    """`linear` for ``aten.linear.default``."""
    parts = op.split(".")
    return source_name(parts[1] if len(parts) > 1 else parts[0])


def source_name(path: str) -> str:
    """`h_0_ln_weight` for the dotted path ``h.0.ln.weight``."""
    name = _UNFIT.sub("_", path).strip("_") or "x"
    if not name[0].isalpha() or keyword.iskeyword(name):
        name = f"p_{name}"
    return name
