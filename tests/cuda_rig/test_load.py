"""Loading onto CUDA: every weight on its device, in as much memory as was planned."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from closeness import close
from cuda_rig.hole_checkpoint import hole_checkpoint
from cuda_rig.values import values
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import duoka
from duoka import Constraints, Fleet, Plan, Workload
from duoka.errors import FleetError
from duoka.forecast.workload import Quantization
from duoka.models.quantization import parts
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.load.read_ahead import STRETCH_BYTES

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from forecast_models import SIZES

MIB = 2**20
PROMPT = Workload(prompt_tokens=2048, new_tokens=8, dtype="bfloat16")
SHORT = Workload(prompt_tokens=20, new_tokens=4, dtype="float32")
IDS = torch.arange(1, 21).reshape(1, 20)


@pytest.fixture
def llama_8b(request: pytest.FixtureRequest) -> Iterator[Path]:
    """All zeros, with so many layers."""
    shape = {**SIZES["llama-3-8b"], "architectures": ["LlamaForCausalLM"]}
    with hole_checkpoint({**shape, "num_hidden_layers": request.param}) as folder:
        yield folder


@pytest.fixture
def gpt2_in_float32() -> Iterator[Path]:
    shape = {**SIZES["gpt2-xl"], "architectures": ["GPT2LMHeadModel"], "n_layer": 4}
    with hole_checkpoint(shape, torch.float32) as folder:
        yield folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config = {name: each for name, each in tiny.CONFIGS["llama"].items() if name != "model_type"}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path)
    return tmp_path


def peak_host_bytes(*, anew: bool = False) -> int:
    """The most that this process had in memory at a time."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def assert_loaded_as_planned(model: nn.Module, plan: Plan) -> None:
    for name, device in plan.placement.entries:
        placed = model.get_submodule(name)
        assert {str(parameter.device) for parameter in placed.parameters()} <= {device}, name
    for stage in plan.forecast.devices:
        assert torch.cuda.memory_allocated(stage.device) == stage.weight_bytes
        assert torch.cuda.max_memory_reserved(stage.device) <= stage.reserved_bytes


def assert_answers_as_planned(model: nn.Module, plan: Plan) -> None:
    stepper = Stepper.of(model, plan.workload, torch.device(plan.devices[0]))
    with torch.no_grad(), values():
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
    for stage in plan.forecast.devices:
        assert torch.cuda.max_memory_allocated(stage.device) == stage.allocated_bytes
        assert torch.cuda.max_memory_reserved(stage.device) == stage.reserved_bytes


def logits(model: nn.Module, plan: Plan) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(plan.devices[0])).logits.float().cpu()


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="16GiB,12GiB", context="400MiB", lag=100)
@pytest.mark.parametrize("llama_8b", [32], indirect=True)
def test_a_model_of_full_size_goes_through_a_few_pinned_buffers(llama_8b: Path) -> None:
    plan = duoka.plan(llama_8b, Fleet.detect(), PROMPT)
    assert {*plan.devices} == {"cuda:0", "cuda:1"}
    told: list[tuple[int, int]] = []
    before = peak_host_bytes(anew=True)
    model = duoka.load(plan, progress=lambda *done: told.append(done))
    assert peak_host_bytes() - before < 512 * MIB
    pinned = torch.cuda.host_memory_stats()
    assert STRETCH_BYTES < pinned["allocated_bytes.peak"] <= 8 * STRETCH_BYTES
    assert told[-1][0] == told[-1][1] > 16 * 10**9
    assert_loaded_as_planned(model, plan)
    assert_answers_as_planned(model, plan)


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="4GiB,3GiB", context="400MiB", copy_limit="4KiB")
@pytest.mark.parametrize("llama_8b", [6], indirect=True)
@pytest.mark.parametrize("quantize", ["int8", "int4", "nf4"])
def test_what_is_quantized_never_lies_there_whole(llama_8b: Path, quantize: Quantization) -> None:
    workload = replace(PROMPT, quantize=quantize)
    plan = duoka.plan(llama_8b, Fleet.detect(), workload, use_all=True)
    assert {*plan.devices} == {"cuda:0", "cuda:1"}
    before = peak_host_bytes(anew=True)
    model = duoka.load(plan)
    assert peak_host_bytes() - before < 512 * MIB
    for stage in plan.forecast.devices:
        peak = torch.cuda.max_memory_allocated(stage.device)
        assert peak < stage.weight_bytes + 32 * MIB
    assert_loaded_as_planned(model, plan)
    assert_answers_as_planned(model, plan)


