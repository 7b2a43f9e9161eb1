"""The call that each rank runs in place of a whole operator.

before::   %y : f32[8, 768] = aten.view.default(%x, [8, 768])        batch split over dp=2
after::    %y : f32[8@dp, 768] = aten.view.default(%x, [4, 768])

Where pieces are uneven, the sizes are those of the first rank, and the node says which arguments
they are (`autopar.ir.local`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.cut import is_even
from autopar.ir.graph import Node
from autopar.ir.local import LOCAL
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, SizeArgument, Strategy, local_factor_size, result_layout


def local_call(node: Node, rule: Rule, strategy: Strategy, mesh: Mesh) -> Node:
    """The node with its size arguments made local, or replaced by the assisted operator.

    Values keep their whole shapes; what a rank holds of them follows from their layouts.
    """
    split = tuple(
        (f.name, strategy.axes_of(f.name), f.size) for f in rule.factors if strategy.axes_of(f.name)
    )
    args, kwargs = list(node.args), dict(node.kwargs)
    uneven: list[tuple[Any, ...]] = []
    for spelled in rule.sizes:
        size, differs = _spelled(node, rule, strategy, mesh, spelled)
        where: Any = args if isinstance(spelled.argument, int) else kwargs
        where[spelled.argument] = size
        if differs is not None:
            uneven.append(differs)
    attrs = {**node.attrs, LOCAL: tuple(uneven)} if uneven else node.attrs
    assisted = any(rule.by_name[name].assist for name, _, _ in split)
    op = node.op
    if rule.always_assist or assisted:
        assert rule.assist is not None
        op, kwargs = rule.assist, {**kwargs, "split": split}
    return replace(node, op=op, args=tuple(args), kwargs=kwargs, attrs=attrs)


def _spelled(
    node: Node, rule: Rule, strategy: Strategy, mesh: Mesh, spelled: SizeArgument
) -> tuple[int | list[int], tuple[Any, ...] | None]:
    """What an argument spells on the first rank and, where it differs on others, what it is."""
    if spelled.factor is not None:
        whole, axes = rule.by_name[spelled.factor].size, strategy.axes_of(spelled.factor)
        size = local_factor_size(rule, strategy, spelled.factor, mesh)
        even = is_even(whole, mesh.sizes_of(axes))
        return size, None if even else (spelled.argument, whole, axes)
    value = node.results[spelled.result]
    layout = result_layout(rule, strategy, spelled.result, value.grad, mesh)
    shape = list(layout.local_shape(value.shape, mesh))
    even = layout.divides(value.shape, mesh)
    return shape, None if even else (spelled.argument, spelled.result)
