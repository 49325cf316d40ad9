"""Memory of mixtures of experts over CUDA, with experts on the GPU and on the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cuda_rig.forecasting import Case, counted, forecast, run

from duoka.forecast.workload import ALL_EXPERTS, Workload

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 192,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 512, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "max_position_embeddings": 4096, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 64, "qk_head_dim": 64, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 192}),
    "mixtral": ("MixtralForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**LATENT, "head_dim": 32}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "dots1": ("Dots1ForCausalLM", {}),
}
CACHE_BYTES = 600_000
"""Six of a layer's 16 experts."""
LOADS: dict[str, dict[str, Any]] = {
    "decode": {"prompt_tokens": 4, "new_tokens": 40},
    "prefill": {"prompt_tokens": 300, "new_tokens": 2},
    "batch 8": {"prompt_tokens": 60, "new_tokens": 8, "batch": 8},
}


@pytest.mark.nightly
@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("experts", ["gpu", "host", "fetch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_memory(family: str, experts: str, load: str) -> None:
    """Reserved bytes are the forecast's, with experts on the host up to a segment of 2 MiB.

    A prompt of few tokens fetches no experts from the host, and the forecast is for any prompt.
    """
    architecture, more = FAMILIES[family]
    config = {"model_type": family, "architectures": [architecture], **SIZES, **more}
    hosts = () if experts == "gpu" else ALL_EXPERTS
    work: dict[str, Any] = LOADS[load]
    workload = Workload(
        dtype="bfloat16", quantize="int4", host_experts=hosts,
        expert_cache_bytes=CACHE_BYTES if experts == "fetch" else 0, **work,
    )  # fmt: skip
    case = Case(config=config, gpus="1GiB", workload=workload)
    plan = case.plan(case.profile())
    run(plan, case.build())
    ((_, told),), ((_, taken),) = forecast(plan), counted(plan)
    # The rows of benchmarks/archive/expert_families_rig_….md.
    if table := os.environ.get("DUOKA_TABLE"):
        with Path(table).open("a") as file:
            print(f"| {family} | {experts} | {load} | {told:,} | {taken:,} |", file=file)
    segments = 0 if experts == "gpu" else 2 if load == "decode" else 1
    assert 0 <= told - taken <= segments * 2**21
