"""Gradients that are still on their way when autograd has gone on: how they reach the parameters.

The backward of a bucket may start its collective and return nothing, so that the rest of the
backward pass runs beside it. When the pass ends (a final callback of autograd's engine) all
buckets are waited for, each gradient is added to the `.grad` of its parameter, and a second, empty
pass calls what hooks that.

That is only done where nothing can tell the difference (`receivers`). Where a gradient is
returned (`torch.autograd.grad`), differentiated again or seen by a hook, the bucket waits for its
collective and returns the gradients, as any operator does.

`.grad` may also hold *terms*: the gradients of micro-batches that are not summed over the data
ranks yet. They are kept as a `DTensor` in state Partial, so whoever reads one gets the right sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from autopar.runtime.flat import Landings
from autopar.runtime.local_parameter import collect, is_hooked, way_to_leaf


@dataclass(frozen=True)
class Leg:
    """A part of the way of many tensors.

    start:
        sets them off
    sent:
        whether that starts a collective; otherwise they are there at once
    shrinks:
        whether less arrives than is held on the way
    """

    start: Callable[[list[Tensor]], Landings]
    sent: bool = True
    shrinks: bool = False


class Journey:
    """Tensors that pass through collectives one after the other; the first has been started.

    What arrives is in memory of its own: a collective makes it, and where none is needed a slice
    of what came in, which is a copy.
    """

    def __init__(self, xs: Sequence[Tensor], legs: Sequence[Leg]) -> None:
        here = list(xs)
        self._landing: Landings = lambda: here
        self._legs = list(legs)
        self._shrinks = False
        self.advance()

    def advance(self) -> bool:
        """Wait for the collective under way and start the next one; False where none is left."""
        while self._legs:
            leg = self._legs.pop(0)
            self._landing = leg.start(self._landing())
            if leg.sent:
                self._shrinks = leg.shrinks
                return True
        return False

    @property
    def _goes_on(self) -> bool:
        """Whether another collective follows the one under way."""
        return any(leg.sent for leg in self._legs)

    @property
    def moves(self) -> bool:
        """Whether it has something to do before the end (`move`)."""
        return self._shrinks or self._goes_on

    def move(self) -> None:
        """Start the next collective; wait for the last one where that sets memory free."""
        if self._goes_on:
            self.advance()
        if self._shrinks and not self._goes_on:
            here, self._shrinks = self.finish(), False
            self._landing = lambda: here

    def finish(self) -> list[Tensor]:
        """Wait for the last collective."""
        while self.advance():
            pass
        return self._landing()


@dataclass(frozen=True)
class Receiver:
    """Where the gradient of one input of a bucket goes.

    leaf:
        the parameter, which is the input or that of which it is the local tensor
    wanted:
        whether this backward pass collects its gradient
    """

    leaf: Tensor
    wanted: bool


def receivers(node: Any) -> list[Receiver | None] | None:
    """Where the gradients of a node's inputs go, None for an input without gradient.

    None altogether where they have to be there when the node's backward returns: an input does not
    come straight from a parameter, the pass returns gradients instead of adding them to `.grad`
    (`torch.autograd.grad`), is differentiated itself (`create_graph`), or a hook waits for one.
    """
    if torch.is_grad_enabled():
        return None
    found: list[Receiver | None] = []
    for edge, output in node.next_functions:
        if edge is None:
            found.append(None)
            continue
        way, leaf = way_to_leaf(edge, output)
        if leaf is None or is_hooked(leaf):
            return None
        try:
            wanted = all(map(torch._C._will_engine_execute_node, way))
        except RuntimeError:  # the pass captures this leaf's gradient
            return None
        found.append(Receiver(leaf, wanted))
    return found


class Delivery:
    """The journeys of one backward pass."""

    def __init__(self) -> None:
        self._journeys: list[tuple[Journey, Sequence[Receiver], KeepTerms | None]] = []
        self._moving: list[Journey] = []

    @staticmethod
    def of_this_pass() -> Delivery:
        """The one of the backward pass that runs in this thread; its end is provided for."""
        task = torch._C._current_graph_task_id()
        delivery = _deliveries.get(task)
        if delivery is None:
            delivery = _deliveries[task] = Delivery()
            # The engine holds the callback, and so the delivery, until the pass ends or fails.
            torch.autograd.Variable._execution_engine.queue_callback(delivery.complete)
        return delivery

    def make_way(self) -> None:
        """Before another bucket sets off: those that were taken in go on to their next collective.

        On every rank in the same order, whatever has arrived where. Those on their last one that
        are whole on the way are waited for: FSDP is there so that only those of one bucket are.
        """
        for earlier in self._moving:
            earlier.move()
        self._moving = [journey for journey in self._moving if journey.moves]

    def add(self, journey: Journey, to: Sequence[Receiver], keep: KeepTerms | None = None) -> None:
        """Take in gradients for these receivers; `keep`: they arrive as terms, and stay so."""
        self._journeys.append((journey, to, keep))
        if journey.moves:
            self._moving.append(journey)

    def complete(self) -> None:
        """Wait for everything and hand it out."""
        under_way, self._moving = self._moving, []
        while under_way:
            under_way = [journey for journey in under_way if journey.advance()]
        leaves: list[Tensor] = []
        with torch.no_grad():
            while self._journeys:
                journey, to, keep = self._journeys.pop(0)
                if keep is not None:
                    keep(to, journey.finish())
                    continue
                for receiver, grad in zip(to, journey.finish(), strict=True):
                    collect(receiver.leaf, grad)
                    leaves.append(receiver.leaf)
        if leaves:
            with torch.enable_grad():
                token = _Delivered.apply(*leaves)
            torch.autograd.backward(token)


_deliveries: WeakValueDictionary[int, Delivery] = WeakValueDictionary()


class _Delivered(torch.autograd.Function):
    """A node whose backward gives its inputs nothing: they have their gradients.

    Hooks of the nodes that add to `.grad` are so called when there is something to see.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        # A plain real number, whatever the parameters are: a backward pass starts from those.
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


