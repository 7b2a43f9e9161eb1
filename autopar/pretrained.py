"""Filling a parallel module from files of whole tensors, each rank with its pieces only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping

from torch import nn

from autopar import agreement
from autopar.face import Face
from autopar.initialise import initialise
from autopar.ir.errors import CheckpointError
from autopar.materialise import box_of
from autopar.muster import meet
from autopar.tensor_files import StoredTensor, stored_tensors

#: How many names a message lists.
NAMED = 3


def load_pretrained(
    parallel: Face,
    source: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    strict: bool = True,
) -> None:
    """Load a model's weights from a file or folder of one device; all ranks call it.

    source:
        a ``.safetensors`` file, a file of `torch.save` that holds a state dict, or a folder of
        such files (Hugging Face's, with or without an index)
    rename:
        name in the files -> name in the model, or None for one to leave out
    strict:
        refuse files that lack a parameter or buffer, or hold one that the model lacks

    Each rank reads the blocks that it holds. Names may have or lack the model's
    `base_model_prefix`, and of a tied parameter one name is enough. For a model from the meta
    device, buffers that no file holds are computed by the model's own code (`initialise`).

    Raises NotCompiledError before the module is compiled, CheckpointError, on every rank and
    before anything is overwritten, where files and model do not fit.
    """
    parallel.skeleton()  # refuses a module that is not compiled
    meet(parallel.context, "load_pretrained")
    error: Exception | None = None
    found: dict[str, StoredTensor] = {}
    try:
        found = _match(parallel, stored_tensors(source), rename, strict, str(source))
    except CheckpointError as problem:
        error = problem
    agreement.share_outcome(parallel.context, error, f"loading {source}")
    for name, stored in found.items():
        starts, sizes = box_of(parallel.layout_of(name), stored.shape, parallel.context)
        parallel.set_piece(name, stored.read(starts, sizes))
    parallel.mark_filled(*found)
    if parallel.without_values and strict:
        initialise(parallel)


def _match(
    parallel: Face,
    stored: Mapping[str, StoredTensor],
    rename: Callable[[str], str | None] | None,
    strict: bool,
    where: str,
) -> dict[str, StoredTensor]:
    """First name in the model -> what is stored for it."""
    firsts = parallel.first_names
    model = parallel.skeleton()
    prefix = getattr(model, "base_model_prefix", "")
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found: dict[str, StoredTensor] = {}
    unknown = []
    if rename is None:
        rename = _renaming(model)
    for given, tensor in stored.items():
        renamed = rename(given)
        if renamed is None:
            continue
        name = _known(renamed, firsts, prefix)
        if name is None:
            if not any(re.search(pattern, renamed) for pattern in ignored):
                unknown.append(given)
        else:
            found[firsts[name]] = tensor
    shapes = parallel.stored_shapes()
    missing = [name for name in shapes if name not in found]
    if strict and (missing or unknown):
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"holds {_some(unknown)}, which the model lacks"] if unknown else []
        raise CheckpointError(
            f"{where}: {' and '.join(parts)}; give rename=, or strict=False to load what fits"
        )
    for name, tensor in found.items():
        if name in shapes and shapes[name] != tensor.shape:
            raise CheckpointError(
                f"{where}: {name!r} is {tensor.shape} there, {shapes[name]} in the model"
            )
    return {name: tensor for name, tensor in found.items() if name in shapes}


def _renaming(model: nn.Module) -> Callable[[str], str | None]:
    """Name in the files -> name in the model; other than itself for some Hugging Face models.

    Transformers keeps the names of old files and renames on loading. Where it would also compute
    new tensors from the old ones (experts that are stacked, say), it has to be asked to do so.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return lambda name: name
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            apply_converters,
            apply_renamings,
        )
    except ImportError:  # a release before there were such names
        return lambda name: name
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = {name for name, _ in model.named_parameters()}

    def rename(name: str) -> str:
        renamed = apply_renamings(name, renamings)
        target, converter = apply_converters(renamed, converters)
        if converter is not None and name not in own:
            raise CheckpointError(
                f"{name!r} is converted to {target!r} on loading; load the model with "
                "transformers, and give it to autoparallelize, or save its state_dict() first"
            )
        return renamed

    return rename


def _known(name: str, firsts: Mapping[str, str], prefix: str) -> str | None:
    """The name in the model of a name in a file, with or without the prefix of the base model."""
    options = [name]
    if prefix:
        options += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    return next((option for option in options if option in firsts), None)


def _some(names: list[str]) -> str:
    listed = ", ".join(map(repr, names[:NAMED]))
    return f"{listed} and {len(names) - NAMED} more" if len(names) > NAMED else listed
