"""Checkpoints that were published quantized: they compute what their numbers and scales say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from bitsandbytes import functional
from closeness import close
from safetensors.torch import load_file, save_file
from tiers import only
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import duoka
from duoka import Checkpoint, Placement, Workload, virtual
from duoka.errors import ModelError
from duoka.models.from_checkpoint import build_model
from duoka.models.quantization import ExpertStack, is_composed
from duoka.planner.resolve import workload_for
from duoka.runtime.load import load_weights

pytestmark = pytest.mark.usefixtures("single_sequences")

WORK = Workload(prompt_tokens=20, new_tokens=4)
IDS = torch.arange(1, 21).reshape(1, 20)
NAMES = (*published.FORMATS, "mxfp4")
Changes = dict[str, Tensor | None]


def write(name: str, path: Path) -> tuple[Path, Path]:
    """Write a checkpoint, and one of the same values without quantization."""
    if name == "mxfp4":
        return published.write_mxfp4(path / "stored", path / "plain"), path / "plain"
    return published.write(path / "stored", name, path / "plain"), path / "plain"


def load_on(path: Path, device: str) -> PreTrainedModel:
    checkpoint = Checkpoint.open(path)
    model = build_model(checkpoint, workload_for(checkpoint, WORK))
    load_weights(model, checkpoint, Placement(entries=(("", device),)))
    return model


def dequantized(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the identity by a weight, with the kernels of its device."""
    if isinstance(weight, ExpertStack):
        matrices = [dequantized(weight.expert(number), dtype) for number in range(len(weight))]
        stack = torch.stack(matrices)
        return stack.mT if weight.is_transposed else stack
    inputs = torch.eye(weight.shape[1], dtype=dtype).to(weight.device)
    return F.linear(inputs, weight).t().float().cpu()


