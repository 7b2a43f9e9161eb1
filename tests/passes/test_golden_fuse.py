"""Parameters in buckets, as text (``tests/golden/fuse``): a partitioned graph, before and after."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.text import print_graph
from autopar.ir.verify import verify_graph
from autopar.passes.device import device_for
from autopar.passes.fuse import fuse
from golden_support import GoldenCase, check, golden_cases


@pytest.mark.parametrize("case", golden_cases("fuse"), ids=str)
def test_fuse(case: GoldenCase, request: pytest.FixtureRequest) -> None:
    axes = case.header["mesh"]
    mesh = Mesh.of({axis: int(size) for axis, size in (word.split("=") for word in axes)})
    graph = parse_graph("\n".join([f"mesh {' '.join(axes)}", *case.inputs]) + "\n")
    verify_graph(graph, stage="partitioned")
    fused = fuse(graph, device_for(case.header["device"][0], mesh))
    verify_graph(fused, stage="partitioned")
    written = print_graph(fused).splitlines()
    assert print_graph(parse_graph("\n".join(written) + "\n")).splitlines() == written
    check(case, written[1:], update=request.config.getoption("--update"))
    assert fuse(fused, device_for(case.header["device"][0], mesh)) == fused, "a second time"
