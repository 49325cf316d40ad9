"""Small checkpoints in the layouts in which quantized models are published; numbers are random.

Names, shapes and types are those that the formats document: AutoGPTQ's, AutoAWQ's GEMM, pack-
quantized and float-quantized compressed-tensors, bitsandbytes' NF4 and 8 bit, block-scaled FP8 as
DeepSeek and Qwen publish it, and MXFP4 as gpt-oss does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from duoka.models import build
from duoka.models.conversion import published_tensors

GROUP = 128
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "dtype": "float16",
}
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 256,
    "sliding_window": 128,
    "dtype": "bfloat16",
}

Parts = dict[str, Tensor]
Layout = Callable[[int, int], Parts]
"""What is stored in the place of a weight [rows, columns], by the ends of the names."""


def gptq(rows: int, columns: int) -> Parts:
    """4 bit, eight numbers in an int32 along the columns; group indices for each column."""
    groups = columns // GROUP
    return {
        "qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        "qzeros": torch.zeros(groups, rows // 8, dtype=torch.int32),
        "scales": torch.zeros(groups, rows, dtype=torch.float16),
        "g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def awq(rows: int, columns: int) -> Parts:
    """4 bit, eight numbers in an int32 along the rows."""
    groups = columns // GROUP
    return {
        "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.zeros(groups, rows // 8, dtype=torch.int32),
        "scales": torch.zeros(groups, rows, dtype=torch.float16),
    }


def packed(rows: int, columns: int) -> Parts:
    """compressed-tensors' pack-quantized, 4 bit, symmetric."""
    return {
        "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        "weight_scale": torch.zeros(rows, columns // GROUP, dtype=torch.float16),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }


def float_quantized(rows: int, columns: int) -> Parts:
    """compressed-tensors' FP8, one scale for each row."""
    return {
        "weight": torch.zeros(rows, columns, dtype=torch.float8_e4m3fn),
        "weight_scale": torch.zeros(rows, 1, dtype=torch.bfloat16),
    }


def nf4(rows: int, columns: int) -> Parts:
    """bitsandbytes' NF4 in blocks of 64 with nested scales in blocks of 256."""
    blocks = rows * columns // 64
    return {
        "weight": torch.zeros(rows * columns // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(blocks, dtype=torch.uint8),
        "weight.quant_map": torch.zeros(16),
        "weight.nested_absmax": torch.zeros(-(-blocks // 256)),
        "weight.nested_quant_map": torch.zeros(256),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(88, dtype=torch.uint8),
    }


def int8(rows: int, columns: int) -> Parts:
    """bitsandbytes' 8 bit."""
    return {
        "weight": torch.zeros(rows, columns, dtype=torch.int8),
        "SCB": torch.zeros(rows),
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }


def blocks_of_fp8(rows: int, columns: int) -> Parts:
    """FP8 with a scale for each block of 128 x 128."""
    return {
        "weight": torch.zeros(rows, columns, dtype=torch.float8_e4m3fn),
        "weight_scale_inv": torch.zeros(-(-rows // 128), -(-columns // 128)),
    }


def torchao_int8(rows: int, columns: int) -> Parts:
    """torchao's weights of 8 bit, taken apart for safetensors."""
    return {
        "_weight_qdata": torch.zeros(rows, columns, dtype=torch.int8),
        "_weight_scale": torch.zeros(rows, 1),
        "_weight_zero_point": torch.zeros(rows, 1, dtype=torch.int8),
    }


# Method, config of the model, what its quantization_config says, and the layout.
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Layout]] = {
    "gptq": ("gptq", LLAMA, {"bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "awq": ("awq", LLAMA, {"bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "pack": ("compressed-tensors", LLAMA, {"format": "pack-quantized"}, packed),
    "float": ("compressed-tensors", LLAMA, {"format": "float-quantized"}, float_quantized),
    "nf4": ("bitsandbytes", LLAMA, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "int8": ("bitsandbytes", LLAMA, {"load_in_8bit": True}, int8),
    "fp8": ("fp8", LLAMA, {"weight_block_size": [128, 128]}, blocks_of_fp8),
    "fp8 experts": ("fp8", MOE, {"weight_block_size": [128, 128]}, blocks_of_fp8),
    "torchao": ("torchao", LLAMA, {"quant_type": {"default": {}}}, torchao_int8),
}


def write(path: Path, name: str) -> Path:
    """Write a checkpoint of one format: all linear layers quantized but the head and routers."""
    method, config, stated, layout = FORMATS[name]
    plain = published_tensors(build(config, dtype=getattr(torch, config["dtype"])))
    tensors = dict(_tensors(plain, layout))
    return _written(
        path, {**config, "quantization_config": {"quant_method": method, **stated}}, tensors
    )


def write_mxfp4(path: Path) -> Path:
    """Write a checkpoint as gpt-oss: stacks of experts in blocks of 32 numbers of 4 bit."""
    plain = published_tensors(build(GPT_OSS, dtype=torch.bfloat16))
    tensors: dict[str, Tensor] = {}
    for key, tensor in plain.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = torch.zeros(tensor.shape, dtype=tensor.dtype)
            continue
        experts, inner, outer = tensor.shape
        tensors[f"{key}_blocks"] = torch.zeros(experts, outer, inner // 32, 16, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.zeros(experts, outer, inner // 32, dtype=torch.uint8)
    return _written(path, {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, tensors)


def _tensors(plain: dict[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in plain.items():
        if key.endswith("_proj.weight"):
            for suffix, part in layout(*tensor.shape).items():
                yield key.removesuffix("weight") + suffix, part
        else:
            yield key, torch.zeros(tensor.shape, dtype=tensor.dtype)


def _written(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
