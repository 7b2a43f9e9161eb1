"""Small models whose sizes no mesh of two, three or four ranks divides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo import Example


class Mlp(nn.Module):
    """Five hidden units and a mean loss; returns loss and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(9, 5)
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.fc2(torch.relu(self.fc1(x)))
        return nn.functional.mse_loss(scores, target), scores


def mlp() -> Example:
    x, target = torch.randn(7, 9), torch.randn(7, 3)
    return Mlp(), {"x": x.double(), "target": target.double()}


class Conv(nn.Module):
    """A convolution in groups, batch norm, dropout and a classifier, on a batch of five."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(5, 7)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        scores = self.head(self.drop(features))
        return nn.functional.cross_entropy(scores, target), scores


def conv() -> Example:
    x = torch.randn(5, 3, 6, 6) * torch.arange(1, 6).view(5, 1, 1, 1)
    return Conv(), {"x": x.double(), "target": torch.randint(7, (5,))}


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=101, n_positions=16, n_embd=20, n_layer=2, n_head=5,
        resid_pdrop=0.0, embd_pdrop=0.1, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(101, (7, 6))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101, hidden_size=40, intermediate_size=27, num_hidden_layers=1,
        num_attention_heads=10, num_key_value_heads=5, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(101, (7, 5))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


ODD: dict[str, Callable[[], Example]] = {"mlp": mlp, "conv": conv, "gpt2": gpt2, "llama": llama}


def build(name: str, seed: int = 0) -> Example:
    """A model in double precision and training mode, with an example call."""
    torch.manual_seed(seed)
    model, call = ODD[name]()
    return model.double().train(), call