# --- terms ---------------------------------------------------------------------------------------


def take_terms(leaf: Tensor, axes: Sequence[str]) -> Tensor | None:
    """This rank's term of what `.grad` holds in state Partial along the axes, which it leaves."""
    grad = leaf.grad
    if not isinstance(grad, DTensor) or not isinstance(leaf, DTensor):
        return None
    if list(grad.placements) != _partial(leaf, axes):
        return None
    leaf.grad = None
    return grad._local_tensor


@dataclass(frozen=True)
class KeepTerms:
    """Adds terms to what `.grad` holds, which is in state Partial along `axes` from then on.

    first:
        whether this rank is the first along the axes: it keeps what was summed before
    """

    axes: tuple[str, ...]
    first: bool

    def __call__(self, to: Sequence[Receiver], terms: Sequence[Tensor]) -> None:
        for receiver, term in zip(to, terms, strict=True):
            assert isinstance(receiver.leaf, DTensor)
            _keep_term(receiver.leaf, term, self.axes, self.first)


def _keep_term(leaf: DTensor, term: Tensor, axes: Sequence[str], first: bool) -> None:
    old = take_terms(leaf, axes)
    if old is not None:
        term = old.add_(term)
    else:
        # Autograd may hold what it hands to a node in other places, too.
        term = term.clone(memory_format=torch.contiguous_format)
        if isinstance(leaf.grad, DTensor):
            summed = leaf.grad.redistribute(leaf.device_mesh, leaf.placements).to_local()
            term += summed if first else 0
        leaf.grad = None
    leaf.grad = DTensor.from_local(
        term,
        leaf.device_mesh,
        _partial(leaf, axes),
        run_check=False,
        shape=leaf.shape,
        stride=leaf.stride(),
    )


def _partial(leaf: DTensor, axes: Sequence[str]) -> list[Placement]:
    names = leaf.device_mesh.mesh_dim_names or ()
    return [
        Partial() if name in axes else placement
        for name, placement in zip(names, leaf.placements, strict=True)
    ]
