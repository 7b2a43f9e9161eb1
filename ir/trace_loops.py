"""Loops over the experts that were hit, as products of groups of rows.

Experts are often written as a loop whose length depends on data::

    for expert in (mask.sum((1, 2)) > 0).nonzero():
        choice, token = torch.where(mask[expert[0]])
        y = mlp(x[token], w1[expert[0]], ...) * gates[token, choice, None]
        made.index_add_(0, token, y)

While a model is traced the loop visits all experts. What it adds for one of them depends on the
rows that its own mask selects, and on nothing that the loop did before, so one call for the rows
of all experts, ordered by expert, gives the same: each product with a matrix of the expert is a
grouped product, and all else goes row by row. Those calls have fixed shapes, and rules.

Whatever is seen in the loop is known to go row by row, or the loop is not taken apart (`Unfit`,
after which its module is kept whole, see `trace_retry`). What a visit relies on is checked when
the graph runs (``autopar.checked``): an expert whose mask selects something is visited, and no
place is selected by two experts, so that there are no more rows than places.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.utils import _pytree as pytree

from autopar.ir.errors import TraceError
from autopar.ir.trace_grouped import grouped_product

#: The longest loop that is visited.
_MOST = 1024
#: Functions that treat each element by itself.
_POINTWISE = {
    *("mul", "__mul__", "__rmul__", "multiply", "add", "__add__", "__radd__", "sub", "__sub__"),
    *("__rsub__", "div", "__truediv__", "true_divide", "neg", "__neg__", "pow", "__pow__", "abs"),
    *("silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardtanh"),
    *("relu6", "square", "exp", "clamp", "to", "type_as", "float", "double", "contiguous"),
    *("gelu_new", "mish", "hardswish", "logsigmoid", "half", "bfloat16"),
}
_PRODUCTS = {F.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_RESHAPES = {"view", "reshape"}
_TURNS: set[Any] = {Tensor.t, torch.t, *(getattr(Tensor, n).__get__ for n in ("T", "mT"))}
_RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal", "poisson", "exponential")


class UnfitLoopError(TraceError):
    """A loop over hit experts does something that is not known to go row by row."""


def is_unfit_loop(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is about such a loop."""
    while error is not None:
        if isinstance(error, UnfitLoopError):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class _Step:
    """How a piece was made: a function of other pieces and of what all experts share.

    kind:
        "place" (the `number`-th index of the selected places), "product" or "call"
    """

    kind: str
    func: Any = None
    args: Any = None
    number: int = 0


@dataclass(frozen=True)
class _Entry:
    """Entry `number` of a tensor, turned round where `turned`. `made` is held to keep its id."""

    made: Tensor
    whole: Tensor
    number: int
    turned: bool = False


@dataclass
class _Visit:
    """What one visit did."""

    mask: Tensor | None = None
    size: Any = None
    weights: list[Tensor] = field(default_factory=list)
    added: list[tuple[Tensor, Tensor, _Step, _Step]] = field(default_factory=list)
    never: bool = False


