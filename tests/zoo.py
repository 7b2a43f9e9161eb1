"""The small models the tests train: random configurations, double precision, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: A model and the keyword arguments of an example call.
Example = tuple[nn.Module, dict[str, Any]]


def _ids(vocabulary: int, batch: int = 4, length: int = 8) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length))


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = _ids(64)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    ids = _ids(64)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    ids = _ids(64)
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=8, patch_size=4, num_channels=3, num_labels=6,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(6, (4,)),
    }


def resnet() -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        layer_type="basic", downsample_in_first_stage=False, num_labels=6,
    )  # fmt: skip
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    return ResNetForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(6, (4,)),
    }


class Mlp(nn.Module):
    """Two layers and a mean loss; returns loss and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 12)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.fc2(torch.relu(self.fc1(x)))
        return nn.functional.cross_entropy(scores, target), scores


def mlp() -> Example:
    x = torch.randn(8, 8, dtype=torch.float64)
    return Mlp(), {"x": x, "target": torch.randint(12, (8,))}


ZOO: dict[str, Callable[[], Example]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "mlp": mlp,
}


def build(name: str, seed: int = 0) -> Example:
    """A model of the zoo in double precision and training mode, with an example call."""
    torch.manual_seed(seed)
    model, call = ZOO[name]()
    return model.double().train(), call