@pytest.mark.cuda_rig(gpus="1GiB,1GiB")
def test_what_is_cast_on_the_way_takes_no_more_than_planned(gpt2_in_float32: Path) -> None:
    workload = replace(PROMPT, prompt_tokens=16, new_tokens=1)
    plan = duoka.plan(gpt2_in_float32, "2x1GiB", workload, use_all=True)
    assert_loaded_as_planned(duoka.load(plan), plan)


@pytest.mark.cuda_rig(gpus="1GiB,1GiB", copy_limit="1GiB")
def test_a_quantized_model_computes_what_it_does_on_virtual_gpus(small: Path) -> None:
    rehearsed, plan = (
        duoka.plan(small, fleet, replace(SHORT, quantize="int8"), use_all=True)
        for fleet in ("virtual:2x512MiB", "2x512MiB")
    )
    expected = logits(duoka.load(rehearsed), rehearsed)
    with values(most=None):
        model = duoka.load(plan)
        found = logits(model, plan)
    assert len({parameter.device for parameter in model.parameters()}) == 2
    assert close(found, expected)


@pytest.mark.cuda_rig(gpus="1GiB", copy_limit="1GiB", lag=20)
def test_what_does_not_fit_stays_with_the_host(small: Path) -> None:
    plan = duoka.plan(small, "22MiB", SHORT, constraints=Constraints(offload=True))
    assert plan.offloaded
    with values(most=None):
        model = duoka.load(plan)
        assert torch.cuda.memory_allocated() == plan.forecast.devices[0].weight_bytes
        found = logits(model, plan)
    expected = LlamaForCausalLM.from_pretrained(small)
    assert close(found, expected(IDS).logits)
    assert torch.cuda.max_memory_reserved() <= plan.forecast.devices[0].reserved_bytes


@pytest.mark.cuda_rig(gpus="1GiB,1GiB")
def test_an_interrupted_load_leaves_nothing(small: Path) -> None:
    plan = duoka.plan(small, "2x512MiB", SHORT, use_all=True)

    def interrupt(done: int, total: int) -> None:
        if done:
            assert torch.cuda.memory_reserved(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        duoka.load(plan, progress=interrupt)
    assert [torch.cuda.memory_reserved(number) for number in range(2)] == [0, 0]


@pytest.mark.cuda_rig(gpus="1GiB,1GiB")
def test_memory_that_was_taken_meanwhile_is_told(small: Path) -> None:
    plan = duoka.plan(small, Fleet.detect("1"), SHORT)
    held = torch.empty(1000 * MIB, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(FleetError, match="doesn't fit the GPUs of this machine"):
        duoka.load(plan)
    del held  # what the allocator keeps of it is given back
    assert next(duoka.load(plan).parameters()).device == torch.device("cuda:1")


@pytest.mark.slow
@pytest.mark.cuda_rig(gpus="4GiB", context="400MiB", copy_limit="4KiB")
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_experts_on_the_host_are_in_memory_once(quantize: Quantization) -> None:
    """Each expert is quantized as it is read, and pinned where it stays."""
    shape = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "head_dim": 64,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 1024,
    }  # fmt: skip
    with hole_checkpoint(shape) as folder:
        workload = replace(PROMPT, quantize=quantize)
        fleet = Fleet.detect().with_host("8GiB,30GB/s")
        plan = duoka.plan(folder, fleet, workload, constraints=Constraints(experts="host"))
        before = peak_host_bytes(anew=True)
        model = duoka.load(plan)
        assert len(plan.host_experts) == shape["num_hidden_layers"]
        assert plan.forecast.expert_bytes > 500 * MIB
        assert peak_host_bytes() - before < plan.forecast.expert_bytes + 512 * MIB
        hosted = [p for name, p in model.named_parameters() if "experts" in name]
        assert all(part.is_pinned() for weight in hosted for part in parts(weight).values())
        (stage,) = plan.forecast.devices
        assert torch.cuda.memory_allocated(stage.device) == stage.weight_bytes
