"""What a checkpoint holds: a model, an optimizer by the names of its parameters, random states.

model.<name>                      parameters and persistent buffers, tied ones once
optimizer.<name>.<entry>          the optimizer's tensors of a parameter
record                            everything that is no tensor, as bytes
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint_pieces import Piece
from autopar.face import Face
from autopar.ir.errors import CheckpointError
from autopar.materialise import box_of

MODEL = "model."
OPTIMIZER = "optimizer."
RECORD = "record"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones under their first name."""
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) in kept}


def model_pieces(model: nn.Module) -> dict[str, Piece]:
    """This rank's pieces of a model, parallel or plain."""
    return {
        MODEL + name: _piece(model, name, tensor) for name, tensor in model_tensors(model).items()
    }


def _piece(model: nn.Module, name: str, tensor: Tensor) -> Piece:
    """A piece of something that is laid out as the parameter of this name is."""
    if not isinstance(tensor, DTensor) or not isinstance(model, Face):
        return Piece.of(tensor)
    start, _ = box_of(model.layout_of(name), tensor.shape, model.context)
    return Piece(tensor.to_local().detach(), start, tuple(tensor.shape))


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of every group. Raises CheckpointError for a stranger."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"optimizer: a parameter of shape {tuple(parameter.shape)} is none of the "
                    "model's; make the optimizer from the parameters of the model that is saved"
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_pieces(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Piece], dict[str, Any]]:
    """This rank's pieces of an optimizer's tensors, and the rest of it as plain data."""
    names = parameter_names(model, optimizer)
    pieces: dict[str, Piece] = {}
    values: dict[str, dict[str, Any]] = {}
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], group_names, strict=True):
            for entry, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    values.setdefault(name, {})[entry] = value
                elif _laid_out_alike(value, parameter):
                    pieces[f"{OPTIMIZER}{name}.{entry}"] = _piece(model, name, value)
                else:
                    pieces[f"{OPTIMIZER}{name}.{entry}"] = Piece.of(value)
    groups = [
        {"params": group_names, **{k: v for k, v in group.items() if k != "params"}}
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]
    return pieces, {"groups": groups, "values": values}


def _laid_out_alike(value: Tensor, parameter: Tensor) -> bool:
    if value.shape != parameter.shape:
        return False
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        return value.placements == parameter.placements
    return isinstance(value, DTensor) == isinstance(parameter, DTensor)


@dataclass(frozen=True)
class OptimizerState:
    """Room for an optimizer's state, filled by reading `pieces`, put to use by `install`."""

    optimizer: Optimizer
    pieces: Mapping[str, Piece]
    state: Mapping[Tensor, dict[str, Any]]
    options: list[dict[str, Any]]

    def install(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(options)


def optimizer_room(
    model: nn.Module, optimizer: Optimizer, metadata: Metadata, record: Mapping[str, Any]
) -> OptimizerState:
    """Tensors for what a checkpoint holds of an optimizer, laid out as this model is.

    Raises CheckpointError where the groups of parameters, or the kinds of optimizers, differ.
    """
    names = parameter_names(model, optimizer)
    saved = [group["params"] for group in record["groups"]]
    if [sorted(group) for group in saved] != [sorted(group) for group in names]:
        raise CheckpointError(
            f"optimizer: its groups hold {[len(group) for group in names]} parameters, those of "
            f"the checkpoint {[len(group) for group in saved]}, or other ones; make it as it was"
        )
    _require_options(optimizer, record["groups"])
    parameters = dict(model.named_parameters())
    state: dict[Tensor, dict[str, Any]] = {
        parameters[name]: dict(values) for name, values in record["values"].items()
    }
    pieces: dict[str, Piece] = {}
    devices = _entry_devices(optimizer, names)
    by_length = sorted(parameters, key=len, reverse=True)
    for key, stored in metadata.state_dict_metadata.items():
        if not key.startswith(OPTIMIZER) or not isinstance(stored, TensorStorageMetadata):
            continue
        name = next(n for n in by_length if key.startswith(f"{OPTIMIZER}{n}."))
        parameter, entry = parameters[name], key.removeprefix(f"{OPTIMIZER}{name}.")
        dtype = stored.properties.dtype
        if stored.size == parameter.shape:
            value = torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
            pieces[key] = _piece(model, name, value)
        else:
            value = torch.empty(stored.size, dtype=dtype, device=devices[name, not stored.size])
            pieces[key] = Piece.whole(value)
        state.setdefault(parameter, {})[entry] = value
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in record["groups"]
    ]
    return OptimizerState(optimizer, pieces, state, options)


#: Options that schedulers leave in groups, which an optimizer may or may not have yet.
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)


def _require_options(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise CheckpointError for the groups of another kind of optimizer.

    Both sides have options that the other lacks then; options that were added to a kind later are
    on one side only.
    """
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        ours = set(group) - set(saved) - _OF_SCHEDULERS
        theirs = set(saved) - set(group) - _OF_SCHEDULERS
        if ours and theirs:
            raise CheckpointError(
                f"optimizer: the checkpoint is of another kind than {type(optimizer).__name__}: "
                f"its groups have {sorted(theirs)} and lack {sorted(ours)}"
            )


def _entry_devices(
    optimizer: Optimizer, names: list[list[str]]
) -> dict[tuple[str, bool], torch.device]:
    """(name of a parameter, whether a scalar) -> where PyTorch's optimizers keep such state."""
    found = {}
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter, name in zip(group["params"], group_names, strict=True):
            found[name, False] = parameter.device
            found[name, True] = parameter.device if on_device else torch.device("cpu")
    return found


# -- random states ----------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """The random states of this process: PyTorch's, Python's and NumPy's."""
    kind, keys, *rest = numpy.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(numpy.asarray(keys).astype("int64")), *rest),
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)


# -- what is no tensor ------------------------------------------------------------------------


def pack(record: Any, what: str) -> Tensor:
    """Plain data as bytes. Raises CheckpointError for what could not be read back safely."""
    stream = io.BytesIO()
    try:
        torch.save(record, stream)
        data = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        unpack(data)
    except Exception as error:  # whatever an object's own pickling raises
        raise CheckpointError(
            f"{what}: only tensors, numbers, strings, and tuples, lists and dicts of them can be "
            f"saved; give the state_dict() of an object"
        ) from error
    return data


def unpack(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
