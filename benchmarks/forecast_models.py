"""Shapes of published models, as their configurations state them."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3Config, Glm4vConfig, LlavaConfig, Qwen2_5_VLConfig, Qwen2VLConfig


def _gqa(layers: int, hidden: int, heads: int, groups: int, inner: int, words: int) -> dict:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "vocab_size": words,
        "max_position_embeddings": 131072,
    }


def _pictured(config: Any, name: str, **text: Any) -> dict[str, Any]:
    made = {**config.to_dict(), "architectures": [name]}
    made["text_config"].update(text)
    made["text_config"].pop("layer_types", None)  # of the default number of layers
    return made


SIZES: dict[str, dict[str, Any]] = {
    "glm-4-9b": {
        **_gqa(40, 4096, 32, 2, 13696, 151552),
        "model_type": "glm",
        "head_dim": 128,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "llama-3-8b": {**_gqa(32, 4096, 32, 8, 14336, 128256), "model_type": "llama"},
    "llama-2-7b": {**_gqa(32, 4096, 32, 32, 11008, 32000), "model_type": "llama"},
    "qwen2.5-7b": {**_gqa(28, 3584, 28, 4, 18944, 152064), "model_type": "qwen2"},
    "qwen3-0.6b": {  # tied head
        **_gqa(28, 1024, 16, 8, 3072, 151936),
        "model_type": "qwen3",
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},  # tied
    "bloom-7b1": {
        "model_type": "bloom",
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "vocab_size": 250880,
    },
    "mistral-7b": {  # every layer with a window
        **_gqa(32, 4096, 32, 8, 14336, 32000),
        "model_type": "mistral",
        "sliding_window": 4096,
    },
    "gemma-3-4b": {  # five layers with a window for one without
        **_gqa(34, 2560, 8, 4, 10240, 262208),
        "model_type": "gemma3_text",
        "head_dim": 256,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {
        **_gqa(32, 4096, 32, 8, 14336, 32000),
        "model_type": "mixtral",
        "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        **_gqa(48, 2048, 32, 4, 6144, 151936),
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "deepseek-v2-lite": {  # latent attention
        **_gqa(27, 2048, 16, 16, 10944, 102400),
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "vocab_size": 50288,
    },
    "bamba-9b": {  # state space, and attention in three layers
        **_gqa(32, 4096, 32, 8, 14336, 128256),
        "model_type": "bamba",
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
    },
    "t5-large": {
        "model_type": "t5",
        "d_model": 1024,
        "d_ff": 4096,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "num_heads": 16,
        "vocab_size": 32128,
    },
    "bart-large": {
        "model_type": "bart",
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "vocab_size": 50265,
        "max_position_embeddings": 4096,
    },
    "glm-4v-9b": {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "hidden_size": 4096,
        "num_layers": 40,
        "ffn_hidden_size": 13696,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "add_qkv_bias": True,
        "padded_vocab_size": 151552,
        "seq_length": 8192,
        "layernorm_epsilon": 1.5625e-07,
        "rope_ratio": 1,
        "torch_dtype": "bfloat16",
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
        "boi_token_id": 151339,
        "eoi_token_id": 151340,
        "vision_config": {
            "hidden_size": 1792,
            "num_hidden_layers": 63,
            "num_heads": 16,
            "intermediate_size": 15360,
            "patch_size": 14,
            "image_size": 1120,
            "num_positions": 6401,
            "in_channels": 3,
            "layer_norm_eps": 1e-06,
            "scaling_factor": 8,
        },
    },
    "glm-4.1v-9b": _pictured(
        Glm4vConfig(),
        "Glm4vForConditionalGeneration",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen2-vl-7b": _pictured(
        Qwen2VLConfig(),
        "Qwen2VLForConditionalGeneration",
        **_gqa(28, 3584, 28, 4, 18944, 152064),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [16, 24, 24],
        },
    ),
    "qwen2.5-vl-7b": _pictured(
        Qwen2_5_VLConfig(),
        "Qwen2_5_VLForConditionalGeneration",
        **_gqa(28, 3584, 28, 4, 18944, 152064),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [16, 24, 24],
        },
    ),
    "llava-1.5-7b": _pictured(LlavaConfig(), "LlavaForConditionalGeneration"),
    "gemma-3-4b-it": _pictured(
        Gemma3Config(
            vision_config={
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
            }
        ),
        "Gemma3ForConditionalGeneration",
        **_gqa(34, 2560, 8, 4, 10240, 262208),
    ),
}
