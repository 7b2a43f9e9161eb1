"""Time series, decisions and other sequences that are not text."""

from __future__ import annotations

import torch

from model_zoo.entry import BATCH, Entry, hf

ENTRIES: tuple[Entry, ...] = (
    hf("patchtst", "PatchTSTForPrediction", lambda model: {
        "past_values": torch.randn(BATCH, 16, 3), "future_values": torch.randn(BATCH, 4, 3)},
       num_input_channels=3, context_length=16, patch_length=4, patch_stride=4,
       prediction_length=4, ffn_dim=48),
    hf("patchtsmixer", "PatchTSMixerForPrediction", lambda model: {
        "past_values": torch.randn(BATCH, 16, 3), "future_values": torch.randn(BATCH, 4, 3)},
       num_input_channels=3, context_length=16, patch_length=4, patch_stride=4,
       prediction_length=4, d_model=16, num_layers=2),
    hf("decision-transformer", "DecisionTransformerModel", lambda model: {
        "states": torch.randn(BATCH, 4, 5), "actions": torch.randn(BATCH, 4, 3),
        "rewards": torch.randn(BATCH, 4, 1), "returns_to_go": torch.randn(BATCH, 4, 1),
        "timesteps": torch.arange(4).repeat(BATCH, 1), "attention_mask": torch.ones(BATCH, 4)},
       state_dim=5, act_dim=3, max_ep_len=16),
    hf("time-series-transformer", "TimeSeriesTransformerForPrediction", lambda model: {
        "past_values": torch.randn(BATCH, 15), "past_time_features": torch.randn(BATCH, 15, 2),
        "past_observed_mask": torch.ones(BATCH, 15), "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 2)},
       prediction_length=4, context_length=8, num_time_features=2, lags_sequence=[1, 2, 7]),
    hf("informer", "InformerForPrediction", lambda model: {
        "past_values": torch.randn(BATCH, 15), "past_time_features": torch.randn(BATCH, 15, 2),
        "past_observed_mask": torch.ones(BATCH, 15), "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 2)},
       prediction_length=4, context_length=8, num_time_features=2, lags_sequence=[1, 2, 7],
       attention_type="full"),
    hf("autoformer", "AutoformerForPrediction", lambda model: {
        "past_values": torch.randn(BATCH, 15), "past_time_features": torch.randn(BATCH, 15, 2),
        "past_observed_mask": torch.ones(BATCH, 15), "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 2)},
       prediction_length=4, context_length=8, num_time_features=2, lags_sequence=[1, 2, 7],
       label_length=4, moving_average=3, double=False),
)  # fmt: skip
