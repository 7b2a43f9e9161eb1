"""Speech and audio."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from model_zoo.entry import BATCH, CLASSES, Entry, hf, ids, waveform

_CONV = {
    "conv_dim": [8, 8], "conv_kernel": [8, 3], "conv_stride": [4, 2], "mask_time_prob": 0.0,
    "apply_spec_augment": False, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}  # fmt: skip
_SAMPLES = 400


def _ctc(model: nn.Module) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, _SAMPLES), "labels": ids(length=5)}


def _spectrum(features: int, frames: int, **more: Any):
    return lambda model: {
        "input_features": torch.randn(BATCH, features, frames),
        "labels": ids(length=6),
        **more,
    }


ENTRIES: tuple[Entry, ...] = (
    hf("wav2vec2", "Wav2Vec2Model", waveform(_SAMPLES), **_CONV),
    hf("wav2vec2-ctc", "Wav2Vec2ForCTC", _ctc, **_CONV),
    hf("wav2vec2-layernorm", "Wav2Vec2Model", waveform(_SAMPLES), **_CONV,
       feat_extract_norm="layer", do_stable_layer_norm=True),
    hf("hubert", "HubertForCTC", _ctc, **_CONV),
    hf("wavlm", "WavLMModel", waveform(_SAMPLES), **_CONV, num_buckets=8, max_bucket_distance=16),
    hf("unispeech", "UniSpeechModel", waveform(_SAMPLES), **_CONV),
    hf("unispeech-sat", "UniSpeechSatModel", waveform(_SAMPLES), **_CONV),
    hf("data2vec-audio", "Data2VecAudioModel", waveform(_SAMPLES), **{
        k: v for k, v in _CONV.items() if k != "num_conv_pos_embeddings"},
       conv_pos_kernel_size=3, num_conv_pos_embeddings=1),
    hf("sew", "SEWModel", waveform(_SAMPLES), **_CONV, squeeze_factor=2),
    hf("sew-d", "SEWDModel", waveform(_SAMPLES), **_CONV, squeeze_factor=2,
       max_relative_positions=8, position_buckets=4),
    hf("wav2vec2-conformer", "Wav2Vec2ConformerModel", waveform(_SAMPLES), **_CONV,
       position_embeddings_type="relative", conv_depthwise_kernel_size=3),
    hf("wav2vec2-bert", "Wav2Vec2BertModel", lambda model: {
        "input_features": torch.randn(BATCH, 8, 16)}, feature_projection_input_dim=16,
       conv_depthwise_kernel_size=3, mask_time_prob=0.0, apply_spec_augment=False),
    hf("whisper", "WhisperForConditionalGeneration", _spectrum(8, 16), num_mel_bins=8,
       max_source_positions=8, max_target_positions=16),
    hf("speech-to-text", "Speech2TextForConditionalGeneration", lambda model: {
        "input_features": torch.randn(BATCH, 16, 8), "labels": ids(length=6)},
       input_feat_per_channel=8, conv_channels=8, num_conv_layers=2, max_source_positions=16,
       max_target_positions=16),
    hf("audio-spectrogram", "ASTForAudioClassification", lambda model: {
        "input_values": torch.randn(BATCH, 16, 16), "labels": torch.randint(CLASSES, (BATCH,))},
       max_length=16, num_mel_bins=16, time_stride=4, frequency_stride=4),
    hf("moonshine", "MoonshineForConditionalGeneration", lambda model: {
        "input_values": torch.randn(BATCH, 1200), "labels": ids(length=6)},
       encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
       decoder_num_attention_heads=4),
    hf("parakeet", "ParakeetForCTC", lambda model: {
        "input_features": torch.randn(BATCH, 32, 8), "labels": ids(length=2),
        "attention_mask": torch.ones(BATCH, 32, dtype=torch.long)},
       encoder_config={"num_mel_bins": 8, "subsampling_conv_channels": 8, "subsampling_factor": 4,
                       "layerdrop": 0.0}),
    hf("encodec", "EncodecModel", lambda model: {"input_values": torch.randn(BATCH, 1, 64)},
       num_filters=4, upsampling_ratios=[2, 2], codebook_size=16, codebook_dim=8,
       target_bandwidths=[24.0], hidden_size=8, chunk_length_s=None, modes=("eval",)),
)  # fmt: skip
