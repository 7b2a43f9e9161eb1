"""Convolutions and pooling with a spatial dimension split over ranks.

A rank puts its neighbours' borders around its block (see `borders`) and then makes the plain call
without padding there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.rules.windows import Spread, Window, each
from autopar.runtime.borders import with_borders
from autopar.runtime.operators import operator
from autopar.runtime.splits import Split

_PLAIN: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d,
}  # fmt: skip

_Numbers = int | Sequence[int]


def _split_places(split: Split, count: int) -> list[int]:
    """The spatial dimensions that are split."""
    return [k for k in range(count) if any(name == f"t{k}" for name, _, _ in split)]


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Numbers,
    padding: _Numbers | str,
    dilation: _Numbers,
    groups: int,
    split: Split,
) -> Tensor:
    count = weight.dim() - 2
    lefts, rights = _paddings(weight, padding, dilation, count)
    for k in range(count):
        taps, step, apart = weight.shape[k - count], each(stride, k), each(dilation, k)
        borders = lefts[k], rights[k]
        if k in _split_places(split, count):
            borders = Window(0, 0, taps, step, apart, lefts[k]).borders
        x = with_borders(x, x.dim() - count + k, split, f"t{k}", step, borders)
    return _PLAIN[count](x, weight, bias, stride, 0, dilation, groups)


def _paddings(
    weight: Tensor, padding: _Numbers | str, dilation: _Numbers, count: int
) -> tuple[list[int], list[int]]:
    if padding == "valid":
        return [0] * count, [0] * count
    if padding == "same":
        totals = [each(dilation, k) * (weight.shape[k - count] - 1) for k in range(count)]
        return [t // 2 for t in totals], [t - t // 2 for t in totals]
    listed = [each(padding, k) for k in range(count)]  # type: ignore[arg-type]
    return listed, listed


def _convolve_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: _Numbers,
    padding: _Numbers,
    output_padding: _Numbers,
    groups: int,
    dilation: _Numbers,
    split: Split,
) -> Tensor:
    count = weight.dim() - 2
    places = _split_places(split, count)
    paddings = [each(padding, k) for k in range(count)]
    extra = [each(output_padding, k) for k in range(count)]
    wanted: list[tuple[int, int, int]] = []
    for k in places:
        taps, step, apart = weight.shape[k - count], each(stride, k), each(dilation, k)
        dim = x.dim() - count + k
        borders = Spread(0, 0, taps, step, apart, paddings[k]).borders
        # Where this rank's block of the result begins in what its inputs spread to.
        wanted.append((dim, borders[0] * step + paddings[k], x.shape[dim] * step))
        x = with_borders(x, dim, split, f"t{k}", 1, borders)
        paddings[k] = 0
        # Enough room behind for entries that no input reaches.
        extra[k] = step - 1
    y = _TRANSPOSED[count](x, weight, bias, stride, paddings, extra, groups, dilation)
    for dim, start, size in wanted:
        y = y.narrow(dim, start, size)
    return y


def _register() -> None:
    for count in (1, 2, 3):
        for overload in ("default", "padding"):
            _register_plain(f"conv{count}d_{overload}")
        _register_transposed(f"conv_transpose{count}d_{'default' if count == 1 else 'input'}")


def _register_plain(name: str) -> None:
    @operator(name)
    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: _Numbers = 1,
        padding: _Numbers | str = 0,
        dilation: _Numbers = 1,
        groups: int = 1,
        *,
        split: Split,
    ) -> Tensor:
        if name.endswith("_padding") and padding == 0:
            padding = "valid"
        return _convolve(x, weight, bias, stride, padding, dilation, groups, split)


def _register_transposed(name: str) -> None:
    @operator(name)
    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: _Numbers = 1,
        padding: _Numbers = 0,
        output_padding: _Numbers = 0,
        groups: int = 1,
        dilation: _Numbers = 1,
        *,
        split: Split,
    ) -> Tensor:
        return _convolve_transposed(
            x, weight, bias, stride, padding, output_padding, groups, dilation, split
        )


_register()


@operator("convolution_default")
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    split: Split,
) -> Tensor:
    """`aten.convolution`, plain or transposed."""
    if transposed:
        return _convolve_transposed(
            x, weight, bias, stride, padding, output_padding, groups, dilation, split
        )
    return _convolve(x, weight, bias, stride, padding, dilation, groups, split)


def _bordered(
    x: Tensor, count: int, window: tuple[_Numbers, _Numbers, _Numbers, _Numbers], split: Split,
    fill: float,
) -> Tensor:  # fmt: skip
    """`x` with borders where it is split, and with its padding elsewhere.

    window:
        taps, stride, padding and dilation
    """
    taps, stride, padding, dilation = window
    for k in range(count):
        left = each(padding, k)
        borders = left, left
        if k in _split_places(split, count):
            borders = Window(0, 0, each(taps, k), each(stride, k), each(dilation, k), left).borders
        dim = x.dim() - count + k
        x = with_borders(x, dim, split, f"t{k}", each(stride, k), borders, fill)
    return x


def _register_average(count: int, pool: Callable[..., Tensor]) -> None:
    @operator(f"avg_pool{count}d_default")
    def run(
        x: Tensor,
        taps: _Numbers,
        stride: _Numbers = (),
        padding: _Numbers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        split: Split,
    ) -> Tensor:
        steps = _stride(stride, taps)
        x = _bordered(x, count, (taps, steps, padding, 1), split, 0.0)
        if count == 1:
            return pool(x, taps, steps, 0)
        return pool(x, taps, steps, 0, divisor_override=divisor_override)


def _register_maximum(count: int, pool: Callable[..., Tensor]) -> None:
    @operator(f"max_pool{count}d_default")
    def run(
        x: Tensor,
        taps: _Numbers,
        stride: _Numbers = (),
        padding: _Numbers = 0,
        dilation: _Numbers = 1,
        ceil_mode: bool = False,
        *,
        split: Split,
    ) -> Tensor:
        steps = _stride(stride, taps)
        x = _bordered(x, count, (taps, steps, padding, dilation), split, -torch.inf)
        return pool(x, taps, steps, 0, dilation)


def _stride(stride: _Numbers, taps: _Numbers) -> _Numbers:
    """The stride of a pooling, which is the size of its windows if none is given."""
    return stride if isinstance(stride, int) or len(stride) else taps


for _count, _average, _maximum in (
    (1, F.avg_pool1d, F.max_pool1d), (2, F.avg_pool2d, F.max_pool2d),
    (3, F.avg_pool3d, F.max_pool3d),
):  # fmt: skip
    _register_average(_count, _average)
    _register_maximum(_count, _maximum)
