"""Layers of a cache that hold keys and a state: what fills one of them stays on one device."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    PreTrainedModel,
    Zamba2Config,
    Zamba2ForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)

import duoka
from duoka import Placement, Workload, virtual
from duoka.tracing.get_profile import profile_module

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MAMBA: dict[str, Any] = {"mamba_d_state": 8, "chunk_size": 16, "use_mem_eff_path": False}
NUM_GPUS = 8
WORK = Workload(prompt_tokens=12, new_tokens=4, prefill_chunk_tokens=None)


def zamba() -> PreTrainedModel:
    return ZambaForCausalLM(
        ZambaConfig(
            **SIZES,
            num_hidden_layers=6,
            n_mamba_heads=2,
            mamba_d_state=8,
            mamba_dt_rank=4,
            attn_layer_period=3,
            attn_layer_offset=2,
            attention_head_dim=32,
            use_mamba_kernels=False,
        )
    )


def zamba2(num_mem_blocks: int = 2) -> PreTrainedModel:
    return Zamba2ForCausalLM(
        Zamba2Config(
            **SIZES,
            **MAMBA,
            num_hidden_layers=6,
            n_mamba_heads=8,
            mamba_ngroups=1,
            adapter_rank=4,
            num_mem_blocks=num_mem_blocks,
            hybrid_layer_ids=[2, 5],
            layers_block_type=["mamba", "mamba", "hybrid"] * 2,
        )
    )


def falcon() -> PreTrainedModel:
    return FalconH1ForCausalLM(
        FalconH1Config(
            **SIZES,
            num_hidden_layers=4,
            head_dim=16,
            mamba_d_ssm=64,
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_chunk_size=16,
        )
    )


BUILT = {"zamba2": zamba2, "zamba2, one block": lambda: zamba2(1), "zamba": zamba}
BUILT["falcon_h1"] = falcon
OTHERS = ("jamba", "bamba", "lfm2", "lfm2_moe", "qwen3_next", "recurrent_gemma", "mamba2", "zaya")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*BUILT, *OTHERS])
def test_beams_on_a_gpu_for_each_block_are_those_of_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model: Any = BUILT[name]().eval() if name in BUILT else families.build(name)
    profile = profile_module(model, WORK, None)
    roots = [profile.root_of(index) for index in range(len(profile.blocks))]
    gpus = {root: number % NUM_GPUS for number, root in enumerate(dict.fromkeys(roots))}
    entries = [
        (module, f"vgpu:{gpus[root]}")
        for block, root in zip(profile.blocks, roots, strict=True)
        for module in block.modules
    ]
    assert len(gpus) > 3
    ids = torch.tensor([[9, 8, 7, 6]])
    options = {"num_beams": 3, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    with virtual.gpus([None] * NUM_GPUS, data="cpu"):
        spread: Any = duoka.dispatch(copy.deepcopy(model), Placement(entries=tuple(entries)))
        assert torch.equal(spread.generate(ids, **options).cpu(), expected)


@pytest.mark.filterwarnings("ignore")
def test_the_check_searches_with_beams_where_a_cache_layer_is_cut() -> None:
    layer = "model.layers.2"
    cut = {"": 0, f"{layer}.mamba_decoder": 1, f"{layer}.linear": 1}
    report = duoka.check(zamba2(), cut, workload=WORK)
    assert "beam search" in {fault.phase for fault in report.faults}
    assert duoka.check(zamba2(), {"": 0}, workload=WORK).ok
