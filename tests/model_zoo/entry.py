"""What an entry of the model zoo is, and short ways to declare one.

A model of transformers is its class name, the call it is trained with, and what its config needs
beyond the small sizes below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Makes the keyword arguments of an example call for a built model.
Call = Callable[[nn.Module], dict[str, Any]]

BATCH = 4
LENGTH = 8
VOCABULARY = 64
CLASSES = 6
CHANNELS = 3

#: Sizes that every config gets which knows them under that name.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": CHANNELS,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "decoder_start_token_id": 1,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


#: Fields that any config takes, though its class does not list them.
_COMMON = ("num_labels", "decoder_start_token_id")


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    make:
        builds the model, in single precision and with random weights
    call:
        the keyword arguments of an example call of the model
    double:
        whether the model can run in double precision
    modes:
        the modes in which it is traced and compared
    """

    name: str
    make: Callable[[], nn.Module]
    call: Call
    double: bool = True
    modes: tuple[str, ...] = ("train", "eval")


def hf(
    name: str,
    kind: str,
    call: Call,
    *,
    double: bool = True,
    modes: tuple[str, ...] = ("train", "eval"),
    experts: str | None = None,
    **settings: Any,
) -> Entry:
    """A model class of transformers in a small random configuration.

    settings:
        of its config, over those of `SMALL`; a dict is a nested config, made small likewise
    experts:
        the experts implementation of a mixture of experts
    """

    def make() -> nn.Module:
        import transformers

        model_class = getattr(transformers, kind)
        config = small_config(model_class.config_class, settings)
        if experts is not None:
            config._experts_implementation = experts
        return model_class(config)

    return Entry(name, make, call, double, modes)


def small_config(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """A config with the sizes of `SMALL` where it knows them, and `settings`."""
    known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
    aliases = config_class.attribute_map
    # A name that is another's alias is given once, by the name that `settings` uses.
    given = {aliases.get(key, key) for key in settings}
    chosen: dict[str, Any] = {}
    for key, size in SMALL.items():
        own = aliases.get(key, key)
        if (key in known or key in _COMMON) and own not in given and own not in chosen:
            chosen[own] = size
    for key, value in settings.items():
        nested = config_class.sub_configs.get(key)
        if nested is not None and isinstance(value, Mapping):
            value = _nested(nested, value)
        chosen[key] = value
    return config_class(**chosen)


def _nested(config_class: Any, settings: Mapping[str, Any]) -> Any:
    """The config inside a config; one of several kinds is told by its `model_type`."""
    if not hasattr(config_class, "attribute_map"):
        from transformers import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[settings["model_type"]]
        settings = {k: v for k, v in settings.items() if k != "model_type"}
    return small_config(config_class, settings)


# --- example calls ----------------------------------------------------------------------------


def ids(batch: int = BATCH, length: int = LENGTH, low: int = 4) -> torch.Tensor:
    """Token numbers without the special ones."""
    return torch.randint(low, VOCABULARY, (batch, length))


def mask_of(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask with one padded row."""
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return mask


def causal(model: nn.Module) -> dict[str, Any]:
    """Next-token training with a padded row."""
    tokens = ids()
    mask = mask_of(tokens)
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def unmasked(call: Call) -> Call:
    """The same call without its attention mask."""
    return lambda model: {k: v for k, v in call(model).items() if k != "attention_mask"}


def masked_lm(model: nn.Module) -> dict[str, Any]:
    """Masked-language training: the labels of some places count."""
    tokens = ids()
    mask = mask_of(tokens)
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.5, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def hidden_states(model: nn.Module) -> dict[str, Any]:
    """An encoder by itself: tokens in, features out."""
    tokens = ids()
    return {"input_ids": tokens, "attention_mask": mask_of(tokens)}


def sequence_class(model: nn.Module) -> dict[str, Any]:
    tokens = ids()
    return {
        "input_ids": tokens,
        "attention_mask": mask_of(tokens),
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


def seq2seq(model: nn.Module) -> dict[str, Any]:
    tokens = ids()
    labels = ids(length=6)
    labels[2, -1:] = -100
    return {"input_ids": tokens, "attention_mask": mask_of(tokens), "labels": labels}


def images(size: int = 16, channels: int = CHANNELS) -> torch.Tensor:
    return torch.randn(BATCH, channels, size, size)


def image_class(size: int = 16) -> Call:
    """Image classification."""

    def call(model: nn.Module) -> dict[str, Any]:
        return {"pixel_values": images(size), "labels": torch.randint(CLASSES, (BATCH,))}

    return call


def image_features(size: int = 16) -> Call:
    """A vision model by itself: images in, features out."""
    return lambda model: {"pixel_values": images(size)}


def image_text(size: int = 16, **more: Any) -> Call:
    """Images and texts side by side, as a contrastive model is trained."""

    def call(model: nn.Module) -> dict[str, Any]:
        tokens = ids()
        return {
            "input_ids": tokens,
            "attention_mask": mask_of(tokens),
            "pixel_values": images(size),
            **more,
        }

    return call


def waveform(samples: int, **more: Any) -> Call:
    return lambda model: {"input_values": torch.randn(BATCH, samples), **more}
