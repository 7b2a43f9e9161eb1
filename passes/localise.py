"""The call that each rank runs in place of a whole operator.

before::   %y : f32[8, 768] = aten.view.default(%x, [8, 768])        batch split over dp=2
after::    %y : f32[8@dp, 768] = aten.view.default(%x, [4, 768])
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Rule, Strategy, local_factor_size, result_layout


def local_call(node: Node, rule: Rule, strategy: Strategy, mesh: Mesh) -> Node:
    """The node with its size arguments made local, or replaced by the assisted operator.

    Values keep their whole shapes; what a rank holds of them follows from their layouts.
    """
    split = tuple(
        (f.name, strategy.axes_of(f.name), f.size) for f in rule.factors if strategy.axes_of(f.name)
    )
    args, kwargs = list(node.args), dict(node.kwargs)
    for spelled in rule.sizes:
        where: Any = args if isinstance(spelled.argument, int) else kwargs
        if spelled.factor is not None:
            where[spelled.argument] = local_factor_size(rule, strategy, spelled.factor, mesh)
            continue
        value = node.results[spelled.result]
        layout = result_layout(rule, strategy, spelled.result, value.grad)
        where[spelled.argument] = list(layout.local_shape(value.shape, mesh))
    assisted = any(rule.by_name[name].assist for name, _, _ in split)
    if rule.always_assist or assisted:
        assert rule.assist is not None
        return replace(node, op=rule.assist, args=tuple(args), kwargs={**kwargs, "split": split})
    return replace(node, args=tuple(args), kwargs=kwargs)
