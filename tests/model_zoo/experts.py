"""Mixtures of experts: implementations of fixed shapes where there are some, and loops."""

from __future__ import annotations

from model_zoo.entry import Entry, causal, hf, seq2seq

_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    hf("mixtral", "MixtralForCausalLM", causal, num_local_experts=4, output_router_logits=True,
       experts="grouped_mm", double=False),
    hf("mixtral-batched", "MixtralForCausalLM", causal, num_local_experts=4,
       output_router_logits=True, experts="batched_mm"),
    hf("qwen2-moe", "Qwen2MoeForCausalLM", causal, **_FEW, shared_expert_intermediate_size=16,
       output_router_logits=True, experts="batched_mm"),
    hf("qwen3-moe", "Qwen3MoeForCausalLM", causal, **_FEW, experts="grouped_mm", double=False),
    hf("olmoe", "OlmoeForCausalLM", causal, num_experts=4, num_experts_per_tok=2,
       intermediate_size=16, experts="batched_mm"),
    hf("granitemoe", "GraniteMoeForCausalLM", causal, num_local_experts=4, num_experts_per_tok=2,
       experts="batched_mm"),
    hf("granitemoe-shared", "GraniteMoeSharedForCausalLM", causal, num_local_experts=4,
       num_experts_per_tok=2, shared_intermediate_size=16, experts="batched_mm"),
    hf("phimoe", "PhimoeForCausalLM", causal, num_local_experts=4, num_experts_per_tok=2,
       experts="batched_mm"),
    hf("gpt-oss", "GptOssForCausalLM", causal, num_local_experts=4, num_experts_per_tok=2,
       sliding_window=4, experts="batched_mm"),
    hf("deepseek-v2", "DeepseekV2ForCausalLM", causal, **_DEEPSEEK, experts="batched_mm"),
    hf("deepseek-v3", "DeepseekV3ForCausalLM", causal, **_DEEPSEEK, experts="batched_mm"),
    hf("ernie4.5-moe", "Ernie4_5_MoeForCausalLM", causal, moe_num_experts=4, moe_k=2,
       moe_intermediate_size=16, moe_num_shared_experts=1, moe_layer_start_index=1,
       moe_layer_end_index=2, experts="batched_mm"),
    hf("glm4-moe", "Glm4MoeForCausalLM", causal, n_routed_experts=4, num_experts_per_tok=2,
       moe_intermediate_size=16, n_group=2, topk_group=1, first_k_dense_replace=1,
       experts="batched_mm"),
    hf("dbrx", "DbrxForCausalLM", causal, experts="batched_mm",
       attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
       ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}),
    hf("jetmoe", "JetMoeForCausalLM", causal, num_local_experts=4, num_experts_per_tok=2,
       kv_channels=8, num_key_value_heads=2),
    hf("jamba", "JambaForCausalLM", causal, num_experts=4, num_experts_per_tok=2,
       mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, attn_layer_period=2,
       attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, experts="batched_mm"),
    # With dropout its loop over experts draws for those that were hit alone, and stays whole.
    hf("switch-transformers", "SwitchTransformersForConditionalGeneration", seq2seq,
       dropout_rate=0.0, num_experts=4, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2,
       num_heads=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, double=False),
)  # fmt: skip
