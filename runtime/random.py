"""Random numbers that the ranks agree on.

Blocks of one tensor get different numbers, copies of one tensor (along axes that do not split it)
the same. A draw derives a generator of its own from three numbers: the seed, which all ranks
share; how many draws there were since it was set; and which block of the tensor this rank holds.
So no draw communicates, and the numbers do not depend on what else a rank does.

`agree_on_seed` takes a fresh seed from torch's default generators, once per step, which makes
runs reproducible from `torch.manual_seed`. Under *exact* random numbers each draw makes the whole
tensor from one generator, as a single device does, and keeps this rank's block: for comparing
with a single device, bit for bit.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from autopar.ir.cut import span
from autopar.ir.errors import TraceError
from autopar.runtime.compiling import is_compiling

if TYPE_CHECKING:
    from autopar.runtime.groups import RankContext

#: Seeds are non-negative and fit an int64.
SEED_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class RandomState:
    """Where one rank stands in its random numbers.

    seed:
        shared by all ranks
    draws:
        how many random operators ran since the seed was set
    exact:
        the generator that whole tensors are drawn from; None for the numbers of this rank's block
    traced:
        inside of `torch.compile` the seed as a tensor of the graph, int64 [1]
    """

    seed: int = 0
    draws: int = 0
    exact: torch.Generator | None = None
    traced: Tensor | None = None


@dataclass(frozen=True)
class Fill:
    """How a tensor is filled: an in-place random method of tensors, and its parameters."""

    method: str
    parameters: tuple[float, ...] = ()

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        filled: Tensor = getattr(x, self.method)(*self.parameters, generator=generator)
        return filled


@dataclass(frozen=True)
class Block:
    """Which block of a tensor this rank holds.

    whole:
        the shape of the tensor
    start, shape:
        where the block begins, and its shape
    number:
        its place among all blocks, in row-major order
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    number: int

    def of(self, x: Tensor) -> Tensor:
        """The block of a whole tensor, as a view."""
        for d, (start, size) in enumerate(zip(self.start, self.shape, strict=True)):
            x = x.narrow(d, start, size)
        return x

    def put(self, x: Tensor, background: float) -> Tensor:
        """A whole tensor that has `x` at the block's place and `background` elsewhere."""
        whole = x.new_full(self.whole, background)
        self.of(whole).copy_(x)
        return whole


@dataclass(frozen=True)
class Side:
    """One dimension of a tensor that is cut.

    size, unit:
        the whole size, and how many elements stay together (`autopar.ir.cut`)
    axes:
        the mesh axes that cut it, major first
    """

    size: int
    axes: tuple[str, ...] = ()
    unit: int = 1


def block_of(context: RankContext, sides: Sequence[Side]) -> Block:
    """The block of a tensor that a rank holds."""
    number, start, shape = 0, [], []
    for side in sides:
        count = context.mesh.axis_size(*side.axes)
        number = number * count + context.mesh.index(context.coordinates, side.axes)
        at = [context.coordinates[axis] for axis in side.axes]
        first, last = span(side.size, context.mesh.sizes_of(side.axes), at, side.unit)
        start.append(first)
        shape.append(last - first)
    return Block(tuple(side.size for side in sides), tuple(start), tuple(shape), number)


@_disable_dynamo
def draw(
    context: RankContext,
    block: Block,
    fill: Callable[[Tensor, torch.Generator], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A tensor of the block's shape; `fill(empty, generator)` fills one in place."""
    if context.random.traced is not None:
        return _draw_in_graph(context, block, fill, dtype, device)
    exact = context.random.exact
    if exact is not None:
        whole = fill(torch.empty(block.whole, dtype=dtype, device=exact.device), exact)
        return block.of(whole).clone().to(device)
    generator = next_generator(context, block.number, device)
    return fill(torch.empty(block.shape, dtype=dtype, device=device), generator)


@_disable_dynamo
def next_generator(
    context: RankContext, number: int = 0, device: torch.device | None = None
) -> torch.Generator:
    """The generator of the next draw, for block `number` of what is drawn."""
    state = context.random
    if state.exact is not None:
        return state.exact
    if state.traced is not None:
        raise TraceError(
            "torch.compile: an operator that takes a random generator as it runs (randperm, "
            "multinomial, a module kept as one operator) cannot be compiled"
        )
    context.random = replace(state, draws=state.draws + 1)
    return _generator(state.seed, state.draws, number, device or torch.device("cpu"))


def _generator(seed: int, draws: int, number: int, device: torch.device) -> torch.Generator:
    key = struct.pack("<qqq", seed, draws, number)
    mixed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return torch.Generator(device).manual_seed(mixed % SEED_LIMIT)


def _draw_in_graph(
    context: RankContext, block: Block, fill: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The draw as an operator of a compiled graph: a function of the seed and of its place."""
    state = context.random
    assert state.traced is not None
    if not isinstance(fill, Fill):
        raise TraceError(
            "torch.compile: a draw whose probabilities are a tensor (torch.bernoulli) cannot be "
            "compiled"
        )
    context.random = replace(state, draws=state.draws + 1)
    parameters = [float(p) for p in fill.parameters]
    return drawn(
        state.traced,
        [state.draws, block.number],
        list(block.shape),
        fill.method,
        parameters,
        dtype,
        device,
    )


@torch.library.custom_op("autopar_runtime::drawn", mutates_args=())
def drawn(
    seed: Tensor,
    place: Sequence[int],
    shape: Sequence[int],
    method: str,
    parameters: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What `draw` makes, for the draw and the block of `place`."""
    exact = [int(p) for p in parameters] if method == "random_" else parameters
    generator = _generator(int(seed) % SEED_LIMIT, place[0], place[1], device)
    return Fill(method, tuple(exact))(torch.empty(shape, dtype=dtype, device=device), generator)


@drawn.register_fake
def _drawn_fake(
    seed: Tensor,
    place: Sequence[int],
    shape: Sequence[int],
    method: str,
    parameters: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def agree_on_seed(context: RankContext, device: torch.device) -> None:
    """Start a step: make a seed from one number of every rank's default generator.

    A collective over the whole mesh (of one number on `device`, where the transport can send
    it). It makes no difference whether the ranks were seeded alike.
    """
    if context.random.exact is not None:
        return
    mine = torch.randint(SEED_LIMIT, (1,)).to(device)
    total = context.group(context.mesh.names).all_reduce(mine)
    if is_compiling():
        context.random = RandomState(traced=total)
        return
    context.random = RandomState(seed=int(total.item()) % SEED_LIMIT)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that PyTorch's own random operators use on a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


@dataclass(frozen=True)
class Snapshot:
    """A place in the random numbers of one rank, to come back to."""

    state: RandomState
    exact: Tensor | None


def snapshot(context: RankContext) -> Snapshot:
    exact = context.random.exact
    return Snapshot(context.random, exact.get_state() if exact else None)


@contextmanager
def replayed(context: RankContext, snap: Snapshot) -> Iterator[None]:
    """Draw again what was drawn since a snapshot (to recompute a region), then come back."""
    now = snapshot(context)
    _restore(context, snap)
    try:
        yield
    finally:
        _restore(context, now)


def _restore(context: RankContext, snap: Snapshot) -> None:
    context.random = snap.state
    if snap.state.exact is not None and snap.exact is not None:
        snap.state.exact.set_state(snap.exact)
