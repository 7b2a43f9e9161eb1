"""What each reshard step does to a layout.

The compiler's own collectives are call nodes whose arguments are all positional. Each takes a
value along some axes from one of the four states to another:

================================================= =================
``autopar.all_reduce(x, axes, to)``               P -> to (I, R)
``autopar.all_gather(x, axes, dim, to)``          S -> to (I, R)
``autopar.reduce_scatter(x, axes, dim, unit)``    P -> S
``autopar.all_to_all(x, axes, src, dst, unit)``   S(src) -> S(dst)
``autopar.recut(x, axes, dim, unit)``             S -> S, other units
``autopar.slice(x, axes, dim, origin, unit)``     origin (I, R) -> S
``autopar.pad(x, axes, dim)``                     S -> P
``autopar.mask(x, axes, origin)``                 origin (I, R) -> P
``autopar.to_replicate(x, axes)``                 I -> R
``autopar.to_invariant(x, axes)``                 R -> I
================================================= =================

Axes are listed major first. Axes that leave a dimension must be its minor-most ones, and axes
that enter one become its minor-most; `recut` takes all axes of its dimension. The unit is that of
the dimension which the axes enter (`autopar.ir.cut`), and left out where it is one element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from autopar.ir.errors import LayoutError
from autopar.ir.layout import INVARIANT, PARTIAL, REPLICATE, Layout, State
from autopar.ir.mesh import Mesh

_COPIES = (INVARIANT, REPLICATE)


def _copy_state(state: Any) -> State:
    if state not in _COPIES:
        raise LayoutError(f"state must be 'I' or 'R', got {state!r}")
    return str(state)


# Operator -> a function from its arguments after `axes` to the states before and after, and the
# unit of the dimension that the axes enter.
_STATES: dict[str, Callable[..., tuple[State, State, int]]] = {
    "autopar.all_gather": lambda dim, to: (dim, _copy_state(to), 1),
    "autopar.all_reduce": lambda to: (PARTIAL, _copy_state(to), 1),
    "autopar.all_to_all": lambda src, dst, unit=1: (src, dst, unit),
    "autopar.mask": lambda origin: (_copy_state(origin), PARTIAL, 1),
    "autopar.pad": lambda dim: (dim, PARTIAL, 1),
    "autopar.recut": lambda dim, unit=1: (dim, dim, unit),
    "autopar.reduce_scatter": lambda dim, unit=1: (PARTIAL, dim, unit),
    "autopar.slice": lambda dim, origin, unit=1: (_copy_state(origin), dim, unit),
    "autopar.to_invariant": lambda: (REPLICATE, INVARIANT, 1),
    "autopar.to_replicate": lambda: (INVARIANT, REPLICATE, 1),
}

#: The reshard steps: operators that change a value's layout and nothing else.
STEPS = tuple(_STATES)


def step_layout(
    op: str,
    before: Layout,
    axes: tuple[str, ...],
    *arguments: Any,
    shape: Sequence[int],
    mesh: Mesh,
) -> Layout:
    """The layout after a step on a value of a shape that is laid out `before`.

    `arguments` are those that follow the axes. Raises LayoutError where the step does not apply:
    the axes are not in the state it starts from, they are not the minor-most of a dimension, or
    the unit does not fit the size or the axes that split the dimension already.
    """
    if not isinstance(axes, tuple) or not axes or len(set(axes)) != len(axes):
        raise LayoutError(f"{op}: axes must be a tuple of different mesh axes, got {axes!r}")
    try:
        old, new, unit = _STATES[op](*arguments)
    except TypeError:
        raise LayoutError(f"{op}: its arguments cannot be {arguments!r}") from None
    except LayoutError as error:
        raise LayoutError(f"{op}: {error}") from None
    for state in (old, new):
        if isinstance(state, str):
            continue
        if isinstance(state, bool) or not isinstance(state, int) or not 0 <= state < before.rank:
            raise LayoutError(f"{op}: no dimension {state!r} in a layout of {before.rank}")
    size = shape[new] if isinstance(new, int) else 0
    if isinstance(new, int) and (not isinstance(unit, int) or unit < 1 or size % unit):
        raise LayoutError(f"{op}: dimension {new} of size {size} has no units of {unit!r}")
    return _after(op, before, axes, old, new, unit, tuple(shape), mesh)


@lru_cache(maxsize=1 << 14)
def _after(
    op: str,
    before: Layout,
    axes: tuple[str, ...],
    old: State,
    new: State,
    unit: int,
    shape: tuple[int, ...],
    mesh: Mesh,
) -> Layout:
    """The layout after a step from one state to another; a model has few that differ."""
    for axis in axes:
        if before.state(axis) != old:
            raise LayoutError(
                f"{op}: axis {axis!r} must be in state {old!r}, it is in {before.state(axis)!r} "
                f"in {before}"
            )
    if isinstance(old, int) and before.dims[old][-len(axes) :] != axes:
        raise LayoutError(
            f"{op}: axes {axes} must be the minor-most of dimension {old}, which is split by "
            f"{before.dims[old]}"
        )
    if op == "autopar.recut" and isinstance(new, int) and before.dims[new] != axes:
        raise LayoutError(f"{op}: it takes all axes of dimension {new}, {before.dims[new]}")
    return moved(before, axes, new, unit, shape, mesh, op)


def moved(
    before: Layout,
    axes: tuple[str, ...],
    new: State,
    unit: int,
    shape: Sequence[int],
    mesh: Mesh,
    what: str = "step",
) -> Layout:
    """The layout after some axes have changed their state; into a dimension they cut in units.

    Raises LayoutError where the axes that split the dimension already cut it elsewhere than at
    the bounds of such units.
    """
    after = before
    for axis in axes:
        after = after.with_state(axis, INVARIANT)
    after = after.simplified(shape, mesh)
    if isinstance(new, str):
        for axis in axes:
            after = after.with_state(axis, new)
        return after
    if after.dims[new] and after.with_unit(new, unit).simplified(shape, mesh) != after:
        raise LayoutError(
            f"{what}: units of {unit} do not fit dimension {new} of size {shape[new]} in {after}"
        )
    for axis in axes:
        after = after.with_state(axis, new)
    return after.with_unit(new, unit).simplified(shape, mesh)
