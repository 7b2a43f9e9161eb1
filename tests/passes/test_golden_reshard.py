"""The steps of reshards, as text (``tests/golden/reshard``)."""

from __future__ import annotations

import re

import pytest

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.device import device_for
from autopar.passes.reshard.path import plan_reshard
from golden_support import GoldenCase, check, golden_cases

_LAYOUT = re.compile(
    r"^\[(?P<dims>[^\]]*)\](?: rep\((?P<rep>[^)]*)\))?(?: sum\((?P<sum>[^)]*)\))?$"
)


def parse_layout(text: str) -> Layout:
    """The layout that prints as `text`."""
    found = _LAYOUT.match(text.strip())
    assert found, f"not a layout: {text!r}"
    entries = [entry.strip() for entry in found["dims"].split(",") if entry.strip()]
    cuts = [entry.partition("/") for entry in entries]
    dims = [[] if axes == "-" else axes.removeprefix("@").split("+") for axes, _, _ in cuts]
    units = [int(unit or 1) for _, _, unit in cuts]
    rep, partial = ((found[group] or "").split(",") for group in ("rep", "sum"))
    return Layout.make(dims, filter(None, rep), filter(None, partial), units)


@pytest.mark.parametrize("case", golden_cases("reshard"), ids=str)
def test_reshard(case: GoldenCase, request: pytest.FixtureRequest) -> None:
    """Input: ``<shape> : <layout> -> <layout>``, shape ``8 x 4`` or ``scalar``.

    ``(no gradient)`` at the end says that no gradient flows back.
    """
    sizes = (word.split("=") for word in case.header["mesh"])
    mesh = Mesh.of({axis: int(size) for axis, size in sizes})
    (line,) = case.inputs
    grad = not line.endswith("(no gradient)")
    shape, _, ends = line.removesuffix("(no gradient)").partition(":")
    src, dst = (parse_layout(end) for end in ends.split("->"))
    steps = plan_reshard(
        src,
        dst,
        [int(size) for size in re.findall(r"\d+", shape)],
        mesh,
        device_for(case.header["device"][0], mesh),
        grad=grad,
    )
    written = [f"{step} => {step.after}" for step in steps] or ["nothing"]
    check(case, written, update=request.config.getoption("--update"))


def test_layouts_read_as_they_print() -> None:
    layout = Layout.make([["a", "b"], []], replicate=["c"], partial=["d"])
    assert parse_layout(str(layout)) == layout
    heads = Layout.make([["a", "b"], []], replicate=["c"], units=[64, 1])
    assert parse_layout(str(heads)) == heads
    assert parse_layout(str(Layout.whole(0))) == Layout.whole(0)