@pytest.mark.parametrize("device", ["vgpu:0", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_stored_values(name: str, device: str, tmp_path: Path) -> None:
    stored, plain = write(name, tmp_path)
    right = dict(load_on(plain, "cpu").named_parameters())
    with virtual.gpus([None], data="cpu"), torch.no_grad():
        model = load_on(stored, device)
        count = 0
        for key, weight in model.named_parameters():
            if is_composed(weight):
                count += 1
                # The scales of a kernel for int4 are in bfloat16, and so is the product.
                assert close(dequantized(weight, model.dtype), right[key], 2**-7), key
            else:
                assert torch.equal(weight.float().cpu(), right[key])
        assert count == {"qwen3_moe": 18, "gpt_oss": 6}.get(model.config.model_type, 21)
        assert model(IDS.to(device)).logits.isfinite().all()


@pytest.mark.parametrize(
    "name", only(["gptq"], [n for n in NAMES if "exp" not in n and n != "mxfp4"])
)
def test_a_model_computes_what_the_dequantized_one_does(name: str, tmp_path: Path) -> None:
    stored, plain = write(name, tmp_path)
    with torch.no_grad():
        right = load_on(plain, "cpu")(IDS).logits
        assert close(load_on(stored, "cpu")(IDS).logits, right, 0.03)


def change(path: Path, settings: dict[str, Any], parts: Changes) -> None:
    """Change the settings, and tensors of each q_proj; None removes a tensor."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        for part, tensor in parts.items():
            name = f"model.layers.{layer}.self_attn.q_proj.{part}"
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor.clone()
    save_file(tensors, path / "model.safetensors")


IN_ORDER = torch.arange(256, dtype=torch.int32)
FP4 = torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "settings", "parts", "reason"),
    [
        ("gptq", {"desc_act": True}, {}, "order of activations"),
        ("gptq", {"checkpoint_format": "marlin"}, {}, "its format is 'marlin'"),
        ("gptq", {}, {"qzeros": torch.zeros(2, 24, dtype=torch.int32)}, "3 bits"),
        ("gptq", {}, {"scales": torch.zeros(16, 256).half()}, "groups of 16"),
        ("gptq int8", {"sym": False}, {}, "8-bit numbers have zero points"),
        ("awq", {"version": "gemv"}, {}, "its layout is 'gemv'"),
        ("pack", {"format": "nvfp4-pack-quantized"}, {}, "its format is nvfp4-pack-quantized"),
        ("pack", {}, {"weight_g_idx": IN_ORDER}, "order of activations"),
        ("int", {"config_groups": {"a": {"weights": {"symmetric": False}}}}, {}, "zero points"),
        ("fp8", {}, {"weight_scale_2": torch.ones(1)}, "scales of scales"),
        ("fp8", {}, {"weight_scale_inv": torch.ones(3, 2)}, r"scales \[3, 2\]"),
        ("fp8", {}, {"weight": torch.zeros(256, 256).half()}, r"stored as torch\.float16"),
        ("nf4", {}, {"weight.quant_state.bitsandbytes__fp4": FP4}, "FP4"),
        ("nf4", {}, {"weight.absmax": torch.zeros(512)}, "NF4 blocks"),
    ],
)
def test_what_is_not_exact_is_refused_before_weights_are_read(
    tmp_path: Path,
    name: str,
    settings: dict[str, Any],
    parts: dict[str, Tensor | None],
    reason: str,
) -> None:
    change(published.write(tmp_path, name), settings, parts)
    with pytest.raises(ModelError, match=f"proj.weight can't be loaded .*{reason}") as caught:
        duoka.plan(tmp_path, "virtual:64MiB", WORK)
    assert "16-bit checkpoint with --quantize int4" in (caught.value.hint or "")


def test_a_permutation_that_is_not_stated_is_refused_on_loading(tmp_path: Path) -> None:
    change(published.write(tmp_path, "gptq"), {}, {"g_idx": IN_ORDER.flip(0) // 128})
    plan = duoka.plan(tmp_path, "virtual:64MiB", WORK)
    with pytest.raises(ModelError, match="order of activations"):
        duoka.load(plan)


def test_kernels_that_read_several_rows_at_once(tmp_path: Path) -> None:
    """An expert's gate of 32 rows ends between rows that int4's kernels keep together."""
    config = {**published.MOE, "moe_intermediate_size": 32}
    with pytest.MonkeyPatch.context() as patch:
        settings = published.FORMATS["gptq experts"]
        patch.setitem(published.FORMATS, "narrow", (settings[0], config, *settings[2:]))
        published.write(tmp_path, "narrow")
    with pytest.raises(ModelError, match="splits it at rows 0 and 32"):
        duoka.plan(tmp_path, "virtual:64MiB", WORK)


def test_one_layer_without_quantization(tmp_path: Path) -> None:
    plain = torch.randn(256, 256).half()
    parts = {**dict.fromkeys(("qweight", "qzeros", "scales", "g_idx")), "weight": plain}
    change(published.write(tmp_path, "gptq"), {}, parts)
    weight = load_on(tmp_path, "cpu").get_parameter("model.layers.1.self_attn.q_proj.weight")
    assert torch.equal(weight, plain)


def test_a_part_of_a_model_on_its_device(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(published.write(tmp_path, "gptq experts"))
    model = build_model(checkpoint, workload_for(checkpoint, WORK))
    placement = Placement(entries=(("model.layers.0", "vgpu:0"), ("", "vgpu:1")))
    with virtual.gpus([None, None], data="cpu"):
        load_weights(model, checkpoint, placement, only=torch.device("vgpu:0"))
        devices = {str(weight.device) for weight in model.model.layers[0].parameters()}
        assert devices == {"vgpu:0"}
        assert {str(weight.device) for weight in model.model.layers[1].parameters()} == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_8bit": True},
    ],
)
def test_what_bitsandbytes_writes(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = published.write(tmp_path / "stored", "fp8", tmp_path / "plain").parent / "plain"
    model = AutoModelForCausalLM.from_pretrained(
        plain,
        dtype=torch.float16,
        quantization_config=BitsAndBytesConfig(**settings),
        device_map={"": "cpu"},
    )
    model.save_pretrained(tmp_path / "written")
    with torch.no_grad():
        loaded = load_on(tmp_path / "written", "cpu")
        for name in ("0.self_attn.q_proj", "2.mlp.down_proj"):
            module = model.get_submodule(f"model.layers.{name}")
            if "load_in_8bit" in settings:
                right = module.weight.data * module.weight.SCB[:, None] / 127
            else:
                right = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            weight = loaded.get_parameter(f"model.layers.{name}.weight")
            assert close(dequantized(weight, torch.float16), right.float(), 1e-3)