class Loops:
    """The loops over hit experts of one trace; `call` runs every function."""

    def __init__(self) -> None:
        self._hits: dict[int, tuple[Tensor, Tensor]] = {}
        self._visits: list[_Visit] | None = None
        self._made: dict[int, tuple[Tensor, int]] = {}
        self._numbers: dict[int, Tensor] = {}
        self._pieces: dict[int, tuple[Tensor, _Step]] = {}
        self._entries: dict[int, _Entry] = {}
        self._left: str | None = None
        self._finishing = False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The results of a function, and what is known of them."""
        name = getattr(func, "__name__", "")
        if self._finishing:
            return func(*args, **kwargs)
        if self._visits is None:
            if name == "unbind" and id(args[0]) in self._hits:
                return self._visited(*self._hits[id(args[0])])
            self.refuse_escapes((args, kwargs))
            made = func(*args, **kwargs)
            if name == "nonzero" and not kwargs and _is_list(args[0]):
                self._hits[id(made)] = (made, args[0])
            return made
        made = self._inside(func, name, args, kwargs)
        given = {id(x) for x in _tensors((args, kwargs))}
        for x in _tensors(made):
            if id(x) not in given:
                self._made[id(x)] = (x, len(self._visits))
        return made

    def refuse_escapes(self, tree: Any) -> None:
        """Raise UnfitLoopError where something made in a loop is used outside of it."""
        tensors = _tensors(tree)
        if self._left and tensors:
            raise UnfitLoopError(self._left)
        if self._made and any(id(x) in self._made for x in tensors):
            raise UnfitLoopError("what a loop over experts makes is used after it")

    def _visited(self, hits: Tensor, condition: Tensor) -> Iterator[Tensor]:
        """Visit every expert, then make what all visits add."""
        count, device = condition.shape[0], condition.device
        self._visits = []
        self._left = "a loop over experts ends early"
        start = _counted(sys._getframe(1))
        last = None
        try:
            for number in range(count):
                self._visits.append(_Visit())
                turn = torch.tensor([number], device=device)
                self._numbers[id(turn)] = turn
                yield turn
                now = _counted(sys._getframe(1))
                if last not in (None, now) or any(now.get(k) != v for k, v in start.items()):
                    raise UnfitLoopError("a loop over experts counts its visits")
                last = now
            visits, self._left, self._finishing = self._visits, None, True
            self._finish(visits, condition)
        finally:
            self._visits, self._finishing = None, False

    # One visit.

    def _inside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        assert self._visits is not None
        visit, number = self._visits[-1], len(self._visits) - 1
        tensors = _tensors((args, kwargs))
        if any(self._made.get(id(x), (x, number + 1))[1] <= number for x in tensors):
            raise UnfitLoopError("a visit of a loop over experts uses what another one made")
        pieces = [x for x in tensors if id(x) in self._pieces]
        if name == "index_add_" and pieces:
            return self._add(visit, args, kwargs)
        sums = {_memory(total) for v in self._visits for total, *_ in v.added}
        if name != "__get__" and any(_memory(x) in sums for x in tensors):
            raise UnfitLoopError("a loop over experts reads what it adds to")
        if pieces:
            return self._piece(func, name, args, kwargs, visit)
        if _writes(name) or "out" in kwargs:
            raise UnfitLoopError(f"a loop over experts writes with {name}")
        if name.startswith(_RANDOM):
            raise UnfitLoopError("a loop over experts draws random numbers")
        if name == "__getitem__":
            return self._entry(visit, number, func, *args)
        if name == "select" and args[1:] == (0, number):
            # So does export write an entry at a number out of a tensor.
            return self._entry(visit, number, Tensor.__getitem__, args[0], number)
        made = func(*args, **kwargs)
        if (name == "where" and len(args) == 1) or kwargs == {"as_tuple": True}:
            self._select(visit, args[0], made)
        elif id(args[0] if args else None) in self._entries and _tensors(made):
            self._turn(func, args, made)
        return made

    def _entry(self, visit: _Visit, number: int, func: Any, x: Tensor, index: Any) -> Any:
        """An entry of a tensor, at the number of the expert or elsewhere."""
        own = isinstance(index, Tensor) and id(index) in self._numbers
        if own or (type(index) is int and index == number):
            if number >= x.shape[0]:
                # The loop itself would fail here, so that it never comes to this expert.
                visit.never = True
                number = 0
            one = own and index.dim() == 1
            made = func(x, slice(number, number + 1) if one else number)
            self._entries[id(made)] = _Entry(made, x, number)
            return made
        made = func(x, index)
        if id(x) in self._numbers:
            self._numbers[id(made)] = made
        return made

    def _turn(self, func: Any, args: Any, made: Any) -> None:
        entry = self._entries[id(args[0])]
        if func in _TURNS:
            self._entries[id(made)] = _Entry(made, entry.whole, entry.number, not entry.turned)

    def _select(self, visit: _Visit, mask: Tensor, made: tuple[Tensor, ...]) -> None:
        if visit.mask is not None or any(not isinstance(n, int) for n in mask.shape):
            raise UnfitLoopError("a visit of a loop over experts selects twice")
        visit.mask, visit.size = mask, made[0].shape[0]
        for k, x in enumerate(made):
            self._pieces[id(x)] = (x, _Step("place", number=k))

    def _add(self, visit: _Visit, args: Any, kwargs: Any) -> Tensor:
        """``total.index_add_(0, places, rows)``, left for the end of the loop."""
        if kwargs or len(args) != 4 or args[1] != 0 or id(args[0]) in self._pieces:
            raise UnfitLoopError("a loop over experts adds along another dimension than rows")
        steps = [self._pieces.get(id(x)) for x in args[2:]]
        if steps[0] is None or steps[1] is None or steps[0][1].kind != "place":
            raise UnfitLoopError("a loop over experts adds rows that it did not select")
        if self._row(visit, args[3]) != 0 or not torch.is_grad_enabled():
            raise UnfitLoopError("a loop over experts adds rows in a way that is not known")
        visit.added.append((args[0], args[3], steps[0][1], steps[1][1]))
        total: Tensor = args[0]
        return total

    def _piece(self, func: Any, name: str, args: Any, kwargs: Any, visit: _Visit) -> Any:
        """A function of pieces: the piece it makes."""
        others = [x for x in _tensors((args, kwargs)) if id(x) not in self._pieces]
        if any(not isinstance(n, int) for x in others for n in x.shape):
            raise UnfitLoopError("a loop over experts makes tensors as long as its pieces")
        if name == "dropout":
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            if p == 0 or not training:
                return args[0]
        made = func(*args, **kwargs)
        if not _tensors(made):
            return made
        step = _Step("call", func, self._steps((args, kwargs)))
        if not torch.is_grad_enabled():
            raise UnfitLoopError("a loop over experts computes without gradients")
        if func in _PRODUCTS and _is_product(args, kwargs, others):
            number = len(visit.weights)
            step = _Step("product", func is F.linear, self._pieces[id(args[0])][1], number)
            visit.weights.append(args[1])
            others = []
        elif name == "__getitem__":
            self._check_look_up(*args)
        elif name in _RESHAPES:
            before, after = self._row(visit, args[0]), self._row(visit, made)
            if _count(args[0].shape[:before]) != _count(made.shape[:after]) or any(
                isinstance(leaf, SymInt) for leaf in pytree.tree_leaves(args[1:])
            ):
                raise UnfitLoopError("a loop over experts reshapes rows into others")
        elif name not in _POINTWISE:
            raise UnfitLoopError(f"{name} in a loop over experts is not known to go row by row")
        if not isinstance(made, Tensor) or any(id(x) in self._made for x in others):
            raise UnfitLoopError(f"{name} in a loop over experts takes something of one expert")
        self._row(visit, made)
        self._pieces[id(made)] = (made, step)
        return made

    def _check_look_up(self, x: Tensor, index: Any) -> None:
        for item in index if isinstance(index, tuple) else (index,):
            place = self._pieces.get(id(item)) if isinstance(item, Tensor) else None
            whole = item is None or (isinstance(item, slice) and item == slice(None))
            by_place = place is not None and place[1].kind == "place"
            if id(x) in self._pieces or not (whole or by_place):
                raise UnfitLoopError("a loop over experts looks up something other than its rows")

    def _row(self, visit: _Visit, x: Tensor) -> int:
        """The dimension of a piece that counts its rows."""
        dims = [d for d, n in enumerate(x.shape) if not isinstance(n, int)]
        if len(dims) != 1 or str(x.shape[dims[0]]) != str(visit.size):
            raise UnfitLoopError("a loop over experts makes pieces of another length")
        return dims[0]

    def _steps(self, tree: Any) -> Any:
        def step(x: Any) -> Any:
            return self._pieces[id(x)][1] if id(x) in self._pieces else x

        return pytree.tree_map(step, tree)

    # All visits at once.

    def _finish(self, visits: list[_Visit], condition: Tensor) -> None:
        decided = torch.ops.autopar_trace.decided
        done = [(k, v) for k, v in enumerate(visits) if v.added and not v.never]
        if not done or any(len(v.added) != 1 for _, v in done):
            raise UnfitLoopError("a loop over experts does not add to one tensor in each visit")
        total, _, place, rows = done[0][1].added[0]
        for _, v in done:
            same = v.added[0][0] is total and _same(v.added[0][2:], (place, rows))
            forms = [[m.shape for m in one.weights] for one in (v, done[0][1])]
            if not same or forms[0] != forms[1]:
                raise UnfitLoopError("a loop over experts does something else for each of them")
        masks = torch.stack([v.mask for _, v in done if v.mask is not None]) != 0
        flat = masks.flatten(1)
        hit = torch.stack([condition[k] for k, _ in done]) != 0
        where = "a loop over the experts that were hit"
        decided((~flat.any(1) | hit).all(), True, f"{where}, which are those that select something")
        decided((flat.sum(0) <= 1).all(), True, f"{where}, of which no two select the same place")
        for k in (k for k, v in enumerate(visits) if v.never):
            decided(condition[k] == 0, True, f"{where}, which is not expert {k}")
        counts = flat.sum(1)
        numbers = torch.where(flat.any(0), flat.int().argmax(0), len(done))
        order = numbers.sort(stable=True).indices
        selected = torch.arange(order.shape[0], device=order.device) < counts.sum()
        made = _Whole(self, done, masks.shape[1:], order, counts.cumsum(0))
        source = made.run(rows)
        shape = (-1, *([1] * (source.dim() - 1)))
        source = torch.where(selected.view(shape), source, torch.zeros_like(source))
        total.index_add_(0, made.run(place), source)

    def weight(self, matrices: list[Tensor]) -> Tensor:
        """A matrix for each expert as one tensor: the one they are entries of, if there is one."""
        entries = [self._entries.get(id(m)) for m in matrices]
        first = entries[0]
        if first is not None and all(
            e is not None
            and e.number == k
            and e.turned == first.turned
            and _memory(e.whole) == _memory(first.whole)
            and e.whole.storage_offset() == first.whole.storage_offset()
            and (e.whole.shape, e.whole.stride()) == (first.whole.shape, first.whole.stride())
            for k, e in enumerate(entries)
        ):
            whole = first.whole[: len(matrices)]
            return whole.transpose(1, 2) if first.turned else whole
        return torch.stack(matrices)


@dataclass
class _Whole:
    """Runs the steps of a visit for the rows of all experts."""

    loops: Loops
    done: list[tuple[int, _Visit]]
    sizes: tuple[int, ...]
    order: Tensor
    ends: Tensor
    found: dict[int, Tensor] = field(default_factory=dict)

    def run(self, step: _Step) -> Tensor:
        if id(step) not in self.found:
            self.found[id(step)] = self._run(step)
        return self.found[id(step)]

    def _run(self, step: _Step) -> Tensor:
        if step.kind == "place":
            after = _count(self.sizes[step.number + 1 :])
            return (self.order // after) % self.sizes[step.number]
        if step.kind == "product":
            weight = self.loops.weight([v.weights[step.number] for _, v in self.done])
            grouped = grouped_product()
            if grouped is None:
                raise UnfitLoopError("there is no grouped product without transformers")
            return grouped(
                self.run(step.args), weight.transpose(1, 2) if step.func else weight, self.ends
            )
        args, kwargs = pytree.tree_map(
            lambda x: self.run(x) if isinstance(x, _Step) else x, step.args
        )
        made: Tensor = step.func(*args, **kwargs)
        return made


def _same(one: Any, other: Any) -> bool:
    """Whether two visits took the same steps on the same tensors."""
    if isinstance(one, _Step) and isinstance(other, _Step):
        kinds = (one.kind, one.func, one.number) == (other.kind, other.func, other.number)
        return kinds and _same(one.args, other.args)
    first, spec = pytree.tree_flatten(one)
    second, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(
        a is b
        if isinstance(a, Tensor) or isinstance(b, Tensor)
        else _same(a, b)
        if isinstance(a, _Step)
        else a == b
        for a, b in zip(first, second, strict=True)
    )


def _is_list(x: Tensor) -> bool:
    return x.dim() == 1 and isinstance(x.shape[0], int) and 0 < x.shape[0] <= _MOST


def _counted(frame: FrameType) -> dict[str, Any]:
    """The local variables that may count something: numbers, and how much containers hold."""
    found: dict[str, Any] = {}
    for name, item in frame.f_locals.items():
        if isinstance(item, (int, float, str)):
            found[name] = item
        elif isinstance(item, (list, dict, set)):
            found[name] = ("holds", len(item))
    return found


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")


def _is_product(args: Any, kwargs: Any, others: list[Tensor]) -> bool:
    """Whether a call is of a piece and one matrix, and of no bias."""
    biased = any(x is not None for x in (*args[2:], *kwargs.values()))
    if len(args) < 2 or biased or len(others) != 1 or others[0] is not args[1]:
        return False
    return bool(args[0].dim() == 2 and args[1].dim() == 2)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _count(sizes: Any) -> int:
    count = 1
    for n in sizes:
        count *= n
    return count
