"""What each reshard step does to a layout.

The compiler's own collectives are call nodes whose arguments are all positional. Each takes a
value along some axes from one of the four states to another:

========================================== =================
``autopar.all_reduce(x, axes, to)``        P -> to (I, R)
``autopar.all_gather(x, axes, dim, to)``   S -> to (I, R)
``autopar.reduce_scatter(x, axes, dim)``   P -> S
``autopar.all_to_all(x, axes, src, dst)``  S(src) -> S(dst)
``autopar.slice(x, axes, dim, origin)``    origin (I, R) -> S
``autopar.pad(x, axes, dim)``              S -> P
``autopar.mask(x, axes, origin)``          origin (I, R) -> P
``autopar.to_replicate(x, axes)``          I -> R
``autopar.to_invariant(x, axes)``          R -> I
========================================== =================

Axes are listed major first. Axes that leave a dimension must be its minor-most ones, and axes
that enter one become its minor-most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.ir.errors import LayoutError
from autopar.ir.layout import INVARIANT, PARTIAL, REPLICATE, Layout, State

_COPIES = (INVARIANT, REPLICATE)


def _copy_state(state: Any) -> State:
    if state not in _COPIES:
        raise LayoutError(f"state must be 'I' or 'R', got {state!r}")
    return str(state)


# Operator -> a function from its arguments after `axes` to the states before and after.
_STATES: dict[str, Callable[..., tuple[State, State]]] = {
    "autopar.all_gather": lambda dim, to: (dim, _copy_state(to)),
    "autopar.all_reduce": lambda to: (PARTIAL, _copy_state(to)),
    "autopar.all_to_all": lambda src, dst: (src, dst),
    "autopar.mask": lambda origin: (_copy_state(origin), PARTIAL),
    "autopar.pad": lambda dim: (dim, PARTIAL),
    "autopar.reduce_scatter": lambda dim: (PARTIAL, dim),
    "autopar.slice": lambda dim, origin: (_copy_state(origin), dim),
    "autopar.to_invariant": lambda: (REPLICATE, INVARIANT),
    "autopar.to_replicate": lambda: (INVARIANT, REPLICATE),
}

#: The reshard steps: operators that change a value's layout and nothing else.
STEPS = tuple(_STATES)


def step_layout(op: str, before: Layout, axes: tuple[str, ...], *arguments: Any) -> Layout:
    """The layout after a step on a value laid out `before`.

    `arguments` are those that follow the axes. Raises LayoutError where the step does not apply:
    the axes are not in the state it starts from, or they are not the minor-most of a dimension.
    """
    if not isinstance(axes, tuple) or not axes or len(set(axes)) != len(axes):
        raise LayoutError(f"{op}: axes must be a tuple of different mesh axes, got {axes!r}")
    try:
        old, new = _STATES[op](*arguments)
    except TypeError:
        raise LayoutError(f"{op}: its arguments cannot be {arguments!r}") from None
    except LayoutError as error:
        raise LayoutError(f"{op}: {error}") from None
    for state in (old, new):
        if isinstance(state, str):
            continue
        if isinstance(state, bool) or not isinstance(state, int) or not 0 <= state < before.rank:
            raise LayoutError(f"{op}: no dimension {state!r} in a layout of {before.rank}")
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
    after = before
    for axis in axes:
        after = after.with_state(axis, new)
    return after
