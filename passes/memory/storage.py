"""A piece of memory while a step is simulated (`autopar.passes.memory.simulation`)."""

from __future__ import annotations


class Storage:
    """Memory that one or more holders keep alive."""

    def __init__(self, name: str, kind: str, nbytes: int, start: int, module: str) -> None:
        self.name, self.kind, self.nbytes, self.module = name, kind, nbytes, module
        self.start = start
        self.holders = 0
        self.end: int | None = None

    def hold(self) -> Storage:
        self.holders += 1
        return self

    def release(self, after: int) -> None:
        """Let go of it once position `after` is done."""
        self.holders -= 1
        if not self.holders:
            self.end = after + 1
