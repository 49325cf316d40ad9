"""Shapes of published models, and machines, for `planner.py`.

The numbers are those of the models' published ``config.json`` files, as far as they decide sizes.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _decoder(
    model_type: str, sizes: tuple[int, int, int, int, int, int], context: int, **more: Any
) -> Config:
    """A config from (hidden, layers, heads, KV heads, feed-forward, vocabulary)."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary = sizes
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }


def _chatglm3(context: int) -> Config:
    return {
        "model_type": "chatglm",
        "hidden_size": 4096,
        "num_layers": 28,
        "num_attention_heads": 32,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 128,
        "ffn_hidden_size": 13696,
        "padded_vocab_size": 65024,
        "add_qkv_bias": True,
        "rmsnorm": True,
        "layernorm_epsilon": 1e-5,
        "post_layer_norm": True,
        "seq_length": context,
    }


_GLM = {"head_dim": 128, "attention_bias": True}
_QWEN3 = {"head_dim": 128}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_TIED = {"tie_word_embeddings": True}


def _every(pattern: int, layers: int) -> list[str]:
    """Sliding windows, and full attention in every so-manieth layer."""
    return [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(layers)
    ]


def _gemma2(sizes: tuple[int, int, int, int, int, int], head_dim: int) -> Config:
    more = {"head_dim": head_dim, "sliding_window": 4096, **_TIED}
    return _decoder("gemma2", sizes, 8192, layer_types=_every(2, sizes[1]), **more)


def _gemma3(sizes: tuple[int, int, int, int, int, int], head_dim: int) -> Config:
    more = {"head_dim": head_dim, "sliding_window": 1024, **_TIED}
    return _decoder("gemma3_text", sizes, 131072, layer_types=_every(6, sizes[1]), **more)


