"""What the planner decides: a strategy per operator, a layout for everything that is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Strategy

#: The name under which a mesh axis' reason is kept when it holds for the whole operator.
SEARCH = "search"


@dataclass(frozen=True)
class Assignment:
    """The decisions of one plan; everything else about it is derived.

    strategies:
        call node name -> its strategy
    sources:
        source node name (parameter, buffer, constant, input) -> the layout it is held in
    relays:
        name of a value with several uses -> the layout in which it is handed to all of them
    outputs:
        the layout of each tensor output (None where the output is no tensor)
    reasons:
        call or input node name -> mesh axis -> who chose its role ("hint …", "spread from …",
        "search", …)
    """

    mesh: Mesh
    strategies: dict[str, Strategy]
    sources: dict[str, Layout]
    relays: dict[str, Layout] = field(default_factory=dict)
    outputs: tuple[Layout | None, ...] = ()
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
