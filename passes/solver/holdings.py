"""The memory of a layout's nodes as flat arrays.

A node that stands for several copies of a layer holds the same tensors many times over, at
other times and in other numbers. Such spans share one *shape*, the memory of every option as a
part of the largest, and have a scale of their own: prices and preferences are worked out once
per shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .memory import LiveSets


class Holdings:
    """What every option of a layout holds in every live set.

    Attributes:
        live: the live sets.
        owner: int [F], position of the node of every shape, ascending.
        offset: int [F + 1], where the entries of each shape begin, one per option of its node.
        part: float64 [entries], memory above the least as a part of the largest.
        option: int [entries], the flat index of the option.
        span: int [S], the layout's spans as the live sets number them.
        shape: int [S], the shape of every span.
        scale: float64 [S], the memory that a part of 1 stands for.
        first, last: int [S], the half-open range of live sets of every span.
    """

    def __init__(
        self,
        live: LiveSets,
        nodes: Sequence[int],
        options: Sequence[np.ndarray],
        option_offset: np.ndarray,
    ) -> None:
        self.live = live
        owner: list[int] = []
        parts: list[np.ndarray] = []
        spans: list[int] = []
        shapes: list[int] = []
        scales: list[float] = []
        for position, node in enumerate(nodes):
            known: dict[bytes, int] = {}
            for span in live.spans_of(node):
                usages = live.usages[span][options[node]]
                scale = float(usages.max())
                if scale <= 0:
                    continue
                part = usages / scale
                shape = known.setdefault(part.tobytes(), len(parts))
                if shape == len(parts):
                    owner.append(position)
                    parts.append(part)
                spans.append(span)
                shapes.append(shape)
                scales.append(scale)
        self.owner = np.array(owner, dtype=np.intp)
        sizes = np.array([len(part) for part in parts], dtype=np.intp)
        self.offset = np.concatenate([np.zeros(1, dtype=np.intp), np.cumsum(sizes)])
        self.part = np.concatenate([np.zeros(0), *parts])
        self.option = np.arange(len(self.part)) + np.repeat(
            option_offset[self.owner] - self.offset[:-1], sizes
        )
        self._options = int(option_offset[-1])
        self.span = np.array(spans, dtype=np.intp)
        self.shape = np.array(shapes, dtype=np.intp)
        self.scale = np.array(scales)
        self.first, self.last = live.first[self.span], live.last[self.span]

    def parts_of(self, choice: np.ndarray) -> np.ndarray:
        """The part that an assignment takes of every shape, float64 [F]."""
        taken: np.ndarray = self.part[self.offset[:-1] + choice[self.owner]]
        return taken

    def mean_parts(self, weights: np.ndarray) -> np.ndarray:
        """The part of every shape where options are taken with weights [options]."""
        if not len(self.owner):
            return np.zeros(0)
        weighted: np.ndarray = np.add.reduceat(self.part * weights[self.option], self.offset[:-1])
        return weighted

    def profile(self, parts: np.ndarray) -> np.ndarray:
        """Memory above the least in every live set, float64 [T], from that of every shape."""
        held, sets = parts[self.shape] * self.scale, len(self.live.room)
        change = np.bincount(self.first, held, sets + 1) - np.bincount(self.last, held, sets + 1)
        return np.cumsum(change)[:sets]

    def shape_prices(self, multipliers: np.ndarray) -> np.ndarray:
        """What a part of 1 of every shape costs, where a unit of memory costs the multipliers."""
        total = np.concatenate([[0.0], np.cumsum(multipliers)])
        charged = (total[self.last] - total[self.first]) * self.scale
        return np.bincount(self.shape, charged, len(self.owner))

    def price(self, multipliers: np.ndarray) -> np.ndarray:
        """What every option pays where a unit of memory costs the multipliers [T]."""
        paid = self.part * np.repeat(self.shape_prices(multipliers), np.diff(self.offset))
        return np.bincount(self.option, paid, self._options)

    def _of_shape(self, shape: int) -> np.ndarray:
        return self.part[self.offset[shape] : self.offset[shape + 1]]

    def usages(self, index: int) -> np.ndarray:
        """The memory of every option in the layout's span ``index``, float64 [k]."""
        return self._of_shape(int(self.shape[index])) * self.scale[index]

    def in_set(self, index: int) -> np.ndarray:
        """The layout's spans that are in a live set; at most one per node."""
        return np.flatnonzero((self.first <= index) & (index < self.last))

    def amounts(self, position: int) -> np.ndarray:
        """Options of a node that hold the same all the time are one class: int [k]."""
        lo, hi = np.searchsorted(self.owner, [position, position + 1]).tolist()
        parts = np.array([self._of_shape(shape) for shape in range(lo, hi)])
        _, of_option = np.unique(parts, axis=1, return_inverse=True)
        classes: np.ndarray = of_option.reshape(-1)
        return classes