MODELS: dict[str, Config] = {
    "chatglm3-6b": _chatglm3(8192),
    "chatglm3-6b-128k": _chatglm3(131072),
    "glm-4-9b-chat": _decoder("glm", (4096, 40, 32, 2, 13696, 151552), 131072, **_GLM),
    "glm-4-32b-0414": _decoder("glm4", (6144, 61, 48, 2, 23040, 151552), 32768, head_dim=128),
    "llama-3.2-3b": _decoder(
        "llama", (3072, 28, 24, 8, 8192, 128256), 131072, head_dim=128, **_TIED
    ),
    "llama-3.1-8b": _decoder("llama", (4096, 32, 32, 8, 14336, 128256), 131072),
    "llama-3.1-70b": _decoder("llama", (8192, 80, 64, 8, 28672, 128256), 131072),
    "llama-2-13b": _decoder("llama", (5120, 40, 40, 40, 13824, 32000), 4096),
    "yi-34b-200k": _decoder("llama", (7168, 60, 56, 8, 20480, 64000), 200000),
    "qwen2.5-7b": _decoder("qwen2", (3584, 28, 28, 4, 18944, 152064), 131072),
    "qwen2.5-14b": _decoder("qwen2", (5120, 48, 40, 8, 13824, 152064), 131072),
    "qwen2.5-32b": _decoder("qwen2", (5120, 64, 40, 8, 27648, 152064), 131072),
    "qwen2.5-72b": _decoder("qwen2", (8192, 80, 64, 8, 29568, 152064), 131072),
    "qwen3-4b": _decoder("qwen3", (2560, 36, 32, 8, 9728, 151936), 40960, **_QWEN3, **_TIED),
    "qwen3-8b": _decoder("qwen3", (4096, 36, 32, 8, 12288, 151936), 40960, **_QWEN3),
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe", (2048, 48, 32, 4, 6144, 151936), 40960, **_QWEN3, **_QWEN3_MOE
    ),
    "mistral-7b-v0.1": _decoder(
        "mistral", (4096, 32, 32, 8, 14336, 32000), 32768, sliding_window=4096
    ),
    "mistral-small-24b": _decoder(
        "mistral", (5120, 40, 32, 8, 32768, 131072), 32768, head_dim=128, sliding_window=None
    ),
    "mixtral-8x7b": _decoder(
        "mixtral",
        (4096, 32, 32, 8, 14336, 32000),
        32768,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "gemma-2-9b": _gemma2((3584, 42, 16, 8, 14336, 256000), 256),
    "gemma-2-27b": _gemma2((4608, 46, 32, 16, 36864, 256000), 128),
    "gemma-3-12b": _gemma3((3840, 48, 16, 8, 15360, 262208), 256),
    "gemma-3-27b": _gemma3((5376, 62, 32, 16, 21504, 262208), 128),
    "phi-3-mini-4k": _decoder("phi3", (3072, 32, 32, 32, 8192, 32064), 4096, sliding_window=2047),
    "phi-4": _decoder("phi3", (5120, 40, 40, 10, 17920, 100352), 16384, sliding_window=None),
    "deepseek-v2-lite": _decoder(
        "deepseek_v2",
        (2048, 27, 16, 16, 10944, 102400),
        163840,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        topk_method="greedy",
    ),
    "falcon-7b": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "vocab_size": 65024,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    },
    "bloom-7b1": {
        "model_type": "bloom",
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "vocab_size": 250880,
    },
    "opt-13b": {
        "model_type": "opt",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "word_embed_proj_dim": 5120,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    },
    "olmo-2-13b": _decoder("olmo2", (5120, 40, 40, 40, 13824, 100352), 4096),
    "starcoder2-15b": _decoder(
        "starcoder2", (6144, 40, 48, 4, 24576, 49152), 16384, sliding_window=4096
    ),
    "granite-3.1-8b": _decoder("granite", (4096, 40, 32, 8, 12800, 49155), 131072, **_TIED),
    "command-r-35b": _decoder("cohere", (8192, 40, 64, 64, 22528, 256000), 131072, **_TIED),
    "glm-4.5-air": _decoder(
        "glm4_moe",
        (4096, 46, 96, 8, 10944, 151552),
        131072,
        **_GLM,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    # A hybrid: short convolutions, and attention in eight of its layers.
    "lfm2-2.6b": _decoder(
        "lfm2",
        (2048, 30, 32, 8, 10752, 65536),
        128000,
        layer_types=[
            "full_attention" if index in (2, 6, 10, 14, 18, 21, 24, 27) else "conv"
            for index in range(30)
        ],
        **_TIED,
    ),
}

# As `--gpus` takes them. Cards have speeds, and links where they are published; budgets alone
# have none.
MACHINES: dict[str, str] = {
    "1 x 24": "24GiB",
    "2 x 24": "2x24GiB",
    "4 x 24": "4x24GiB",
    "8 x 24": "8x24GiB",
    "2 x 16": "2x16GiB",
    "4 x 16": "4x16GiB",
    "3 x 12": "3x12GiB",
    "8 x 12": "8x12GiB",
    "4 x 80": "4x80GiB",
    "24 + 12": "24GiB,12GiB",
    "12 + 24": "12GiB,24GiB",
    "80 + 24": "80GiB,24GiB",
    "24 + 80": "24GiB,80GiB",
    "8 + 12 + 24": "8GiB,12GiB,24GiB",
    "2 x 24, the first busy": "9GiB,24GiB",
    "4 x 24, the third busy": "24GiB,24GiB,5GiB,24GiB",
    "8 unequal": "24GiB,24GiB,16GiB,16GiB,12GiB,12GiB,10GiB,8GiB",
    "8 unequal, small first": "8GiB,10GiB,12GiB,12GiB,16GiB,16GiB,24GiB,24GiB",
    "RTX 4090 + RTX 3060": "RTX4090+RTX3060",
    "2 x RTX 3090 + RTX A6000": "2xRTX3090+RTXA6000",
}

CONTEXTS = (1024, 8192, 32768, 131072)
BATCHES = (1, 4, 16)
