"""Device descriptions: presets, which link an axis uses, saving and loading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from autopar.ir.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.passes.collective_cost import collective_line, collective_time
from autopar.passes.device import (
    COLLECTIVES,
    Link,
    Measure,
    bytes_moved,
    device_for,
)
from autopar.passes.device_file import load_device, save_device
from autopar.passes.device_presets import preset

PRESETS = ("h100", "h200", "a100", "cpu")
MB = 2**20


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_survive_saving(name: str, tmp_path: Path) -> None:
    mesh = Mesh.of({"dp": 2})
    device = device_for(name, mesh)
    assert device.name == name
    path = tmp_path / "device.json"
    save_device(device, path)
    assert load_device(path) == device
    assert device_for(str(path), mesh) == device
    assert device_for(path, mesh, {"dp": "inter"}).link_of("dp", mesh).name == "inter"
    assert [p.name for p in tmp_path.iterdir()] == ["device.json"]


def test_a_device_is_taken_as_it_is() -> None:
    device = replace(device_for("h100", Mesh.of(2)), launch=1.0)
    assert device_for(device, Mesh.of(4)) is device


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "device.json"
    device = device_for("h100", Mesh.of(2))
    save_device(device, path)

    def refuse(source: str, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        save_device(replace(device, launch=1.0), path)
    assert load_device(path) == device
    assert [p.name for p in tmp_path.iterdir()] == ["device.json"]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp": 4, "tp": 8}, {"dp": "inter", "tp": "intra"}),
        ({"dp": 2, "tp": 4}, {"dp": "intra", "tp": "intra"}),
        ({"pp": 4, "dp": 2, "tp": 4}, {"pp": "inter", "dp": "intra", "tp": "intra"}),
        ({"dp": 16}, {"dp": "inter"}),
        # Groups of 6 would straddle hosts of 8; alone on one host they do not.
        ({"dp": 4, "tp": 6}, {"dp": "inter", "tp": "inter"}),
        ({"tp": 6}, {"tp": "intra"}),
    ],
)
def test_an_axis_within_a_host_uses_its_fast_link(
    sizes: dict[str, int], expected: dict[str, str]
) -> None:
    mesh = Mesh.of(sizes)
    device = device_for("h100", mesh)
    assert {axis: device.link_of(axis, mesh).name for axis in mesh.names} == expected


def test_the_user_may_name_the_link_of_an_axis() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 4})
    device = device_for("h100", mesh, {"dp": "inter"})
    assert [device.link_of(axis, mesh).name for axis in mesh.names] == ["inter", "intra"]


def test_h100_figures_are_those_of_its_sources() -> None:
    # The fitted tables speak of the whole tensor: 1 GB all-reduced by 8 at 267 GB/s and 31 us.
    mesh = Mesh.of({"tp": 8})
    device = device_for("h100", mesh)
    seconds = collective_time(device, mesh, "all_reduce", ("tp",), 1e9)
    assert seconds == pytest.approx(31e-6 + 1 / 267)
    seconds = collective_time(device, mesh, "all_gather", ("tp",), 1e9)
    assert seconds == pytest.approx(30e-6 + 1 / 394)
    assert device.flop_rate(torch.bfloat16) == pytest.approx(0.7 * 989e12)
    assert device.flop_rate(torch.int64) == device.flop_rate(torch.float32)


def test_cpu_figures_are_the_measured_ones() -> None:
    # 8 MB over gloo; an all-to-all of 8 MB on each of two ranks works on 16 MB together.
    mesh = Mesh.of({"dp": 2})
    device = device_for("cpu", mesh)
    measured = {"all_reduce": 6.3, "all_gather": 8.6, "reduce_scatter": 3.8}
    for kind, milliseconds in measured.items():
        line = collective_line(device, mesh, kind, ("dp",))
        assert line.per_byte * 8e6 == pytest.approx(milliseconds * 1e-3)
    line = collective_line(device, mesh, "all_to_all", ("dp",))
    assert line.per_byte * 16e6 == pytest.approx(2.6e-3)


def test_bytes_moved_by_one_rank() -> None:
    assert bytes_moved("all_reduce", 4) == 2 * 3 / 4
    assert bytes_moved("all_gather", 4) == bytes_moved("reduce_scatter", 4) == 3 / 4
    assert bytes_moved("all_to_all", 4) == 3 / 4 / 4


def test_several_axes_wait_for_every_link_and_move_at_the_slowest() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 8})
    device = device_for("h100", mesh)
    both = collective_line(device, mesh, "all_gather", ("dp", "tp"))
    parts = [collective_line(device, mesh, "all_gather", (axis,)) for axis in mesh.names]
    assert both.latency == pytest.approx(sum(p.latency for p in parts))
    assert both.per_byte == pytest.approx(31 / 32 / 50e9)
    one_host = Mesh.of({"dp": 2, "tp": 4})
    both = collective_line(device, one_host, "all_gather", ("dp", "tp"))
    assert both == collective_line(device, Mesh.of({"tp": 8}), "all_gather", ("tp",))


def test_a_group_of_one_is_free() -> None:
    mesh = Mesh.of({"dp": 1, "tp": 2})
    device = device_for("h100", mesh)
    for kind in COLLECTIVES:
        assert collective_time(device, mesh, kind, ("dp",), MB) == 0
        assert collective_time(device, mesh, kind, (), MB) == 0
        alone = collective_time(device, mesh, kind, ("tp",), MB)
        assert collective_time(device, mesh, kind, ("dp", "tp"), MB) == alone


def test_computing_waits_for_the_last_rank_and_gradients_do_not() -> None:
    mesh, alone = Mesh.of({"tp": 2}), Mesh.of({"tp": 1})
    together = device_for("h100", mesh)
    device = replace(together, skew=1e-3)
    for kind in COLLECTIVES:
        before = collective_time(together, mesh, kind, ("tp",), MB)
        assert collective_time(device, mesh, kind, ("tp",), MB) == pytest.approx(before + 1e-3)
        on_its_way = collective_line(device, mesh, kind, ("tp",))
        assert on_its_way == collective_line(together, mesh, kind, ("tp",))
        assert collective_time(device, alone, kind, ("tp",), MB) == 0


def link(*measures: Measure) -> Link:
    return Link("lan", tuple((kind, measures) for kind in COLLECTIVES))


def test_constants_between_two_group_sizes_are_interpolated() -> None:
    lan = link(Measure(2, 1.0, 10.0), Measure(8, 3.0, 20.0))
    assert lan.at("all_reduce", 4) == Measure(4, 2.0, 15.0)
    assert lan.at("all_reduce", 2) == Measure(2, 1.0, 10.0)
    assert lan.at("all_reduce", 64) == Measure(64, 3.0, 20.0)


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ((), "group sizes of all_reduce must grow from 2 on, got \\[\\]"),
        ((Measure(4, 0, 1), Measure(2, 0, 1)), "must grow from 2 on, got \\[4, 2\\]"),
        ((Measure(1, 0, 1),), "must grow from 2 on, got \\[1\\]"),
        ((Measure(2, 0, 0),), "a bandwidth above 0 B/s"),
    ],
)
def test_refuses_measures_that_cannot_be(measures: tuple[Measure, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        link(*measures)


def test_refuses_a_link_without_all_collectives() -> None:
    with pytest.raises(PlanError, match="link 'lan': no measures of all_gather, all_to_all, red"):
        Link("lan", (("all_reduce", (Measure(2, 0, 1),)),))


def test_refuses_unknown_names() -> None:
    mesh = Mesh.of({"dp": 2})
    with pytest.raises(PlanError, match="device 'b200': unknown; expected h100, h200, a100, cpu"):
        device_for("b200", mesh)
    with pytest.raises(PlanError, match=r"links: unknown mesh axis 'tp': the mesh is \{dp=2\}"):
        device_for("h100", mesh, {"tp": "inter"})
    with pytest.raises(PlanError, match="device 'h100': unknown link 'wifi'"):
        device_for("h100", mesh, {"dp": "wifi"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x"}', "null"])
def test_refuses_a_file_that_is_no_device(text: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"device\.json': not a device description"):
        load_device(path)


def _edited(tmp_path: Path, **fields: object) -> Path:
    """The file of a preset with some fields changed, or without those that are None."""
    path = tmp_path / "device.json"
    save_device(device_for("h100", Mesh.of(2)), path)
    data = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return path


MEASURES = {kind: [[2, 1e-5, 1e9]] for kind in COLLECTIVES}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"autopar_device": 1}, "version 1, this autopar reads version 4"),
        ({"autopar_device": "new"}, "version 'new'"),
        ({"links": {"intra": MEASURES}}, "unknown link 'inter': the links are \\['intra'\\]"),
        ({"links": {"intra": MEASURES, "inter": {}}}, "link 'inter': no measures of all_gather"),
        (
            {"links": {"intra": MEASURES, "inter": {**MEASURES, "all_reduce": [[2, 0, -1]]}}},
            "link 'inter': all_reduce needs .* a bandwidth above 0",
        ),
        (
            {"links": {"intra": MEASURES, "inter": {**MEASURES, "all_reduce": [[2, -1, 1]]}}},
            "link 'inter': all_reduce needs a latency of at least 0 s",
        ),
        (
            {"links": {"intra": MEASURES, "inter": {**MEASURES, "all_reduce": [[2, 1]]}}},
            "'links.inter.all_reduce' must hold rows of 3",
        ),
        ({"axis_links": {"dp": "wifi"}}, "unknown link 'wifi'"),
        ({"memory_bandwidth": -1e9}, "memory_bandwidth must be above 0"),
        ({"memory_bandwidth": "fast"}, "'memory_bandwidth' must be a number, got 'fast'"),
        ({"memory_bandwidth": None}, "the field 'memory_bandwidth' is missing"),
        ({"flop_rates": {"float32": 0}}, "flop_rates of float32 must be above 0"),
        ({"flop_rates": {"bfloat16": 1e12}}, "flop_rates needs at least 'float32'"),
        ({"launch": -1}, "launch must be 0 s or more"),
        ({"unhidden": 1.5}, "unhidden must be from 0 to 1"),
        ({"overlap": -0.1}, "overlap must be from 0 to 1"),
        ({"skew": -1e-3}, "skew must be 0 s or more"),
        ({"precision": 2}, "precision must be from 0 to 1"),
        ({"precision": "good"}, "'precision' must be a number"),
        ({"backend": "mpi"}, "backend must be one of .* got 'mpi'"),
        ({"separate_memory": 1}, "'separate_memory' must be true or false, got 1"),
        ({"devices_per_host": 0}, "devices_per_host must be at least 1"),
        ({"devices_per_host": 2.5}, "'devices_per_host' has the wrong type"),
        ({"memory_curve": [[64, 1e9], [32, 1e9]]}, "memory_curve must be at growing sizes"),
        ({"memory_curve": [[64, 0]]}, "memory_curve at 64 B must be above 0"),
    ],
)
def test_refuses_a_file_with_constants_that_cannot_be(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=rf"device\.json': .*{message}"):
        load_device(_edited(tmp_path, **fields))


def test_memory_is_as_fast_as_its_curve_says() -> None:
    curve = ((100.0, 10.0), (1000.0, 5.0))  # 10 s for 100 bytes, 200 s for 1000
    device = replace(device_for("cpu", Mesh.of(2)), memory_bandwidth=2.0, memory_curve=curve)
    seconds = device.memory_seconds(np.array([50.0, 100.0, 550.0, 1000.0, 2000.0]))
    np.testing.assert_allclose(seconds, [5.0, 10.0, 105.0, 200.0, 400.0])
    flat = replace(device, memory_curve=())
    np.testing.assert_allclose(flat.memory_seconds(np.array([100.0])), [50.0])


def test_presets_hide_gradients_where_nothing_else_needs_the_processors() -> None:
    assert preset("cpu").overlap == 0.0
    for name in ("h100", "h200", "a100"):
        assert 0.5 < preset(name).overlap < 1.0 and preset(name).unhidden == 0.0


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load_device(tmp_path / "none.json")


def test_memory_is_the_hosts_where_gloo_moves_it(tmp_path: Path) -> None:
    """In files that do not say so, too."""
    assert preset("h100").separate_memory and not preset("cpu").separate_memory
    unsaid = _edited(tmp_path, separate_memory=None)
    assert load_device(unsaid).separate_memory
    assert not load_device(_edited(tmp_path, separate_memory=None, backend="gloo")).separate_memory


def test_files_are_readable_json(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    save_device(device_for("cpu", Mesh.of(2)), path)
    data = json.loads(path.read_text())
    assert set(data["links"]) == {"intra", "inter"}
    assert data["flop_rates"]["float32"] == 70e9
