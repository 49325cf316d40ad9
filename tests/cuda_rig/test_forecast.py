"""Forecasts beside what PyTorch's CUDA allocator counts, cuBLAS's workspaces included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from cuda_rig.forecasting import Case, counted, forecast, run
from torch.utils.checkpoint import checkpoint

from duoka.forecast.workload import ALL_EXPERTS, Training, Workload
from duoka.hardware import gpu_generation
from duoka.hardware.gpu_generation import GpuGeneration

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from forecast_models import SIZES

MIB = 2**20
ONE, TWO, THREE = "1GiB", "1GiB,1GiB", "1GiB,1GiB,1GiB"


def check(case: Case, *, over: float = 0.0, segments: int = 0) -> None:
    """Never less than what is allocated, and no more than a share over; so many segments apart."""
    plan = case.plan(case.profile())
    run(plan, case.build())
    for (allocated, reserved), (most, taken) in zip(forecast(plan), counted(plan), strict=True):
        assert most - 512 <= allocated <= most * (1 + over)
        assert abs(reserved - taken) <= segments * 2 * MIB


def load(prompt: int, new: int, chunk: int | None = None, **more: Any) -> Workload:
    sizes = {"prompt_tokens": prompt, "new_tokens": new, "prefill_chunk_tokens": chunk}
    return Workload(dtype="bfloat16", **sizes, **more)


def small(name: str, gpus: str, prompt: int, new: int = 0, **more: Any) -> Case:
    return Case(config=tiny.CONFIGS[name], gpus=gpus, workload=load(prompt, new, **more))


def large(name: str, gpus: str, prompt: int, new: int = 0, **more: Any) -> Case:
    return Case(config=SIZES[name], gpus=gpus, workload=load(prompt, new, **more))


@pytest.mark.cuda_rig(gpus=ONE)
def test_one_gpu() -> None:
    check(small("glm", ONE, prompt=1333, new=18))


@pytest.mark.cuda_rig(gpus=ONE, capability="9.0")
def test_hopper_takes_more() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # the rig has none
    check(small("glm", ONE, prompt=1333, new=18, gpu_generation=GpuGeneration(32 * MIB)))


@pytest.mark.cuda_rig(gpus=TWO, capability="7.5")
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("llama", 1),
        ("window", 2),
        pytest.param("llama", 2, marks=pytest.mark.nightly),
        pytest.param("window", 1, marks=pytest.mark.nightly),
    ],
)
def test_turing_has_no_flash_attention(name: str, batch: int) -> None:
    turing, ampere = (
        small(name, TWO, prompt=1333, new=9, batch=batch, gpu_generation=GpuGeneration(**older))
        for older in ({"before_ampere": True}, {})
    )
    turings, amperes = (forecast(each.plan(each.profile())) for each in (turing, ampere))
    assert max(turings)[0] > 1.2 * max(amperes)[0]
    check(turing, over=0.001)


@pytest.mark.cuda_rig(gpus=TWO)
def test_two_gpus() -> None:
    check(small("llama", TWO, prompt=1333, new=9))


@pytest.mark.cuda_rig(gpus=THREE)
def test_a_batch_on_three_gpus() -> None:
    check(small("tied", THREE, prompt=1100, new=6, batch=3), over=0.001)


@pytest.mark.cuda_rig(gpus=TWO)
def test_a_prompt_in_chunks() -> None:
    check(small("llama", TWO, prompt=1901, new=5, batch=2, chunk=640), over=0.001)


@pytest.mark.cuda_rig(gpus=ONE)
@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(gradient_checkpointing=True, micro_batches=3),
        Training(gradient_checkpointing=True, master_weights=True, lora_rank=64),
        Training(method="full"),
        Training(method="full", gradient_checkpointing=True, micro_batches=3),
    ],
    ids=lambda training: (
        f"{training.method}-{training.lora_rank}-{training.gradient_checkpointing}"
    ),
)
def test_training(training: Training) -> None:
    check(small("tied", ONE, prompt=300, training=training), over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=ONE)
@pytest.mark.parametrize("training", [Training(), Training(method="full", micro_batches=2)])
def test_a_loss_in_chunks(training: Training) -> None:
    check(small("tied", ONE, prompt=2500, training=training), over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=ONE)
def test_states_in_8_bit() -> None:
    training = Training(method="full", optimizer="adamw8bit")
    check(small("tied", ONE, prompt=64, training=training), over=0.001, segments=2)


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="24GiB")
def test_adafactor() -> None:
    """Of small matrices CUDA's sums over rows take more for a moment than is forecast."""
    training = Training(method="full", optimizer="adafactor")
    check(large("qwen3-0.6b", "24GiB", prompt=64, training=training), over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=ONE)
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_beside_quantized_weights(quantize: Any, dropout: float) -> None:
    training = Training(lora_dropout=dropout)
    case = small("llama", ONE, prompt=300, quantize=quantize, training=training)
    check(case, over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=ONE)
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_adapters_beside_quantized_experts(quantize: Any) -> None:
    case = small("experts", ONE, prompt=300, quantize=quantize, training=Training())
    check(case, over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=ONE)
