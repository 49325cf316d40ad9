"""Gradients that pass quantized weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_experts import with_dequantized_experts
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from duoka import Checkpoint, Placement, Workload, virtual
from duoka.errors import LoadError, ModelError, UsageError
from duoka.forecast.workload import Training
from duoka.models import initialize_adapters, make_trainable
from duoka.models.from_checkpoint import build_model
from duoka.models.lora import LoraAdapter, LowRank, put_adapter
from duoka.models.quantization import (
    Scheme,
    freeze_quantized,
    is_composed,
    quantize,
    quantize_model,
)
from duoka.models.quantization.weights import Nf4Weight
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.load import load_weights
from duoka.runtime.optimizers import make_optimizer

SCHEMES: tuple[Scheme, ...] = ("int8", "nf4")
LORA = Training(lora_rank=4)


def unpacked(weight: Any) -> Tensor:
    if isinstance(weight, Nf4Weight):
        return weight.unpacked(weight.dtype)
    numbers: Tensor = weight.dequantize()
    return numbers


def quantized(scheme: Scheme) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 32}
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=2, num_attention_heads=4, attention_bias=True, **sizes)
    )
    quantize_model(model, scheme)
    return model


def gradients(model: Any, device: str, training: Training = LORA) -> dict[str, Tensor]:
    make_trainable(model, training, torch.float32)
    initialize_adapters(model, 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    model.to(device)
    ids = torch.arange(20).reshape(2, 10).to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [LORA, Training(lora_rank=4, gradient_checkpointing=True)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_unpacked_weights(scheme: Scheme, training: Training) -> None:
    model = quantized(scheme)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        weight = module._parameters.get("weight")
        if weight is not None and is_composed(weight):
            module.weight = nn.Parameter(unpacked(weight))
    expected = gradients(plain, "cpu")
    assert len(expected) == 2 * 7 * 2  # nothing but adapters
    with virtual.gpus([None], data="cpu"):
        found = {
            device: gradients(copy.deepcopy(model), device, training)
            for device in ("cpu", "vgpu:0")
        }
    for one in found.values():
        assert one.keys() == expected.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_unpacked_is_kept_for_the_backward_pass(scheme: Scheme, autocast: bool) -> None:
    dtype = torch.bfloat16
    with virtual.gpus([None], data="meta") as world:
        layer = nn.Linear(1024, 512, bias=False, dtype=dtype, device="vgpu:0")
        layer.weight = nn.Parameter(quantize(layer.weight.detach(), scheme), requires_grad=False)
        freeze_quantized(layer)
        given = torch.ones(2, 8, 1024, device="vgpu:0", dtype=torch.float32 if autocast else dtype)
        given.requires_grad_()
        before = world.memory_allocated(0)
        with torch.autocast("vgpu", dtype=dtype, enabled=autocast):
            result = layer(given)
        assert result.dtype == dtype
        assert world.memory_allocated(0) - before < 2**16
        result.sum().backward()
        assert given.grad is not None
        assert given.grad.dtype == given.dtype


def test_layers_that_gradients_cannot_pass_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    model[0].weight = nn.Parameter(quantize(model[0].weight.detach(), "int4"), requires_grad=False)
    with pytest.raises(ModelError, match="0, Linear has no backward: its weight is Int4"):
        freeze_quantized(model)
    attention = nn.MultiheadAttention(64, 4)
    attention.out_proj.weight = nn.Parameter(
        quantize(attention.out_proj.weight.detach(), "nf4"), requires_grad=False
    )
    with pytest.raises(ModelError, match="out_proj, NonDyn"):
        freeze_quantized(attention)


def with_experts(scheme: Scheme) -> Any:
    """A tiny model with a dense expert shared by all tokens, and stacks of experts."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=64, num_experts=4,
        shared_expert_intermediate_size=64, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    quantize_model(model, scheme, trains=scheme != "int4")
    return model


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_pass_quantized_experts(scheme: Scheme, checkpointing: bool) -> None:
    model = with_experts(scheme)
    training = Training(lora_rank=4, lora_targets=ATTENTION, gradient_checkpointing=checkpointing)
    expected = gradients(with_dequantized_experts(model), "cpu", training)
    assert len(expected) == 2 * 4 * 2
    with virtual.gpus([None], data="cpu"):
        for device in ("cpu", "vgpu:0"):
            result = gradients(copy.deepcopy(model), device, training)
            assert result.keys() == expected.keys()
            for name, gradient in result.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_quantized_experts_have_no_adapters() -> None:
    """By default peft adapts the experts of some families; quantized ones stay frozen."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[0],
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    quantize_model(model, "nf4", trains=True)
    experts = copy.deepcopy(model)
    names = gradients(model, "cpu")
    assert names
    assert not any("experts" in name for name in names)
    training = Training(lora_targets=("gate_proj", "up_proj", "down_proj"))
    refusal = r"quantized experts can't have adapters: model\.layers\.1\.mlp\.experts"
    with pytest.raises(UsageError, match=refusal):
        make_trainable(experts, training, torch.float32)


def test_an_adapter_of_experts_is_refused_beside_quantized_ones() -> None:
    ranks = LowRank(
        down=torch.ones(8, 64), up=torch.ones(64, 8), scaling=1.0, parameter="down_proj",
        num_experts=4,
    )  # fmt: skip
    adapter = LoraAdapter(layers={"model.layers.0.mlp.experts": ranks})
    with pytest.raises(LoadError, match="quantized experts can't have adapters"):
        put_adapter(with_experts("int8"), adapter)


def test_experts_in_int4_have_no_gradients() -> None:
    """On a GPU; on the CPU they are unpacked."""
    experts = with_experts("int4").model.layers[0].mlp.experts
    freeze_quantized(experts)
    with torch.device("meta"):
        experts = with_experts("int4").model.layers[0].mlp.experts
    with pytest.raises(ModelError, match="has no backward: its weight is Int4Tiles"):
        freeze_quantized(experts)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_trained_over_two_gpus(scheme: Scheme, tmp_path: Path) -> None:
    """Loaded, quantized on the way, made trainable: in this order each stage does it by itself."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 32}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, dtype="float32", **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    workload = Workload(
        prompt_tokens=8, new_tokens=0, dtype="float32", quantize=scheme, training=LORA
    )
    first = ("model.embed_tokens", "model.rotary_emb", "model.layers.0")
    names = (*first, "model.layers.1", "model.norm", "lm_head")
    found = []
    for gpus in ((0, 0), (0, 1)):
        with virtual.gpus([None, None], data="cpu"):
            entries = tuple((name, f"vgpu:{gpus[name not in first]}") for name in names)
            model = build_model(checkpoint, workload)
            load_weights(model, checkpoint, Placement(entries=entries))
            make_trainable(model, LORA, torch.float32)
            initialize_adapters(model, 0)
            dispatch(model, Placement(entries=entries))
            optimizer = make_optimizer(model, "adamw8bit", lr=0.01)
            losses = []
            for _ in range(3):
                ids = torch.arange(20, device="vgpu:0").reshape(2, 10)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append(losses)
    assert found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
