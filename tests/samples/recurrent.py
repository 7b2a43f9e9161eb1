"""Samples of recurrent layers: one and two directions, several layers, projections."""

from __future__ import annotations

from torch import Tensor

from samples.sample import Sample, normal

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _weights(
    kind: str, layers: int, ways: int, projected: int = 0, biased: bool = True
) -> list[Tensor]:
    inputs, width, gates = 3, 2, _GATES[kind]
    outputs = projected or width
    found = []
    for layer in range(layers):
        for way in range(ways):
            read = inputs if layer == 0 else outputs * ways
            seed = 10 * layer + way
            found.append(normal(gates * width, read, seed=seed))
            found.append(normal(gates * width, outputs, seed=seed))
            if biased:
                found += [normal(gates * width, seed=seed), normal(gates * width, seed=seed + 1)]
            if projected:
                found.append(normal(projected, width, seed=seed))
    return found


def _sample(kind: str, label: str, layers: int = 1, ways: int = 1, first: bool = True,
            projected: int = 0, biased: bool = True) -> Sample:  # fmt: skip
    x = normal(12, 2, 3) if first else normal(2, 12, 3)
    state = normal(layers * ways, 12, projected or 2)
    states = [state, normal(layers * ways, 12, 2, seed=1)] if kind == "lstm" else state
    weights = _weights(kind, layers, ways, projected, biased)
    args = (x, states, weights, biased, layers, 0.0, True, ways == 2, first)
    return Sample(f"aten.{kind}.input", args, label=label)


SAMPLES = (
    _sample("lstm", "batch first"),
    _sample("lstm", "time first, both ways", ways=2, first=False),
    _sample("lstm", "two layers", layers=2, biased=False),
    _sample("lstm", "projected", projected=1),
    _sample("gru", "batch first"),
    _sample("gru", "two layers both ways", layers=2, ways=2),
    _sample("rnn_tanh", "time first", first=False),
    _sample("rnn_relu", "batch first"),
)