@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
def test_adapters_beside_experts_on_the_host(quantize: Any) -> None:
    training = Training(lora_targets=("q_proj", "v_proj"))
    work = {"quantize": quantize, "training": training, "host_experts": ALL_EXPERTS}
    check(small("experts", ONE, prompt=300, **work), over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=ONE)
@pytest.mark.parametrize("quantize", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("batch", [1, 3])
def test_generation_with_quantized_experts(quantize: Any, batch: int) -> None:
    check(small("experts", ONE, prompt=300, new=6, batch=batch, quantize=quantize))


@pytest.mark.cuda_rig(gpus=TWO)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_on_two_gpus(checkpointing: bool) -> None:
    training = Training(gradient_checkpointing=checkpointing)
    check(small("llama", TWO, prompt=500, training=training), over=0.001, segments=2)


@pytest.mark.cuda_rig(gpus=TWO)
@pytest.mark.usefixtures("expandable_segments")
@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("glm", {"prompt": 1333, "new": 18}),
        ("llama", {"prompt": 1901, "new": 5, "batch": 2, "chunk": 640}),
        ("tied", {"prompt": 1100, "new": 6, "batch": 3}),
        ("llama", {"prompt": 500, "training": Training(gradient_checkpointing=True)}),
        ("tied", {"prompt": 300, "training": Training(method="full", micro_batches=3)}),
        ("llama", {"prompt": 300, "quantize": "nf4", "training": Training()}),
    ],
)
def test_expandable_segments(name: str, work: dict[str, Any]) -> None:
    check(small(name, TWO, **work), over=0.001)


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="24GiB,12GiB")
@pytest.mark.usefixtures("expandable_segments")
def test_llama_in_expandable_segments() -> None:
    check(large("llama-3-8b", "24GiB,12GiB", prompt=8000, new=6))


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="12GiB,8GiB")
def test_glm_in_chunks() -> None:
    check(large("glm-4-9b", "12GiB,8GiB", prompt=7680, new=6, chunk=4096))


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="8GiB,6GiB,12GiB")
def test_glm_on_three_gpus() -> None:
    check(large("glm-4-9b", "8GiB,6GiB,12GiB", prompt=1000, new=6, batch=4))


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="24GiB,12GiB")
def test_llama() -> None:
    check(large("llama-3-8b", "24GiB,12GiB", prompt=8000, new=6), segments=1)


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="1GiB,2GiB")
def test_qwen() -> None:
    check(large("qwen3-0.6b", "1GiB,2GiB", prompt=1500, new=40))


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="24GiB")
def test_qwen_learns_whole() -> None:
    training = Training(method="full")
    check(large("qwen3-0.6b", "24GiB", prompt=1024, batch=4, training=training), over=1e-5)


def workspaces() -> int:
    return torch.cuda.memory_allocated() // gpu_generation.workspace_bytes()


@pytest.mark.filterwarnings("ignore:Found GPU0:UserWarning")  # 7.0, which CUDA 13 has left behind
@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(text, marks=pytest.mark.cuda_rig(gpus="8GiB", capability=text))
        for text in ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
    ],
)
def test_the_size_by_capability(capability: str) -> None:
    major, minor = map(int, capability.split("."))
    torch.zeros(4, 4, device="cuda") @ torch.zeros(4, 4, device="cuda")
    assert torch.cuda.memory_allocated() == gpu_generation.workspace_bytes((major, minor))


@pytest.mark.filterwarnings("ignore:Could not parse:UserWarning")
@pytest.mark.cuda_rig(gpus="8GiB")
@pytest.mark.parametrize("config", [":0:0", ":16:8", ":4096:8", ":100:3", "junk", ":4096"])
def test_the_size_by_the_variable(monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    monkeypatch.setenv(gpu_generation.WORKSPACE_CONFIG, config)
    torch.zeros(4, 4, device="cuda") @ torch.zeros(4, 4, device="cuda")
    assert torch.cuda.memory_allocated() == gpu_generation.workspace_bytes()


@pytest.mark.cuda_rig(gpus="8GiB")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_takes_another(checkpointed: bool) -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    for _ in range(2):
        x = torch.zeros(8, 64, device="cuda", requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        out.sum().backward()
        assert workspaces() == 2


@pytest.mark.cuda_rig(gpus="8GiB")
def test_what_takes_none() -> None:
    torch.zeros(0, 4, device="cuda") @ torch.zeros(4, 4, device="cuda")
    eight = torch.zeros(32, 64, device="cuda", dtype=torch.int8)
    torch._int_mm(eight, torch.zeros(64, 48, device="cuda", dtype=torch.int8))
    query = torch.zeros(1, 8, 32, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert workspaces() == 0
