"""Devices as JSON files: what `calibrate` writes and ``device="here.json"`` reads."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from autopar.ir.errors import PlanError
from autopar.passes.device import Device, Link, Measure

#: The version of the device file; a file of another version is refused.
VERSION = 4

_VERSION_KEY = "autopar_device"


def save_device(device: Device, path: str | os.PathLike[str]) -> None:
    """Write a device as JSON. The file appears whole or not at all."""
    target = Path(path)
    text = json.dumps(device_to_json(device), indent=2) + "\n"
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_device(path: str | os.PathLike[str]) -> Device:
    """Read a device that `save_device` wrote. Raises PlanError where it is not one."""
    try:
        return device_from_json(json.loads(Path(path).read_text()))
    except OSError as error:
        raise PlanError(f"device file {os.fspath(path)!r}: {error.strerror}") from error
    except PlanError as error:
        problem = str(error)
    except ValueError as error:  # no JSON, or no text
        problem = f"not a device description ({type(error).__name__}: {error})"
    raise PlanError(
        f"device file {os.fspath(path)!r}: {problem}; autopar.calibrate(path=...) writes one"
    )


def device_to_json(device: Device) -> dict[str, Any]:
    """A device as plain data; rates that nothing bounds are null."""
    return {
        _VERSION_KEY: VERSION,
        "name": device.name,
        "flop_rates": dict(device.flop_rates),
        "memory_bandwidth": device.memory_bandwidth,
        "memory_curve": [list(pair) for pair in device.memory_curve],
        "special_rate": None if math.isinf(device.special_rate) else device.special_rate,
        "launch": device.launch,
        "unhidden": device.unhidden,
        "overlap": device.overlap,
        "skew": device.skew,
        "precision": device.precision,
        "backend": device.backend,
        "separate_memory": device.separate_memory,
        "devices_per_host": device.devices_per_host,
        "links": {
            link.name: {
                kind: [[m.group, m.latency, m.bandwidth] for m in measures]
                for kind, measures in link.collectives
            }
            for link in device.links
        },
        "axis_links": dict(device.axis_links),
    }


def device_from_json(data: Any) -> Device:
    """The inverse of `device_to_json`.

    Raises PlanError where it is not a device, is one of another version, or has a field that is
    absent or malformed, or a constant that cannot be.
    """
    if not isinstance(data, dict) or _VERSION_KEY not in data:
        raise PlanError(f"not a device description: the field {_VERSION_KEY!r} is missing")
    version = data[_VERSION_KEY]
    if isinstance(version, bool) or version != VERSION:
        raise PlanError(f"version {version!r}, this autopar reads version {VERSION}")
    read = _Reader(data)
    backend = read("backend", str)
    return Device(
        name=read("name", str),
        flop_rates=tuple(
            (dtype, read.number(rate, f"flop_rates.{dtype}"))
            for dtype, rate in read("flop_rates", dict).items()
        ),
        memory_bandwidth=read.number(read("memory_bandwidth"), "memory_bandwidth"),
        launch=read.number(read("launch"), "launch"),
        devices_per_host=read("devices_per_host", int),
        links=tuple(_link(read, name, entry) for name, entry in read("links", dict).items()),
        axis_links=tuple(read("axis_links", dict).items()),
        special_rate=read.number(read("special_rate"), "special_rate", unbounded=True),
        memory_curve=tuple(
            (size, pace) for size, pace in read.rows(read("memory_curve"), "memory_curve", 2)
        ),
        unhidden=read.number(read("unhidden"), "unhidden"),
        overlap=read.number(read("overlap"), "overlap"),
        skew=read.number(read("skew"), "skew"),
        backend=backend,
        # Files that were written before there were these are read, too.
        precision=read.number(data.get("precision", 0.0), "precision"),
        separate_memory=read.flag(
            data.get("separate_memory", backend != "gloo"), "separate_memory"
        ),
    )


def _link(read: _Reader, name: str, entry: Any) -> Link:
    where = f"links.{name}"
    measures = {
        kind: tuple(
            Measure(int(group), latency, bandwidth)
            for group, latency, bandwidth in read.rows(rows, f"{where}.{kind}", 3)
        )
        for kind, rows in read.of_type(entry, where, dict).items()
    }
    return Link(name, tuple(measures.items()))


class _Reader:
    """Takes fields out of plain data; raises PlanError naming the one that does not fit."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __call__(self, name: str, kind: type | None = None) -> Any:
        if name not in self.data:
            raise PlanError(f"not a device description: the field {name!r} is missing")
        return self.data[name] if kind is None else self.of_type(self.data[name], name, kind)

    def of_type(self, value: Any, where: str, kind: type) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise PlanError(f"the field {where!r} has the wrong type: got {value!r}"[:200])
        return value

    def flag(self, value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            raise PlanError(f"the field {where!r} must be true or false, got {value!r}"[:200])
        return value

    def number(self, value: Any, where: str, *, unbounded: bool = False) -> float:
        """A number; where it may be unbounded, null is infinity."""
        if unbounded and value is None:
            return math.inf
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PlanError(f"the field {where!r} must be a number, got {value!r}"[:200])
        return value

    def rows(self, value: Any, where: str, length: int) -> list[tuple[float, ...]]:
        """A list of rows of so many numbers each."""
        rows = self.of_type(value, where, list)
        for row in rows:
            if not isinstance(row, list) or len(row) != length:
                raise PlanError(
                    f"the field {where!r} must hold rows of {length}, got {row!r}"[:200]
                )
        return [tuple(self.number(cell, where) for cell in row) for row in rows]
