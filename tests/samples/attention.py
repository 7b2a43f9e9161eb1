"""Samples of `ir/rules/attention.py`."""

import math

import torch

from samples.sample import Sample, booleans, normal

_OP = "aten.scaled_dot_product_attention.default"
_q, _k, _v = normal(2, 4, 6, 4), normal(2, 4, 4, 4), normal(2, 4, 4, 3)
_kv = normal(2, 2, 4, 4), normal(2, 2, 4, 3)
_mask = booleans(6, 4) | torch.eye(6, 4, dtype=torch.bool) | (torch.arange(6) > 3)[:, None]
_bias = normal(2, 1, 6, 4)
_head_bias = normal(1, 4, 6, 4)
_causal_k, _causal_v = normal(2, 4, 6, 4, seed=1), normal(2, 4, 6, 4, seed=2)
_padding = torch.zeros(2, 1, 1, 4, dtype=torch.float64)
_padding[1, ..., 3:] = -math.inf

SAMPLES = tuple(
    Sample(_OP, args, kwargs, label=f"{label}{', dropout' if kwargs.get('dropout_p') else ''}")
    for p in (0.0, 0.3)
    for args, kwargs, label in (
        ((_q, _k, _v), {"dropout_p": p}, "plain"),
        ((_q, _k, _v, _mask, p), {}, "bool mask"),
        ((_q, _k, _v, _bias, p), {"scale": 0.3}, "bias per sample"),
        ((_q, _k, _v, _head_bias, p), {}, "bias per head"),
        ((_q, _k, _v, _padding, p), {}, "padding"),
        ((_q, _causal_k, _causal_v, None, p, True), {}, "causal"),
        ((_q, *_kv, None, p), {"enable_gqa": True}, "grouped queries"),
        ((_q, *_kv, _head_bias, p), {"enable_gqa": True}, "grouped queries with a bias"),
        ((normal(4, 6, 4), normal(4, 4, 4), normal(4, 4, 4, seed=1), None, p), {}, "3-d"),
    )
)
