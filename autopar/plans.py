"""The plan: every decision of the compiler, to be read, saved, edited and replayed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from autopar.comparison import Comparison
from autopar.ir.errors import AutoparError, LayoutError, PlanError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Strategy
from autopar.kept_rows import KeptRow, format_kept
from autopar.memory_report import MemoryReport
from autopar.mesh_table import MeshOption, format_meshes
from autopar.mixed import MixedPrecision
from autopar.passes.assignment import Assignment
from autopar.passes.device import Device
from autopar.passes.device_file import device_from_json, device_to_json
from autopar.passes.policies import NO_POLICIES, Policies
from autopar.report import Row, format_table

#: The version of the plan file; a file of another version is refused.
VERSION = 4


class Reports(Protocol):
    """What a plan asks that needs the model it was made for."""

    def compare(self) -> Comparison: ...

    def memory(self, optimizer: str) -> MemoryReport: ...


@dataclass(frozen=True)
class Plan:
    """A strategy for every operator, a layout for everything stored, and the predicted cost.

    mesh:
        the mesh it was made for
    mode, outputs:
        how it was asked for
    device:
        what it was priced on; the collectives of a reshard are chosen for it, too
    training:
        whether the model was in training mode
    fingerprint:
        a digest of the traced graph and its hints: the plan fits this graph only
    signature:
        ``"param <name>"``, ``"input <path>"`` … -> the type of that tensor, to say what differs
    labels:
        source node name -> its entry in `signature`
    assignment:
        the decisions
    seconds:
        predicted time of one step, forward and backward
    bound:
        a proven lower bound on that time over all plans of the search
    gradients, hidden:
        seconds of collectives that bring gradients to their parameters, and how many of them run
        beside the backward pass and are not in `seconds`
    rows:
        one per operator and one for the results, for reading
    notes:
        what the user should know: operators that could not be split, settings that were changed
    mixed:
        its mixed precision, None where all is computed in the dtypes of the model
    policies:
        what is kept for the backward pass, by call and parameter
    kept:
        what that saves and costs, for reading
    meshes:
        the meshes that were considered, where this one was chosen among them, the best one first
    torch_version:
        the version of PyTorch that traced the model
    path:
        the file that it was read from
    reports:
        what `compare` and `memory` ask; a plan that was read from a file has none
    """

    mesh: Mesh
    mode: str
    outputs: str
    device: Device
    training: bool
    fingerprint: str
    signature: Mapping[str, str]
    labels: Mapping[str, str]
    assignment: Assignment
    seconds: float
    bound: float
    gradients: float = 0.0
    hidden: float = 0.0
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = field(default=())
    mixed: MixedPrecision | None = None
    policies: Policies = NO_POLICIES
    kept: tuple[KeptRow, ...] = ()
    meshes: tuple[MeshOption, ...] = ()
    torch_version: str = torch.__version__
    path: str = field(default="", compare=False)
    reports: Reports | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # The reports hold the traced model, which a copy elsewhere does without.
        return {**self.__dict__, "reports": None}

    @property
    def called(self) -> str:
        """What errors call it."""
        return f"plan file {self.path}" if self.path else "plan"

    def compare(self) -> Comparison:
        """The plan beside data parallel, FSDP, Megatron's tensor parallel and their mixtures.

        Raises PlanError for a plan that was read from a file: `autopar.compare` takes the model
        and the plan.
        """
        if self.reports is None:
            raise PlanError(
                "plan.compare(): a plan from a file does not know its model; "
                "call autopar.compare(model, args, kwargs, plan=plan)"
            )
        return self.reports.compare()

    def memory(self, optimizer: str = "adam") -> MemoryReport:
        """The predicted memory of one training step on one rank, before anything runs.

        optimizer:
            "none", "sgd", "momentum", "adam" or "adamw": whose state is counted

        Raises PlanError for an unknown optimizer, and for a plan that was read from a file and
        not yet given to `autoparallelize`.
        """
        if self.reports is None:
            raise PlanError(
                "plan.memory(): a plan from a file does not know its model; "
                "ask the plan of the module that autoparallelize(..., plan=plan) returns"
            )
        return self.reports.memory(optimizer)

    def __str__(self) -> str:
        head = (
            f"plan for {self.device.name} on mesh {self.mesh}, mode {self.mode}: "
            f"predicted {self.seconds * 1e3:.3f} ms per step"
        )
        gap = (self.seconds - self.bound) / self.seconds if self.seconds else 0.0
        head += f" (within {100 * max(gap, 0.0):.2g} % of the optimum)"
        lines = [head, format_table(self.rows)]
        if self.mixed is not None:
            lines.insert(1, str(self.mixed))
        if self.gradients:
            lines.append(
                f"gradients: {self.gradients * 1e3:.3f} ms of collectives, "
                f"{self.hidden * 1e3:.3f} ms of them hidden beside the backward pass"
            )
        lines += format_kept(self.kept)
        lines.extend(f"note: {note}" for note in self.notes)
        if self.meshes:
            lines += ["meshes:", format_meshes(self.meshes)]
        return "\n".join(lines)

    @property
    def input_layouts(self) -> dict[str, Layout]:
        """Argument path -> what each rank needs of that input."""
        return self._layouts_of("input ")

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Dotted name -> the layout a parameter is stored in (those that the graph uses)."""
        return self._layouts_of("param ")

    def _layouts_of(self, kind: str) -> dict[str, Layout]:
        return {
            self.labels[name].removeprefix(kind): layout
            for name, layout in self.assignment.sources.items()
            if self.labels[name].startswith(kind)
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. The file appears whole or not at all.

        Raises PlanError naming the file where it cannot be written.
        """
        target = Path(path)
        text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            _write_whole(target, text)
        except OSError as error:
            raise PlanError(f"plan file {path}: cannot be written: {error.strerror}") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises PlanError naming the file where it is missing, cut short, of another version, or
        has a field that is absent or malformed.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(f"plan file {path}: cannot be read: {error.strerror}") from None
        try:
            data = json.loads(content)
        except ValueError as error:
            raise PlanError(
                f"plan file {path}: not valid JSON ({error}); it may be cut short"
            ) from None
        try:
            return replace(Plan.from_json(data), path=str(path))
        except AutoparError as error:
            raise PlanError(f"plan file {path}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        decided = self.assignment
        return {
            "autopar_plan": VERSION,
            "torch": self.torch_version,
            "mesh": dict(self.mesh.axes),
            "mode": self.mode,
            "outputs": self.outputs,
            "device": device_to_json(self.device),
            "training": self.training,
            "fingerprint": self.fingerprint,
            "seconds": self.seconds,
            "bound": self.bound,
            "gradients": self.gradients,
            "hidden": self.hidden,
            "operators": {
                name: {
                    "roles": dict(strategy.roles),
                    "chosen_by": decided.reasons.get(name, {}),
                }
                for name, strategy in decided.strategies.items()
            },
            "sources": {name: _layout_json(v) for name, v in decided.sources.items()},
            "relays": {name: _layout_json(v) for name, v in decided.relays.items()},
            "returned": [None if v is None else _layout_json(v) for v in decided.outputs],
            "signature": dict(self.signature),
            "labels": dict(self.labels),
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
            "mixed_precision": None if self.mixed is None else self.mixed.to_json(),
            "policies": self.policies.to_json(),
            "kept": [row.to_json() for row in self.kept],
            "meshes": [option.to_json() for option in self.meshes],
        }

    @staticmethod
    def from_json(data: Any) -> Plan:
        """The inverse of `to_json`. Raises PlanError naming the field that does not fit."""
        if not isinstance(data, dict) or "autopar_plan" not in data:
            raise PlanError("not a plan: the field 'autopar_plan' is missing")
        if data["autopar_plan"] is True or data["autopar_plan"] != VERSION:
            raise PlanError(
                f"version {data['autopar_plan']!r}, this autopar reads version {VERSION}; "
                "make the plan anew"
            )
        read = _Reader(data)
        mesh = Mesh.of(read("mesh", dict))
        operators = read("operators", dict)
        sources = read.layouts("sources")
        labels = read.texts("labels")
        unnamed = [name for name in sources if name not in labels]
        if unnamed:
            raise PlanError(f"the field 'labels' does not name the sources {unnamed[:3]}")
        assignment = Assignment(
            mesh.without_trivial_axes(),
            {n: _strategy(n, entry) for n, entry in operators.items()},
            sources,
            read.layouts("relays"),
            tuple(None if v is None else _layout(v, "returned") for v in read("returned", list)),
            {n: _reasons(n, entry) for n, entry in operators.items()},
        )
        return Plan(
            mesh=mesh,
            mode=read("mode", str),
            outputs=read("outputs", str),
            device=read.device("device"),
            training=read("training", bool),
            fingerprint=read("fingerprint", str),
            signature=read.texts("signature"),
            labels=labels,
            assignment=assignment,
            seconds=float(read("seconds", (int, float))),
            bound=float(read("bound", (int, float))),
            gradients=float(read("gradients", (int, float))),
            hidden=float(read("hidden", (int, float))),
            rows=tuple(Row.from_json(row) for row in read("rows", list)),
            notes=tuple(read.strings("notes")),
            mixed=MixedPrecision.from_json(read("mixed_precision", (dict, type(None)))),
            policies=Policies.from_json(read("policies", dict)),
            kept=tuple(KeptRow.from_json(entry) for entry in read("kept", list)),
            meshes=tuple(MeshOption.from_json(entry) for entry in read("meshes", list)),
            torch_version=read("torch", str),
        )


class _Reader:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __call__(self, name: str, kind: type | tuple[type, ...]) -> Any:
        if name not in self.data:
            raise PlanError(f"the field {name!r} is missing")
        value = self.data[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise PlanError(f"the field {name!r} has the wrong type: got {value!r}"[:200])
        return value

    def texts(self, name: str) -> dict[str, str]:
        """A field that maps names to texts."""
        value = self(name, dict)
        for key, text in value.items():
            if not isinstance(text, str):
                raise PlanError(f"the field '{name}.{key}' has the wrong type: got {text!r}"[:200])
        return value

    def strings(self, name: str) -> list[str]:
        """A field that lists texts."""
        value = self(name, list)
        if not all(isinstance(text, str) for text in value):
            raise PlanError(f"the field {name!r} has the wrong type: got {value!r}"[:200])
        return value

    def device(self, name: str) -> Device:
        try:
            return device_from_json(self(name, dict))
        except PlanError as error:
            raise PlanError(f"the field {name!r}: {error}") from None

    def layouts(self, name: str) -> dict[str, Layout]:
        return {key: _layout(v, f"{name}.{key}") for key, v in self(name, dict).items()}


def _write_whole(target: Path, text: str) -> None:
    """Write beside the target first, so that no reader meets half a file."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _layout_json(layout: Layout) -> dict[str, Any]:
    data: dict[str, Any] = {"dims": [list(axes) for axes in layout.dims]}
    if layout.replicate:
        data["replicate"] = list(layout.replicate)
    if layout.partial:
        data["partial"] = list(layout.partial)
    if layout.units:
        data["units"] = list(layout.units)
    return data


def _layout(data: Any, where: str) -> Layout:
    if isinstance(data, dict):
        dims, copies, terms = data.get("dims"), data.get("replicate", []), data.get("partial", [])
        units = data.get("units", [])
        fits = isinstance(dims, list) and all(map(_are_axes, [*dims, copies, terms]))
        whole = isinstance(units, list) and all(type(unit) is int for unit in units)
        if isinstance(dims, list) and fits and whole:
            try:
                return Layout.make(dims, copies, terms, units)
            except LayoutError as error:
                raise PlanError(f"the field {where!r} is not a layout: {error}") from None
    raise PlanError(f"the field {where!r} is not a layout: got {data!r}"[:200])


def _are_axes(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(axis, str) for axis in data)


def _strategy(name: str, entry: Any) -> Strategy:
    roles = entry.get("roles") if isinstance(entry, dict) else None
    if not isinstance(roles, dict) or not all(isinstance(r, str) for r in roles.values()):
        raise PlanError(f"the field 'operators.{name}.roles' must map axes to roles, got {entry!r}")
    return Strategy(tuple(roles.items()))


def _reasons(name: str, entry: dict[str, Any]) -> dict[str, str]:
    reasons = entry.get("chosen_by", {})
    if not isinstance(reasons, dict) or not all(isinstance(r, str) for r in reasons.values()):
        raise PlanError(
            f"the field 'operators.{name}.chosen_by' must map axes to texts, got {reasons!r}"
        )
    return dict(reasons)
