"""Vision models: transformers, convolutional networks, detection and segmentation."""

from __future__ import annotations

import torch
from torch import nn

from model_zoo.entry import BATCH, Entry, hf, image_class, image_features, images

_RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
    "layer_type": "basic", "out_features": ["stage2"],
}  # fmt: skip


def _segmentation(size: int = 32, classes: int = 6):
    def call(model: nn.Module) -> dict[str, object]:
        return {"pixel_values": images(size), "labels": torch.randint(classes, (BATCH, size, size))}

    return call


def _video(frames: int = 4, size: int = 16):
    return lambda model: {
        "pixel_values": torch.randn(BATCH, frames, 3, size, size),
        "labels": torch.randint(6, (BATCH,)),
    }


ENTRIES: tuple[Entry, ...] = (
    hf("vit", "ViTForImageClassification", image_class()),
    hf("deit", "DeiTForImageClassification", image_class()),
    hf("beit", "BeitForImageClassification", image_class(), use_relative_position_bias=True),
    hf("data2vec-vision", "Data2VecVisionForImageClassification", image_class()),
    hf("dinov2", "Dinov2ForImageClassification", image_class()),
    hf("dinov2-registers", "Dinov2WithRegistersForImageClassification", image_class()),
    hf("dinov3-vit", "DINOv3ViTModel", image_features()),
    hf("ijepa", "IJepaForImageClassification", image_class()),
    hf("vit-msn", "ViTMSNForImageClassification", image_class()),
    hf("vit-mae", "ViTMAEForPreTraining", image_features(), decoder_num_hidden_layers=1,
       decoder_hidden_size=16, decoder_intermediate_size=24, decoder_num_attention_heads=4),
    hf("yolos", "YolosModel", image_features(), image_size=[16, 16], num_detection_tokens=4),
    hf("swin", "SwinForImageClassification", image_class(32), image_size=32, patch_size=4,
       embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    hf("swinv2", "Swinv2ForImageClassification", image_class(32), image_size=32, patch_size=4,
       embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    hf("donut-swin", "DonutSwinModel", image_features(32), image_size=32, patch_size=4,
       embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    hf("hiera", "HieraForImageClassification", image_class(32), image_size=[32, 32],
       patch_size=[7, 7], embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2, 4],
       masked_unit_size=[4, 4], query_stride=[2, 2], num_query_pool=2),
    hf("pvt", "PvtForImageClassification", image_class(32), image_size=32, hidden_sizes=[16, 32],
       depths=[1, 1], num_attention_heads=[2, 4], mlp_ratios=[2, 2], num_encoder_blocks=2,
       patch_sizes=[4, 2], strides=[4, 2], sequence_reduction_ratios=[2, 1]),
    hf("pvt-v2", "PvtV2ForImageClassification", image_class(32), image_size=32,
       hidden_sizes=[16, 32], depths=[1, 1], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
       num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], sr_ratios=[2, 1]),
    hf("cvt", "CvtForImageClassification", image_class(32), embed_dim=[16, 32], num_heads=[2, 4],
       depth=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1],
       mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
       drop_path_rate=[0.0, 0.1], qkv_bias=[True, True], cls_token=[False, True],
       qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1],
       stride_kv=[2, 2], padding_q=[1, 1],
       stride_q=[1, 1]),
    hf("levit", "LevitForImageClassification", image_class(64), image_size=64, patch_size=16,
       hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1],
       key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2]),
    hf("focalnet", "FocalNetForImageClassification", image_class(32), image_size=32, embed_dim=16,
       depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[16, 32]),
    hf("convnext", "ConvNextForImageClassification", image_class(32), hidden_sizes=[16, 32],
       depths=[1, 1], num_stages=2),
    hf("convnextv2", "ConvNextV2ForImageClassification", image_class(32), hidden_sizes=[16, 32],
       depths=[1, 1], num_stages=2),
    hf("resnet", "ResNetForImageClassification", image_class(32), embedding_size=8,
       hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck"),
    hf("regnet", "RegNetForImageClassification", image_class(32), embedding_size=8,
       hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    hf("bit", "BitForImageClassification", image_class(32), embedding_size=8,
       hidden_sizes=[16, 32], depths=[1, 1], num_groups=4, layer_type="preactivation"),
    hf("efficientnet", "EfficientNetForImageClassification", image_class(32), image_size=32,
       width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320, kernel_sizes=[3, 5],
       in_channels=[32, 16], out_channels=[16, 24], strides=[1, 2], num_block_repeats=[1, 1],
       expand_ratios=[1, 6], depthwise_padding=[]),
    hf("mobilenet-v1", "MobileNetV1ForImageClassification", image_class(32), image_size=32,
       depth_multiplier=0.25, min_depth=8),
    hf("mobilenet-v2", "MobileNetV2ForImageClassification", image_class(32), image_size=32,
       depth_multiplier=0.25, min_depth=8),
    hf("mobilevit", "MobileViTForImageClassification", image_class(64), image_size=64, patch_size=2,
       hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
       num_hidden_layers=1),
    hf("mobilevitv2", "MobileViTV2ForImageClassification", image_class(64), image_size=64,
       patch_size=2, width_multiplier=0.25, n_attn_blocks=[1, 1, 1]),
    hf("poolformer", "PoolFormerForImageClassification", image_class(32), hidden_sizes=[16, 32],
       depths=[1, 1], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], num_encoder_blocks=2,
       mlp_ratio=2.0),
    hf("swiftformer", "SwiftFormerForImageClassification", image_class(64), image_size=64,
       depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32]),
    hf("segformer", "SegformerForSemanticSegmentation", _segmentation(32),
       hidden_sizes=[16, 32], depths=[1, 1], num_attention_heads=[2, 4], num_encoder_blocks=2,
       sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
       decoder_hidden_size=32),
    hf("mobilenet-v2-segmentation", "MobileNetV2ForSemanticSegmentation", _segmentation(32),
       image_size=32, depth_multiplier=0.25, min_depth=8),
    hf("upernet", "UperNetForSemanticSegmentation", _segmentation(32), hidden_size=16,
       backbone_config={**_RESNET, "out_features": ["stage1", "stage2"]}, pool_scales=[1, 2],
       use_auxiliary_head=False),
    hf("dpt", "DPTForSemanticSegmentation", _segmentation(32), image_size=32,
       num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
       neck_hidden_sizes=[8, 16, 16, 32], fusion_hidden_size=16, reassemble_factors=[4, 2, 1, 0.5],
       is_hybrid=False),
    hf("glpn", "GLPNForDepthEstimation", image_features(32), hidden_sizes=[16, 32], depths=[1, 1],
       num_attention_heads=[2, 4], num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3],
       strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16),
    hf("depth-anything", "DepthAnythingForDepthEstimation", image_features(16),
       backbone_config={"model_type": "dinov2", "image_size": 16, "out_indices": [1, 2],
                        "reshape_hidden_states": False},
       patch_size=4, reassemble_hidden_size=32, reassemble_factors=[2, 1],
       neck_hidden_sizes=[8, 16], fusion_hidden_size=8),
    hf("detr", "DetrModel", image_features(32), use_timm_backbone=False, backbone_config=_RESNET,
       num_queries=4, backbone=None, dropout=0.0),
    hf("conditional-detr", "ConditionalDetrModel", image_features(32), use_timm_backbone=False,
       backbone_config=_RESNET, num_queries=4, backbone=None, dropout=0.0),
    hf("deformable-detr", "DeformableDetrModel", image_features(32), use_timm_backbone=False,
       backbone_config={**_RESNET, "out_features": ["stage1", "stage2"]}, num_queries=4,
       backbone=None, dropout=0.0, num_feature_levels=2, encoder_n_points=2, decoder_n_points=2),
    hf("sam-vision", "SamVisionModel", image_features(16), output_channels=16,
       global_attn_indexes=[1], window_size=2, mlp_dim=48, num_pos_feats=8),
    hf("vitdet", "VitDetModel", image_features(16), window_size=2, window_block_indices=[0]),
    hf("videomae", "VideoMAEForVideoClassification", _video(), num_frames=4, tubelet_size=2),
    hf("timesformer", "TimesformerForVideoClassification", _video(), num_frames=4),
    hf("vivit", "VivitForVideoClassification", _video(), num_frames=4, tubelet_size=[2, 4, 4]),
    hf("vitmatte", "VitMatteForImageMatting", lambda model: {
        "pixel_values": images(32, 4)}, backbone_config={
            "model_type": "vitdet", "num_channels": 4, "window_size": 2, "image_size": 32,
            "patch_size": 16,
            "window_block_indices": [0], "out_features": ["stage2"]},
       hidden_size=32, convstream_hidden_sizes=[8, 16, 16], fusion_hidden_sizes=[32, 16, 8, 8]),
)  # fmt: skip
