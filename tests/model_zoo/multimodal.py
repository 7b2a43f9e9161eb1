"""Models of two kinds of input at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from model_zoo.entry import BATCH, Entry, hf, ids, image_text, images, mask_of

_TEXT: dict[str, Any] = {}
_VISION: dict[str, Any] = {}


def _llava(model: nn.Module) -> dict[str, Any]:
    tokens = ids(length=24)
    tokens[:, 1:17] = 3
    return {
        "input_ids": tokens,
        "attention_mask": mask_of(tokens),
        "pixel_values": images(),
        "labels": tokens,
    }


def _vilt(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids(), "pixel_values": images(), "labels": torch.rand(BATCH, 6)}


def _captions(model: nn.Module) -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "pixel_values": images(), "labels": tokens}


ENTRIES: tuple[Entry, ...] = (
    hf("clip", "CLIPModel", image_text(return_loss=True), text_config=_TEXT, vision_config=_VISION,
       projection_dim=16),
    hf("siglip", "SiglipModel", image_text(return_loss=True), text_config={"projection_size": 32},
       vision_config=_VISION),
    hf("chinese-clip", "ChineseCLIPModel", image_text(return_loss=True), text_config=_TEXT,
       vision_config=_VISION, projection_dim=16),
    hf("altclip", "AltCLIPModel", image_text(return_loss=True), text_config={"project_dim": 16},
       vision_config=_VISION, projection_dim=16),
    hf("metaclip2", "MetaClip2Model", image_text(return_loss=True), text_config=_TEXT,
       vision_config=_VISION, projection_dim=16),
    hf("blip", "BlipForConditionalGeneration", _captions, text_config={"encoder_hidden_size": 32},
       vision_config=_VISION, projection_dim=16),
    hf("git", "GitForCausalLM", _captions, vision_config=_VISION),
    hf("vilt", "ViltForQuestionAnswering", _vilt),
    hf("clipseg", "CLIPSegModel", image_text(return_loss=True), text_config=_TEXT,
       vision_config=_VISION, projection_dim=16),
    hf("owlvit", "OwlViTModel", image_text(return_loss=True), text_config=_TEXT,
       vision_config=_VISION, projection_dim=16),
    hf("groupvit", "GroupViTModel", image_text(return_loss=True), text_config=_TEXT,
       vision_config={"depths": [1, 1], "num_hidden_layers": 2, "num_group_tokens": [8, 0],
                      "num_output_groups": [4, 2]},
       projection_dim=16, projection_intermediate_dim=24),
    hf("bridgetower", "BridgeTowerModel", image_text(), hidden_size=64,
       text_config={"hidden_size": 64}, vision_config={"hidden_size": 64}),
    hf("visual-bert", "VisualBertModel", lambda model: {
        "input_ids": ids(), "visual_embeds": torch.randn(BATCH, 4, 16)},
       visual_embedding_dim=16),
    hf("lxmert", "LxmertModel", lambda model: {
        "input_ids": ids(), "visual_feats": torch.randn(BATCH, 4, 16),
        "visual_pos": torch.rand(BATCH, 4, 4)},
       visual_feat_dim=16, l_layers=1, x_layers=1, r_layers=1),
    hf("llava", "LlavaForConditionalGeneration", _llava,
       text_config={"model_type": "llama"}, vision_config={"model_type": "clip_vision_model"},
       image_token_id=3, vision_feature_layer=-1),
    hf("paligemma", "PaliGemmaForConditionalGeneration", _llava,
       text_config={"model_type": "gemma"}, vision_config={"model_type": "siglip_vision_model"},
       image_token_id=3, projection_dim=32),
    hf("trocr-like", "VisionEncoderDecoderModel", lambda model: {
        "pixel_values": images(), "labels": ids(length=6)},
       encoder={"model_type": "vit"}, decoder={"model_type": "trocr"}, pad_token_id=0,
       decoder_start_token_id=1),
)  # fmt: skip
