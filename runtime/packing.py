"""Smaller forms of what autograd keeps: bits, small integers, 8 bit floats, copies on the host.

A form is chosen by the operator that a tensor is kept for. The lossless ones keep all that its
backward reads: of a ReLU the sign, of a dropout which entries were dropped, of a max-pool the
indices in as few bytes as they need and of its input the shape (Gist, Jain et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autopar.ir.packed import BLOCK, INDICES, MASKS, SIGNS, SMALLEST, index_dtype


class Form(Protocol):
    """A tensor in another form."""

    def open(self) -> Tensor: ...


@dataclass(frozen=True)
class Like:
    """What a tensor is apart from its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Like:
        return Like(tuple(x.shape), tuple(x.stride()), x.dtype)

    def given(self, flat: Tensor) -> Tensor:
        """The tensor with values in row-major order."""
        x = flat.view(self.shape)
        if tuple(x.stride()) == self.stride:
            return x
        return torch.empty_strided(self.shape, self.stride, dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class Bits:
    """One bit for each element: zero, or `value` (None: one)."""

    packed: Tensor
    like: Like
    value: Tensor | None = None

    @staticmethod
    def of(mask: Tensor, like: Like, value: Tensor | None = None) -> Bits:
        flat = mask.reshape(-1)
        padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % 8)).view(-1, 8)
        packed = torch.zeros(padded.shape[0], dtype=torch.uint8, device=flat.device)
        for k in range(8):
            packed |= padded[:, k] << k
        return Bits(packed, like, value)

    def open(self) -> Tensor:
        bits = torch.stack([(self.packed >> k) & 1 for k in range(8)], 1).view(-1)
        found = bits[: math.prod(self.like.shape)].to(self.like.dtype)
        return self.like.given(found if self.value is None else found.mul_(self.value))


@dataclass(frozen=True)
class Narrow:
    """Integers in fewer bytes."""

    packed: Tensor
    like: Like

    def open(self) -> Tensor:
        return self.like.given(self.packed.to(self.like.dtype))


@dataclass(frozen=True)
class ShapeOnly:
    """A tensor of which only the shape is read."""

    like: Like
    device: torch.device

    def open(self) -> Tensor:
        zero = torch.zeros((), dtype=self.like.dtype, device=self.device)
        return zero.expand(self.like.shape)


#: What stands for the floats that are not finite; others are whole numbers up to `_LARGEST`.
_INFINITE = {math.inf: 127, -math.inf: -128, math.nan: -127}
_LARGEST = 126


@dataclass(frozen=True)
class Rounded:
    """Floats in 8 bits, a scale for every `BLOCK` of them: an error of 1/252 of the largest."""

    packed: Tensor
    scales: Tensor
    like: Like

    @staticmethod
    def of(x: Tensor) -> Rounded:
        count = x.numel()
        blocks = _in_blocks(x.reshape(-1))
        finite = blocks.nan_to_num(0.0, 0.0, 0.0)
        scales = torch.linalg.vector_norm(finite, math.inf, 1, keepdim=True) / _LARGEST
        # In place: what is kept small is large, and there is not the room for a copy per step.
        finite.div_(scales.clamp(min=torch.finfo(x.dtype).tiny)).round_()
        packed = finite.to(torch.int8)
        for value, code in _INFINITE.items():
            packed.masked_fill_(blocks.isnan() if math.isnan(value) else blocks == value, code)
        packed = packed.view(-1)
        return Rounded(
            packed[:count].clone() if len(packed) > count else packed, scales, Like.of(x)
        )

    def open(self) -> Tensor:
        packed = _in_blocks(self.packed)
        blocks = packed.to(self.like.dtype).mul_(self.scales)
        for value, code in _INFINITE.items():
            blocks.masked_fill_(packed == code, value)
        return self.like.given(blocks.view(-1)[: self.packed.numel()])


def _in_blocks(flat: Tensor) -> Tensor:
    """`[n]` -> `[blocks, BLOCK]`, zeros behind it; a copy only where there have to be some."""
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


@dataclass(frozen=True)
class HostCopy:
    """A copy of a storage in the host's memory, pinned where the device is another."""

    memory: Tensor
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> HostCopy:
        """Of what a tensor lies in, whole: that is what it would keep on the device."""
        storage = x.untyped_storage()
        pinned = x.device.type == "cuda"
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        copy.copy_(torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage), pinned)
        return HostCopy(copy, x.device)

    def back(self) -> torch.UntypedStorage:
        """The storage on the device."""
        if self.memory.device == self.device:
            return self.memory.untyped_storage()
        moved = self.memory.to(self.device, non_blocking=self.memory.is_pinned())
        return moved.untyped_storage()


@dataclass(frozen=True)
class OnHost:
    """A tensor that is kept on the host; those that lie in one storage share its copy."""

    copy: HostCopy
    like: Like
    offset: int

    def open(self) -> Tensor:
        made = torch.empty(0, dtype=self.like.dtype, device=self.copy.device)
        return made.set_(self.copy.back(), self.offset, self.like.shape, self.like.stride)


def lossless(op: str, plane: int) -> Callable[[Tensor], Form | None]:
    """What takes a tensor that an operator keeps into a form that its backward can do with.

    plane:
        how many elements indices of a max-pool tell apart

    It gives None for a tensor that stays as it is.
    """

    def form(x: Tensor) -> Form | None:
        if x.numel() < SMALLEST or not is_dense(x):
            return None
        if x.dtype == torch.bool:
            return Bits.of(x, Like.of(x))
        if op in INDICES:
            if x.dtype == torch.int64:
                return _narrow(x, plane)
            return ShapeOnly(Like.of(x), x.device) if x.is_contiguous() else None
        if not x.is_floating_point():
            return None
        if op in SIGNS:
            positive = x > 0 if op == "aten.leaky_relu.default" else ~(x <= 0)
            return Bits.of(positive, Like.of(x))
        if op in MASKS:
            return Bits.of(x != 0, Like.of(x), x.amax())
        return None

    return form


def eight_bit(op: str, plane: int) -> Callable[[Tensor], Form | None]:
    """As `lossless`; floats without such a form are rounded to 8 bits."""
    exact = lossless(op, plane)

    def form(x: Tensor) -> Form | None:
        found = exact(x)
        if found is None and x.is_floating_point() and x.numel() >= SMALLEST and is_dense(x):
            return Rounded.of(x)
        return found

    return form


def is_dense(x: Tensor) -> bool:
    """Whether no two elements share their place in memory."""
    return all(step or size == 1 for size, step in zip(x.shape, x.stride(), strict=True))


def _narrow(x: Tensor, count: int) -> Narrow | None:
    dtype = index_dtype(count)
    return None if dtype is None else Narrow(x.reshape(-1).to(dtype), Like.of(x))
