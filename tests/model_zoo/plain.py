"""Models written in plain PyTorch, each for a kind of computation that transformers lack."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_zoo.entry import BATCH, CLASSES, VOCABULARY, Entry, ids


class Recurrent(nn.Module):
    """A classifier of token sequences by the last state of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rnn = kind(16, 12, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(12 * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        features, _ = self.rnn(self.embed(input_ids))
        return F.cross_entropy(self.head(features[:, -1]), labels)


class UNet(nn.Module):
    """Down, up, and skips between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = self._block(3, width)
        self.down = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.middle = self._block(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = self._block(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        kept = self.enter(images)
        deep = self.up(self.middle(F.max_pool2d(self.down(kept), 1)))
        return F.cross_entropy(self.head(self.leave(torch.cat([kept, deep], 1))), labels)


class Adversarial(nn.Module):
    """A generator and a critic trained in one step, the critic's view of the fakes detached."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4),
        )  # fmt: skip

    def forward(self, noise: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        fakes = self.generator(noise)
        real, fake = self.critic(images).flatten(), self.critic(fakes.detach()).flatten()
        critic = F.softplus(-real).mean() + F.softplus(fake).mean()
        return critic, F.softplus(-self.critic(fakes).flatten()).mean()


class Autoencoder(nn.Module):
    """A variational autoencoder: noise from `randn_like`, two terms in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12))
        self.decoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        distance = F.binary_cross_entropy_with_logits(self.decoder(code), x.sigmoid())
        prior = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return distance + 0.1 * prior


class Messages(nn.Module):
    """A graph network: messages along edges, added up at the nodes, and attention by edge."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(16, 16)
        self.update = nn.Linear(16, 8)
        self.score = nn.Linear(16, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        pair = torch.cat([nodes[source], nodes[target]], -1)
        weight = self.score(pair).squeeze(-1)
        top = torch.full((len(nodes),), -1e9, dtype=nodes.dtype)
        top = top.scatter_reduce(0, target, weight.detach(), "amax")
        weight = (weight - top[target]).exp()
        total = torch.zeros(len(nodes), dtype=nodes.dtype).index_add(0, target, weight)
        message = self.message(pair) * (weight / total[target]).unsqueeze(-1)
        gathered = torch.zeros(len(nodes), 16, dtype=nodes.dtype).index_add(0, target, message)
        degree = torch.zeros(len(nodes), dtype=nodes.dtype).scatter_add(
            0, target, torch.ones_like(weight)
        )
        hidden = self.update(gathered / degree.clamp(min=1).unsqueeze(-1)).relu() + nodes
        return F.cross_entropy(self.head(hidden), labels)


class Recommender(nn.Module):
    """Sparse features by embedding bags, dense ones by layers, all pairs multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(size, 8, mode=mode) for size, mode in ((20, "sum"), (12, "mean"))
        )
        self.bottom = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.top = nn.Sequential(nn.Linear(11, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, dense: Tensor, first: Tensor, second: Tensor, clicks: Tensor) -> Tensor:
        features = [self.bottom(dense), self.bags[0](first), self.bags[1](second)]
        stacked = torch.stack(features, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        row, column = torch.tril_indices(3, 3, -1)
        crossed = products[:, row, column]
        score = self.top(torch.cat([features[0], crossed], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, clicks)


class Translator(nn.Module):
    """`nn.Transformer` with causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], dtype=self.embed.weight.dtype
        )
        y = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=causal,
            src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return F.cross_entropy(self.head(y).flatten(0, 1), target.flatten())


class Volumes(nn.Module):
    """Convolutions in three dimensions and in one, dilated, and all kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv3d(2, 6, 3, padding=1)
        self.line = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(6, 12, 3, padding=2, dilation=2, groups=2)
        )
        self.causal = nn.Conv1d(12, 12, 3, groups=12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool3d(self.space(volume).relu(), 2)
        x = F.gelu(self.line(F.adaptive_avg_pool3d(x, (2, 1, 4)).flatten(2)))
        x = self.causal(F.pad(x, (2, 0)))
        x = F.avg_pool1d(x, 2).unflatten(-1, (2, -1)).mean(-1)
        x = F.interpolate(x, scale_factor=2.0, mode="linear").amax(-1)
        return F.cross_entropy(self.head(x), labels)


class Straight(torch.autograd.Function):
    """A rounding whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Quantised(nn.Module):
    """An autograd function of the user's own, and a checkpointed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = Straight.apply(self.first(x).tanh(), 8.0)
        x = checkpoint(self.second, x, use_reentrant=False).relu()
        return F.cross_entropy(self.head(x), labels)


class Mixer(nn.Module):
    """`einsum`, `roll`, `unfold` and `fold`, sorting and a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 4) * 0.3)
        self.pair = nn.Bilinear(12, 12, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        rolled = torch.roll(images, shifts=(1, -1), dims=(2, 3))
        windows = F.unfold(rolled, 2, stride=2)
        folded = F.fold(windows * 0.5, (8, 8), 2, stride=2)
        x = torch.einsum("bchw,cde->bdewh", folded, self.weight)
        top, _ = x.mean(-1).flatten(1).sort(-1)
        best, _ = x.amax(3).flatten(1).topk(12, -1)
        return F.cross_entropy(self.head(self.pair(top[:, :12], best)), labels)


def _entry(name: str, make: Any, call: Any, **more: Any) -> Entry:
    return Entry(name, make, lambda model: call(), **more)


def _tokens() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": torch.randint(CLASSES, (BATCH,))}


def _pictures(size: int = 8) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


ENTRIES: tuple[Entry, ...] = (
    _entry("lstm", lambda: Recurrent(nn.LSTM), _tokens),
    _entry("lstm-bidirectional", lambda: Recurrent(nn.LSTM, bidirectional=True, dropout=0.2),
           _tokens),
    _entry("gru", lambda: Recurrent(nn.GRU), _tokens),
    _entry("rnn", lambda: Recurrent(nn.RNN, nonlinearity="tanh"), _tokens),
    _entry("u-net", UNet, lambda: {
        "images": _pictures(), "labels": torch.randint(CLASSES, (BATCH, 8, 8))}),
    _entry("gan", Adversarial, lambda: {
        "noise": torch.randn(BATCH, 8, 1, 1), "images": _pictures()}),
    _entry("vae", Autoencoder, lambda: {"x": torch.randn(BATCH, 20)}),
    _entry("graph-network", Messages, lambda: {
        "nodes": torch.randn(12, 8), "edges": torch.randint(12, (2, 24)),
        "labels": torch.randint(CLASSES, (12,))}),
    _entry("recommender", Recommender, lambda: {
        "dense": torch.randn(BATCH, 6), "first": torch.randint(20, (BATCH, 3)),
        "second": torch.randint(12, (BATCH, 2)), "clicks": torch.rand(BATCH).round()}),
    _entry("nn-transformer", Translator, lambda: {
        "source": ids(), "target": ids(length=6),
        "padding": torch.arange(8).expand(BATCH, 8) > 6}),
    _entry("convolutions", Volumes, lambda: {
        "volume": torch.randn(BATCH, 2, 4, 4, 8), "labels": torch.randint(CLASSES, (BATCH,))}),
    _entry("own-function", Quantised, lambda: {
        "x": torch.randn(BATCH, 12), "labels": torch.randint(CLASSES, (BATCH,))}),
    _entry("mixed-operators", Mixer, lambda: {
        "images": _pictures(), "labels": torch.randint(CLASSES, (BATCH,))}),
)  # fmt: skip
