"""How long the tensors of an unpartitioned graph live, whatever layouts they will have.

The step is run through with a possible copy wherever a layout may change: between the call that
makes a value, its relay (`build`), and each use. Such places are *slots*; one storage may be seen
from several of them, a view's among them, and each slot will have its own layout::

    made %h ── handed %h ─┬─ read by linear ...          a tree; its edges are reshards,
                          └─ read by view ── made %v ..  or nothing where a view is made

A reshard makes a new tensor or none, which only layouts decide. So a storage is *carried* by the
deepest slot from which all that still needs it can be reached, in that slot's layout, and every
reshard below that slot holds a *copy*, if it makes one. Where nothing branches that is exact.

Gradients are followed in the same way through the backward pass, summed as autograd does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir.graph import Graph, Node, Value
from autopar.passes.memory.effects import Effects
from autopar.passes.memory.saved import Resolve, Spec

Interval = tuple[int, int]
#: Which operands of a call, on tensors of these kinds, may be kept under some strategies only.
AlsoSaved = Callable[[Node, Sequence[Spec]], Iterable[int]]


class Slot(NamedTuple):
    """Where a tensor stands.

    kind:
        "made" by a node, "handed" to its uses, "read" by a call, "returned" as an output, or
        "updated": a buffer's new value
    name:
        of the node; of the value where it is handed; of the buffer
    number:
        which result, operand or output it is
    """

    kind: str
    name: str
    number: int = 0


@dataclass(frozen=True)
class Carried:
    """A storage over the time in which a slot carries it.

    nbytes:
        of the whole storage
    dims:
        the dimensions along which it has memory of its own (not the expanded ones)
    grad:
        whether it holds a gradient
    """

    slot: Slot
    nbytes: int
    dims: tuple[int, ...]
    interval: Interval
    grad: bool


@dataclass(frozen=True)
class Copied:
    """A copy that a reshard leaves, if it makes one: of the value, or backward of its gradient.

    slot:
        where the reshard goes to: "handed", "read", "returned" or "updated"
    """

    slot: Slot
    interval: Interval
    grad: bool


@dataclass
class _Seen:
    """A storage as it is seen from one slot.

    parent, reshard:
        from where it comes, and the slot whose reshard lies between (None for a view)
    birth, needed:
        since when, and until when something needs it here (end excluded)
    nbytes, dims:
        of the storage where it begins; further on of what is seen from there
    """

    slot: Slot
    parent: _Seen | None
    reshard: Slot | None
    birth: int
    needed: int
    nbytes: int
    dims: tuple[int, ...]
    root: _Seen = field(init=False)
    children: list[_Seen] = field(default_factory=list)
    #: Until when anything needs it here or further on.
    last: int = 0
    #: Of a root, gradients only: how many values have it as their gradient for now.
    pending: int = 0

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root
        if self.parent is not None:
            self.parent.children.append(self)


@dataclass
class _Gradient:
    """The gradient at a slot as far as it has been summed."""

    seen: _Seen
    spec: Spec


class Lifetimes:
    """Who holds what, and when.

    end:
        the position of the optimizer's step; forward and backward have the ones before it, a
        backward the mirrored ones: `mirrored`
    calls:
        call -> the position at which it runs forward
    reshards:
        "handed", "read", "returned" or "updated" slot -> (where it comes from, the position)
    saved:
        call -> the operands (by index) and what else autograd keeps for it (`saved.Forward`)
    returning:
        the slots whose reshard a gradient goes back through
    alone:
        (slot, whether backward) of reshards from what nothing else needs any more
    carried, copied:
        what is held; sources are carried by themselves
    """

    def __init__(
        self,
        graph: Graph,
        resolve: Resolve,
        relayed: Container[str],
        also_saved: AlsoSaved = lambda node, operands: (),
    ) -> None:
        """`relayed`: the values that have a relay."""
        self.graph, self.also_saved = graph, also_saved
        self.effects = Effects(graph, resolve)
        self.relayed = relayed
        self.calls: dict[str, int] = {}
        self.reshards: dict[Slot, tuple[Slot, int]] = {}
        self._count = 0
        self._order: list[Slot | Node] = []
        self._seen: list[_Seen] = []
        self.saved: dict[str, frozenset[int]] = {}
        self.returning: set[Slot] = set()
        self.alone: set[tuple[Slot, bool]] = set()
        self._made: dict[str, _Seen] = {}
        self._handed: dict[str, _Seen] = {}
        self._place()
        self.end = 2 * self._count
        self._forward()
        forward = len(self._seen)
        self._backward()
        self.carried: list[Carried] = []
        self.copied: list[Copied] = []
        self._carry(self._seen[:forward], grad=False)
        self._carry(self._seen[forward:], grad=True)

    def mirrored(self, position: int) -> int:
        """When what runs forward at a position runs backward."""
        return self.end - 1 - position

    def stored_dims(self, value: Value) -> tuple[int, ...]:
        """The dimensions along which a value has memory of its own (not the expanded ones)."""
        return _stored(self.effects.spec(value))

    # -- positions ----------------------------------------------------------------------------

    def _place(self) -> None:
        """A position for every call, and before it one for each reshard that it may ask for."""
        for node in self.graph.calls:
            for k, value in enumerate(node.operands):
                self._reshard(value, Slot("read", node.name, k))
            self.calls[node.name] = self._next(node)
        for k, output in enumerate(self.graph.outputs):
            if isinstance(output, Value):
                self._reshard(output, Slot("returned", "", k))
        for name, value in self.graph.updates:
            self._reshard(value, Slot("updated", name))

    def _reshard(self, value: Value, to: Slot) -> None:
        node, result = self.graph.producers[value.name]
        made = Slot("made", node.name, result)
        if value.name in self.relayed:
            handed = Slot("handed", value.name)
            if handed not in self.reshards:
                self.reshards[handed] = made, self._next(handed)
            made = handed
        self.reshards[to] = made, self._next(to)

    def _next(self, what: Slot | Node) -> int:
        self._order.append(what)
        self._count += 1
        return self._count - 1

    # -- forward ------------------------------------------------------------------------------

    def _see(
        self,
        slot: Slot,
        birth: int,
        needed: int,
        *,
        parent: _Seen | None = None,
        reshard: Slot | None = None,
        nbytes: int = 0,
        dims: tuple[int, ...] = (),
    ) -> _Seen:
        seen = _Seen(slot, parent, reshard, birth, needed, nbytes, dims)
        self._seen.append(seen)
        return seen

    def _forward(self) -> None:
        for node in self.graph.nodes:
            if node.is_source:
                (value,) = node.results
                slot = Slot("made", node.name)
                self._made[value.name] = self._see(
                    slot, 0, self.end + 1, nbytes=value.nbytes, dims=self.stored_dims(value)
                )
            else:
                self._call(node)
        for k, output in enumerate(self.graph.outputs):
            if isinstance(output, Value):
                self._read(output, Slot("returned", "", k), self.end + 1)
        for name, value in self.graph.updates:
            self._read(value, Slot("updated", name), self._count)

    def _call(self, node: Node) -> None:
        effect = self.effects.forward(node)
        own = [self.effects.spec(value) for value in node.operands]
        self.saved[node.name] = effect.saved
        saved = effect.saved | set(self.also_saved(node, own))
        at = self.calls[node.name]
        back = self.mirrored(at) + 1
        operands = [
            self._read(value, Slot("read", node.name, k), back if k in saved else at + 1)
            for k, value in enumerate(node.operands)
        ]
        made: dict[int, _Seen] = {}
        for k, (value, home) in enumerate(zip(node.results, effect.homes, strict=True)):
            slot = Slot("made", node.name, k)
            needed = back if home in effect.saved and home not in made else at + 1
            if home < len(operands):
                seen = self._view(slot, at, value, operands[home])
            elif home in made:
                seen = self._view(slot, at, value, made[home])
            else:
                nbytes = effect.fresh[home - len(operands)]
                seen = self._see(slot, at, needed, nbytes=nbytes, dims=self.stored_dims(value))
                made[home] = seen
            self._made[value.name] = seen

    def _view(self, slot: Slot, at: int, value: Value, parent: _Seen) -> _Seen:
        dims = self.stored_dims(value)
        nbytes = math.prod(value.shape[d] for d in dims) * value.dtype.itemsize
        return self._see(slot, at, at + 1, parent=parent, nbytes=nbytes, dims=dims)

    def _read(self, value: Value, slot: Slot, needed: int) -> _Seen:
        """One use of a value, through its relay where it has one."""
        parent = self._made[value.name]
        dims = self.stored_dims(value)
        if value.name in self.relayed:
            if value.name not in self._handed:
                handed = Slot("handed", value.name)
                at = self.reshards[handed][1]
                self._handed[value.name] = self._see(
                    handed, at, at + 1, parent=parent, reshard=handed, dims=dims
                )
            parent = self._handed[value.name]
        at = self.reshards[slot][1]
        return self._see(slot, at, needed, parent=parent, reshard=slot, dims=dims)

    # -- backward -----------------------------------------------------------------------------

    def _backward(self) -> None:
        gradients: dict[Slot, _Gradient] = {}
        self._seed(gradients)
        for position in reversed(range(self._count)):
            what = self._order[position]
            if isinstance(what, Node):
                self._back_through(what, gradients)
            elif what in gradients:
                self._pass_back(what, gradients)

    def _seed(self, gradients: dict[Slot, _Gradient]) -> None:
        """The gradients that the training loop hands in."""
        outputs = [
            (k, v) for k, v in enumerate(self.graph.outputs) if isinstance(v, Value) and v.grad
        ]
        scalars = [(k, v) for k, v in outputs if v.numel == 1]
        for k, value in scalars or outputs:
            slot = Slot("returned", "", k)
            spec = Spec.contiguous(value.shape, value.dtype)
            gradients[slot] = self._fresh(slot, self._count, spec)

    def _fresh(self, slot: Slot, birth: int, spec: Spec) -> _Gradient:
        seen = self._see(slot, birth, birth + 1, nbytes=spec.nbytes, dims=_stored(spec))
        seen.pending = 1
        return _Gradient(seen, spec)

    def _back_through(self, node: Node, gradients: dict[Slot, _Gradient]) -> None:
        """Run the backward of a call: its operands get their gradients."""
        slots = [Slot("made", node.name, k) for k in range(len(node.results))]
        incoming = [gradients.pop(slot, None) for slot in slots]
        if not any(incoming):
            return
        at = self.mirrored(self.calls[node.name])
        effect = self.effects.backward(node, tuple(g.spec if g else None for g in incoming))
        storages: dict[int, _Seen] = {k: g.seen for k, g in enumerate(incoming) if g is not None}
        first = len(incoming) + len(node.operands)
        for k, (spec, home) in enumerate(zip(effect.grads, effect.homes, strict=True)):
            if spec is None:
                continue
            slot = Slot("read", node.name, k)
            if home in storages:
                dims, nbytes = _stored(spec), spec.nbytes
                parent = storages[home]
                seen = self._see(slot, at, at + 1, parent=parent, nbytes=nbytes, dims=dims)
                seen.root.pending += 1
                gradients[slot] = _Gradient(seen, spec)
                continue
            gradients[slot] = self._fresh(slot, at, spec)
            if home >= first:
                gradients[slot].seen.nbytes = effect.fresh[home - first]
                storages[home] = gradients[slot].seen
        for gradient in incoming:
            if gradient is not None:
                gradient.seen.needed = at + 1
                gradient.seen.root.pending -= 1

    def _pass_back(self, slot: Slot, gradients: dict[Slot, _Gradient]) -> None:
        """Through the reshard that led to a slot: one more term for where it comes from."""
        gradient = gradients.pop(slot)
        self.returning.add(slot)
        target, position = self.reshards[slot]
        at = self.mirrored(position)
        gradient.seen.needed = at + 1
        gradient.seen.root.pending -= 1
        known = gradients.get(target)
        if known is None:
            dims = gradient.seen.dims
            seen = self._see(target, at, at + 1, parent=gradient.seen, reshard=slot, dims=dims)
            seen.root.pending += 1
            gradients[target] = _Gradient(seen, gradient.spec)
        elif known.seen.root.pending > 1 or known.spec.nbytes != known.seen.root.nbytes:
            # Others hold it as well: the sum is a new tensor.
            known.seen.needed = at + 1
            known.seen.root.pending -= 1
            gradients[target] = self._fresh(target, at, _whole(gradient.spec))
        known = gradients[target]
        known.seen.needed = max(known.seen.needed, at + 1)
        if target.kind == "made":
            self._settle(target, at, gradients)

    def _settle(self, target: Slot, at: int, gradients: dict[Slot, _Gradient]) -> None:
        """The gradient of a source is kept; a parameter's is copied where others hold it too."""
        node, _ = self.graph.producers[target.name]
        if not node.is_source:
            return
        known = gradients[target]
        if node.op != "param":
            known.seen.needed = self.end + 1
        elif known.seen.root.pending > 1 or known.spec.nbytes != known.seen.root.nbytes:
            known.seen.root.pending -= 1
            known = gradients[target] = self._fresh(target, at, _whole(known.spec))
        known.seen.needed = self.end + 1

    # -- who carries --------------------------------------------------------------------------

    def _carry(self, seen: list[_Seen], *, grad: bool) -> None:
        for one in reversed(seen):
            one.last = max([one.needed, *(child.last for child in one.children)])
        arrived: dict[int, int] = {}
        for one in seen:
            if one.parent is None:
                self._descend(one, one.birth, one.nbytes, arrived, grad)
        for one in seen:
            if one.reshard is not None:
                if arrived.get(id(one)) == one.birth + 1:
                    self.alone.add((one.reshard, grad))
                interval = one.birth + 1, min(one.last, arrived.get(id(one), one.last))
                if interval[0] < interval[1]:
                    self.copied.append(Copied(one.reshard, interval, grad))

    def _descend(
        self, at: _Seen, since: int, nbytes: int, arrived: dict[int, int], grad: bool
    ) -> None:
        """Who carries a storage from a slot on that has all that needs it behind it."""
        following: list[_Seen] = []
        until = at.last
        needed = sorted(at.children, key=lambda child: child.last)
        if needed and needed[-1].last > at.needed:
            alone = max([at.needed, needed[-1].birth + 1, *(c.last for c in needed[-2:-1])])
            parts = [child for child in needed if child.last > at.needed]
            if len(parts) > 1 and _are_parts(parts, nbytes):
                following, until = parts, max(at.needed, since)
            elif alone < at.last:
                following, until = needed[-1:], max(alone, since)
        if since < until:
            self.carried.append(Carried(at.slot, nbytes, at.dims, (since, until), grad))
        for child in following:
            arrived[id(child)] = until
            own = child.nbytes if len(following) > 1 else nbytes
            self._descend(child, until, own, arrived, grad)


def _are_parts(views: list[_Seen], nbytes: int) -> bool:
    """Whether views show different parts of a storage: each may as well be kept by itself."""
    return all(v.reshard is None for v in views) and sum(v.nbytes for v in views) <= nbytes


def _whole(spec: Spec) -> Spec:
    return Spec.contiguous(spec.shape, spec.dtype)


def _stored(spec: Spec) -> tuple[int, ...]:
    return tuple(
        d for d, (n, step) in enumerate(zip(spec.shape, spec.stride, strict=True)) if step or n == 1
    )
