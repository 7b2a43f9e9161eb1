"""The model's own face: its names, parameters, modes and state, around this rank's pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.calls import Modes
from autopar.ir.errors import MeshError, NotCompiledError, NoValuesError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.trace import Program
from autopar.ir.trace_export import model_device
from autopar.materialise import build_shells, fill_shells, held, no_value
from autopar.runtime.groups import RankContext
from autopar.runtime.local_parameter import local_parameters
from autopar.runtime.pieces import piece
from autopar.skeleton import Skeleton


class _Hidden:
    """Keeps a module out of another module's submodules."""

    def __init__(self, value: nn.Module | None) -> None:
        self.value = value


class Face(nn.Module):
    """A module that stands for a model: first by holding it, after `build` by its pieces.

    Before `build`, parameters, buffers and modules can't be asked for (NotCompiledError), because
    how they are split is not known; training flags, `to` and the like act on the model.
    """

    def __init__(self, model: nn.Module, context: RankContext, device: torch.device) -> None:
        super().__init__()
        self._context = context
        self._home = device
        self._name = type(model).__name__
        self._model = _Hidden(model)
        self._skeleton: Skeleton | None = None
        self._layouts: dict[str, Layout] = {}
        #: Whether the module was ever run.
        self.ran = False
        #: Names of parameters and buffers that nobody has given values yet.
        self._empty: frozenset[str] = frozenset()
        #: Path, module: of the model before it is built, of the shells afterwards.
        self._parts: tuple[tuple[str, nn.Module], ...] = tuple(model.named_modules())
        #: (module, attribute name, whether it is a parameter) of all state, tied tensors once.
        self._places: dict[str, tuple[nn.Module, str, bool]] = {}
        #: Every name of a parameter or buffer -> the first one.
        self._first_names: dict[str, str] = {}
        self.training = model.training

    @property
    def mesh(self) -> Mesh:
        """The mesh that the module runs on."""
        return self._context.mesh

    @property
    def context(self) -> RankContext:
        """This rank's place in the mesh."""
        return self._context

    @property
    def home(self) -> torch.device:
        """The device that this rank's pieces are on."""
        return self._home

    @property
    def computes_in(self) -> torch.dtype | None:
        """The dtype of its mixed precision; None where it has none."""
        return None

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the state of its optimizer is kept in the host's memory between steps."""
        return False

    @property
    def built(self) -> bool:
        """Whether the parameters are split, which the first compilation does."""
        return self._skeleton is not None

    def build(self, program: Program, layouts: Mapping[str, Layout]) -> None:
        """Replace the model by this rank's pieces; only a skeleton of it is kept."""
        model = self._model.value
        assert model is not None and not self.built
        skeleton = Skeleton.of(model, self._home)
        build_shells(self, model)
        self._layouts = dict(layouts)
        self._empty = fill_shells(self, model, program, layouts, self._context, self._home)
        states = (*program.params.values(), *program.buffers.values())
        self._first_names = {name: state.name for state in states for name in state.names}
        self._model.value = None
        self._skeleton = skeleton
        self._parts = tuple(super().named_modules())
        self._places = {
            name: (*self._owner(name), True) for name, _ in super().named_parameters()
        } | {name: (*self._owner(name), False) for name, _ in super().named_buffers()}

    def layout_of(self, name: str) -> Layout:
        """How a parameter is stored; whole where no graph uses it."""
        tensor = self._state_tensor(name)
        return self._layouts.get(name, Layout.whole(tensor.dim()))

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's own copy of its piece of a tensor that is laid out as a parameter is."""
        return held(whole, self.layout_of(name), self._context, self._home)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        parent, _, leaf = name.rpartition(".")
        return super().get_submodule(parent), leaf

    def _state_tensor(self, name: str) -> Tensor:
        """A parameter or buffer by its canonical name, as it is now."""
        owner, leaf, is_parameter = self._places[name]
        tensor = (owner._parameters if is_parameter else owner._buffers)[leaf]
        assert tensor is not None
        return tensor

    def local_parameters(self, names: Sequence[str]) -> list[Tensor]:
        """This rank's pieces of parameters, which gradients flow through."""
        return local_parameters([self._state_tensor(name) for name in names])

    def _state_tensors(self) -> dict[str, Tensor]:
        return {name: self._state_tensor(name) for name in self._places}

    # -- values -------------------------------------------------------------------------------

    @property
    def without_values(self) -> frozenset[str]:
        """The parameters and buffers that have no values yet, of a model from the meta device."""
        return self._empty

    def skeleton(self) -> nn.Module:
        """The model's own modules, with fake tensors. Raises NotCompiledError before there are."""
        self._require_built("modules")
        assert self._skeleton is not None
        return self._skeleton.module

    def whole_value(self, name: str, room: Tensor | None = None) -> Tensor:
        """A copy of a parameter or buffer, whole on every rank; all ranks call it together.

        One without values is filled with what cannot be mistaken for one (`no_value`), in the
        memory of `room` where that has as many elements of its dtype.
        """
        tensor = self._state_tensor(name).detach()
        if name in self._empty:
            if room is None or (room.numel(), room.dtype) != (tensor.numel(), tensor.dtype):
                room = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._home)
            return room.view(tensor.shape).fill_(no_value(tensor.dtype))
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()

    def set_whole(self, name: str, whole: Tensor) -> None:
        """Give a parameter or buffer its values; each rank copies its piece. No communication."""
        layout = self.layout_of(name)
        self.set_piece(name, piece(whole, layout, self.mesh, self._context.coordinates))

    def set_piece(self, name: str, values: Tensor) -> None:
        """Give this rank's piece of a parameter or buffer its values."""
        with torch.no_grad():
            mine = self._state_tensor(name)
            (mine.to_local() if isinstance(mine, DTensor) else mine).copy_(values)

    @property
    def first_names(self) -> Mapping[str, str]:
        """Every name of a parameter or buffer -> the first one, that of a tied one."""
        return self._first_names

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of what a `state_dict` holds: parameters and persistent buffers."""
        found = {}
        for name, (owner, leaf, _) in self._places.items():
            if leaf not in owner._non_persistent_buffers_set:
                found[name] = tuple(self._state_tensor(name).shape)
        return found

    def mark_filled(self, *names: str) -> None:
        """Say that these parameters and buffers (default: all) have their values now.

        For a model that came without values, on the meta device, and was filled by hand.
        """
        self._require_built("values")
        self._empty = self._empty - set(names) if names else frozenset()

    def _require_values(self) -> None:
        if self._empty:
            some = sorted(self._empty)
            raise NoValuesError(
                f"{len(some)} parameters and buffers have no values, {some[0]!r} among them: the "
                "model was on the meta device. Fill it with autopar.load_pretrained, "
                "autopar.load_checkpoint, load_state_dict or autopar.initialise; after filling it "
                "by hand call mark_filled()"
            )

    # -- modes --------------------------------------------------------------------------------

    def _modes(self) -> Modes:
        """The modules in eval mode; before compilation the model's own flags count."""
        return frozenset(path for path, module in self._parts if not module.training)

    def train(self, mode: bool = True) -> Any:
        """Switch all modules to training or evaluation mode; returns self."""
        if self._model.value is not None:
            self._model.value.train(mode)
        super().train(mode)
        return self

    # -- nn.Module's own methods --------------------------------------------------------------

    def _require_built(self, what: str) -> None:
        if not self.built:
            raise NotCompiledError(
                f"{what}: not known before the first call, which compiles the module; "
                "give example inputs to autoparallelize(model, args, kwargs), or call the module "
                "once before making an optimizer"
            )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`. Raises NotCompiledError before the first call."""
        self._require_built("parameters")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As `nn.Module.named_buffers`. Raises NotCompiledError before the first call."""
        self._require_built("buffers")
        return super().named_buffers(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """As `nn.Module.get_submodule`. Raises NotCompiledError before the first call."""
        if target:
            self._require_built(f"module {target!r}")
        return super().get_submodule(target)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `to`, `cuda`, `double` … go through: before compilation the model itself moves."""
        target = fn(torch.empty(0, device=self._home)).device
        if target.type != self._home.type and self._context.device_mesh is not None:
            raise MeshError(
                f"the module cannot be moved to {target}: its ranks communicate on "
                f"{self._home.type}. Move the model before autoparallelize"
            )
        if self._model.value is not None:
            self._model.value._apply(fn, recurse)
            moved = model_device(self._model.value, ())
            self._home = self._home if moved.type == "meta" else moved
        else:
            self._home = target
        super()._apply(fn, recurse)
        return self

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As `nn.Module.state_dict`. Raises NotCompiledError before the first call.

        It needs no communication: every rank gets its own pieces as DTensors
        (`autopar.full_state_dict` gives whole tensors).
        """
        self._require_built("state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`. Raises NotCompiledError before the first call.

        Takes pieces (what `state_dict` gave) and whole tensors (of one device) alike; of a whole
        tensor each rank copies its own piece. Values are copied even where `assign` is set, so
        that optimizers and tied names keep their parameters.
        """
        self._require_built("load_state_dict")
        own = super().state_dict()
        pieces = {
            name: self._piece_for(own.get(name), value, name) for name, value in state_dict.items()
        }
        result = super().load_state_dict(pieces, strict=strict)
        self._empty -= {self._first_names.get(name, name) for name in pieces}
        return result

    def _piece_for(self, own: Any, value: Any, name: str) -> Any:
        """A whole tensor cut to our layout; what does not fit stays, for `nn.Module` to refuse."""
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if not whole or not isinstance(own, DTensor) or own.shape != value.shape:
            return value
        return self.piece_of(self._first_names[name], value)
