"""Small checkpoints in the layouts in which quantized models are published; numbers are random.

Names, shapes and types are those that the formats document: AutoGPTQ's, AutoAWQ's GEMM,
compressed-tensors' pack-quantized, int-quantized and float-quantized, bitsandbytes' NF4 and 8 bit,
FP8 with scales by block as DeepSeek and Qwen publish it and by row as FBGEMM does, and MXFP4 as
gpt-oss does. Each packer follows the format's definition, and also returns the weight it packs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
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
Layout = Callable[[int, int], tuple[Parts, Tensor]]
"""The stored tensors of a weight [rows, columns], by the ends of their names, and the weight."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def numbers(bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 2**bits, shape)


def scales(*shape: int, low: float = 0.004) -> Tensor:
    return low + torch.rand(shape) * low


def into_words(values: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Pack numbers along the last dimension into int32, the first in the lowest bits."""
    count = 32 // bits
    packed = torch.zeros(values.shape[0], values.shape[1] // count, dtype=torch.int64)
    for place, column in enumerate(order or range(count)):
        packed |= values[:, column::count] << bits * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def spread(groups: Tensor, columns: int) -> Tensor:
    return groups.float().repeat_interleave(columns // groups.shape[1], 1)


def gptq(
    rows: int, columns: int, *, bits: int = 4, group: int = GROUP, less: int = 1
) -> tuple[Parts, Tensor]:
    """Words along the columns, and zero points less 1; of 8 bits all are in the middle."""
    group = min(group, columns)
    stored, scale = numbers(bits, rows, columns), scales(rows, columns // group).half()
    zero = torch.full(scale.shape, 128) if bits == 8 else 1 + numbers(bits, *scale.shape) % 15
    scale = scale / (16 if bits == 8 else 1)
    parts = {
        "qweight": into_words(stored, bits).t().contiguous(),
        "qzeros": into_words((zero - less).t(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": (torch.arange(columns) // group).to(torch.int32),
    }
    return parts, (stored - spread(zero, columns)) * spread(scale, columns)


def awq(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """Words along the rows, in AWQ's order."""
    group = min(GROUP, columns)
    stored, scale = numbers(4, rows, columns), scales(rows, columns // group).half()
    zero = numbers(4, *scale.shape)
    parts = {
        "qweight": into_words(stored.t(), 4, AWQ_ORDER),
        "qzeros": into_words(zero.t(), 4, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }
    return parts, (stored - spread(zero, columns)) * spread(scale, columns)


def packed(
    rows: int, columns: int, *, bits: int = 4, group: int = GROUP, symmetric: bool = True
) -> tuple[Parts, Tensor]:
    """compressed-tensors' pack-quantized: signed numbers, stored with an offset."""
    group, middle = min(group or columns, columns), 2 ** (bits - 1)
    stored, scale = numbers(bits, rows, columns), scales(rows, columns // group).bfloat16()
    scale = scale / (16 if bits == 8 else 1)
    zero = torch.full(scale.shape, middle) if symmetric else numbers(bits, *scale.shape)
    parts = {
        "weight_packed": into_words(stored, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = into_words(zero.t(), bits).t().contiguous()
    return parts, (stored - spread(zero, columns)) * spread(scale, columns)


def int_quantized(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """compressed-tensors' int8, one scale for each row; activations are quantized as they come."""
    stored, scale = numbers(8, rows, columns) - 128, scales(rows, 1).bfloat16() / 16
    return {"weight": stored.to(torch.int8), "weight_scale": scale}, stored * scale.float()


def fp8(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).to(torch.float8_e4m3fn)


def float_quantized(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """FP8, one scale for each row, and one for the activations."""
    stored, scale = fp8(rows, columns), scales(rows, 1, low=0.02).bfloat16()
    parts = {"weight": stored, "weight_scale": scale, "input_scale": torch.ones(1)}
    return parts, stored.float() * scale.float()


def tensor_fp8(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """FP8 with a scale for the tensor."""
    stored = fp8(rows, columns)
    return {"weight": stored, "weight_scale": torch.tensor(0.03)}, stored.float() * 0.03


def blocks_of_fp8(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """FP8 with a scale for each block of 128 x 128."""
    stored, scale = fp8(rows, columns), scales(-(-rows // 128), -(-columns // 128), low=0.02)
    spread_scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"weight": stored, "weight_scale_inv": scale}, (
        stored.float() * spread_scale[:rows, :columns]
    )


def nf4(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """bitsandbytes' NF4 in blocks of 64 with nested scales in blocks of 256."""
    stored, blocks = numbers(4, rows * columns), rows * columns // 64
    absmax, steps = numbers(8, blocks), torch.linspace(-1, 1, 256)
    nested, offset = 0.02 + torch.zeros(-(-blocks // 256)), 0.05
    state = {"blocksize": 64, "nested_blocksize": 256, "nested_offset": offset}
    parts = {
        "weight": (stored[::2] << 4 | stored[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax.to(torch.uint8),
        "weight.quant_map": NF4.clone(),
        "weight.nested_absmax": nested,
        "weight.nested_quant_map": steps,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    scale = steps[absmax] * nested.repeat_interleave(256)[:blocks] + offset
    return parts, (NF4[stored].view(-1, 64) * scale[:, None]).view(rows, columns)


def int8(rows: int, columns: int) -> tuple[Parts, Tensor]:
    """bitsandbytes' 8 bit."""
    stored, largest = numbers(8, rows, columns) - 128, scales(rows, low=0.05)
    parts = {
        "weight": stored.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return parts, stored * largest[:, None] / 127


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# Method, config of the model, what its quantization_config says, and the layout.
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Layout]] = {
    "fp8": ("fp8", LLAMA, {"weight_block_size": [128, 128]}, blocks_of_fp8),
    "fp8 experts": ("fp8", MOE, {"weight_block_size": [128, 128]}, blocks_of_fp8),
    "tensor fp8": ("fp8", LLAMA, {"activation_scheme": "static"}, tensor_fp8),
    "fbgemm": ("fbgemm_fp8", LLAMA, {}, float_quantized),
    "gptq": ("gptq", LLAMA, {"bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "gptq v2": (
        "gptq", LLAMA, {"bits": 4, "checkpoint_format": "gptq_v2"},
        partial(gptq, group=32, less=0),
    ),
    "gptq int8": ("gptq", LLAMA, {"bits": 8, "sym": True}, partial(gptq, bits=8)),
    "gptq experts": ("gptq", MOE, {"bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "gptq experts 64": ("gptq", MOE, {"bits": 4, "group_size": 64}, partial(gptq, group=64)),
    "awq": ("awq", LLAMA, {"bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "awq experts": ("awq", MOE, {"bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "pack": ("compressed-tensors", LLAMA, compressed("pack-quantized", num_bits=4), packed),
    "pack channel": (
        "compressed-tensors", LLAMA, compressed("pack-quantized", num_bits=4),
        partial(packed, group=0, symmetric=False),
    ),
    "pack int8": (
        "compressed-tensors", LLAMA, compressed("pack-quantized", num_bits=8),
        partial(packed, bits=8),
    ),
    "pack experts": (
        "compressed-tensors", MOE, compressed("pack-quantized", num_bits=4),
        partial(packed, group=32, symmetric=False),
    ),
    "int": ("compressed-tensors", LLAMA, compressed("int-quantized", num_bits=8), int_quantized),
    "float": (
        "compressed-tensors", LLAMA, compressed("float-quantized", num_bits=8), float_quantized
    ),
    "int experts": (
        "compressed-tensors", MOE, compressed("int-quantized", num_bits=8), int_quantized
    ),
    "nf4": ("bitsandbytes", LLAMA, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "int8": ("bitsandbytes", LLAMA, {"load_in_8bit": True}, int8),
}  # fmt: skip


def write(path: Path, name: str, reference: Path | None = None) -> Path:
    """Write a checkpoint of one format: all linear layers quantized but the head and routers.

    In `reference` the same model is written without quantization, in float32.
    """
    method, config, settings, layout = FORMATS[name]
    torch.manual_seed(0)
    stored: Parts = {}
    values: Parts = {}
    for key, tensor in published_tensors(build(config, dtype=torch.float32)).items():
        if key.endswith("_proj.weight"):
            parts, values[key] = layout(*tensor.shape)
            stored |= {key.removesuffix("weight") + end: part for end, part in parts.items()}
        else:
            stored[key] = _plain(key, tensor.shape).to(getattr(torch, config["dtype"]))
            values[key] = stored[key].float()
    return _write_both(
        path, reference, config, {"quant_method": method, **settings}, stored, values
    )


def write_mxfp4(path: Path, reference: Path | None = None) -> Path:
    """Write a checkpoint as gpt-oss: stacks of experts in blocks of 32 numbers of 4 bit."""
    torch.manual_seed(0)
    stored: Parts = {}
    values: Parts = {}
    for key, tensor in published_tensors(build(GPT_OSS, dtype=torch.float32)).items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            stored[key] = _plain(key, tensor.shape).bfloat16()
            values[key] = stored[key].float()
            continue
        experts, inner, outer = tensor.shape
        codes = numbers(4, experts, outer, inner // 32, 32)
        exponents = 118 + numbers(2, experts, outer, inner // 32)
        halves = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{key}_blocks"] = halves.to(torch.uint8)
        stored[f"{key}_scales"] = exponents.to(torch.uint8)
        weight = FP4[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (exponents - 127)[..., None]
        values[key] = weight.flatten(-2).transpose(1, 2).contiguous()
    return _write_both(path, reference, GPT_OSS, {"quant_method": "mxfp4"}, stored, values)


def _plain(key: str, shape: torch.Size) -> Tensor:
    return torch.ones(shape) if key.endswith("norm.weight") else 0.1 * torch.randn(shape)


def _write_both(
    path: Path,
    reference: Path | None,
    config: dict[str, Any],
    settings: dict[str, Any],
    stored: Parts,
    values: Parts,
) -> Path:
    if reference is not None:
        _written(reference, {**config, "dtype": "float32"}, values)
    return _written(path, {**config, "quantization_config": settings}, stored)


def _written(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
