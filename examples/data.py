"""Small real data that needs no download: English text from Python's own help pages."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

import torch
from torch import Tensor


def text_tokens(vocabulary: int) -> Tensor:
    """Python's help topics as token ids [tokens]: the most frequent words and marks come first."""
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)))
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts, key=lambda w: (-counts[w], w))
    ids = {word: min(i, vocabulary - 1) for i, word in enumerate(ranked)}
    return torch.tensor([ids[word] for word in words])


def text_batch(tokens: Tensor, step: int, batch: int, length: int) -> Tensor:
    """The batch of one step, [batch, length], the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts.tolist()])


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: images [1797, 1, 8, 8] in 0..1, labels [1797]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(data.target)
