"""Plans with experts on the host: what they run is what one large GPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from closeness import HALF_TOLERANCE, close
from tiny import MIB
from torch import Tensor
from torch.nn import functional as F

import duoka
from duoka import Fleet, Plan, Workload, virtual
from duoka.engine import Engine, SamplingParams
from duoka.models.quantization import on_host
from duoka.models.quantization.expert_cache import COUNTS
from duoka.planner.constraints import Constraints

pytestmark = pytest.mark.usefixtures("single_sequences")

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
WORK = Workload(prompt_tokens=64, new_tokens=16, dtype="bfloat16")
PAGED = replace(WORK, cache="paged", batch=4, pages=24, prefill_chunk_tokens=32)
IDS = torch.randint(0, 512, (1, 40), generator=torch.manual_seed(1))
PROMPTS = [IDS[0, :length].tolist() for length in (5, 20, 40, 33)]
LARGE = "virtual:1GiB"
# The layouts of the CPU and of a GPU round scales differently.
TOLERANCES = {"none": HALF_TOLERANCE, "int8": 0.03, "int4": 0.1}
SCHEMES = ["none", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("int8", "int4"))]


@pytest.fixture(autouse=True)
def _gpus() -> None:
    virtual.set_gpus([2**30] * 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_of_config(tmp_path_factory.mktemp("experts"), **CONFIG)


def plan_on(path: Path, gpus: str, experts: Any, workload: Workload, **others: Any) -> Plan:
    fleet = Fleet.parse(gpus).with_host("1GiB,30GB/s")
    constraints = others.pop("constraints", Constraints(experts=experts))
    return duoka.plan(path, fleet, workload, constraints=constraints, suggest=False, **others)


def plan_fetching(path: Path, workload: Workload) -> Iterator[Plan]:
    """Plan with all experts on the host and caches of some, on one GPU and on two."""
    constraints = Constraints(experts="host", host_experts="fetch", expert_cache=5 * MIB)
    for gpus in (LARGE, "virtual:2x500MiB"):
        yield plan_on(path, gpus, "host", workload, constraints=constraints, use_all=True)


def plan_small(path: Path, workload: Workload) -> Iterator[Plan]:
    """Plan with all experts on the host, and with some because of small GPUs, one and two."""
    most, least = (
        plan_on(path, LARGE, experts, workload).forecast.devices[0].reserved_bytes / MIB
        for experts in ("gpu", "host")
    )
    yield plan_on(path, LARGE, "host", workload)
    sizes = [int(least + share * (most - least)) for share in (0.8, 0.55)]
    yield plan_on(path, f"virtual:{sizes[0]}MiB", "auto", workload)
    yield plan_on(path, f"virtual:2x{sizes[1]}MiB", "auto", workload, use_all=True)


def generate(plan: Plan) -> tuple[Tensor, list[int]]:
    """Return the logits of the prompt, and the generated tokens."""
    model: Any = duoka.load(plan)
    ids = IDS.to(plan.placement.devices[0])
    with torch.no_grad():
        logits = model(ids).logits.float().cpu()
        tokens = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return logits, tokens[0, IDS.shape[1] :].tolist()


def serve(plan: Plan, **others: Any) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=8, min_new_tokens=8)
    with Engine(plan, **others) as engine:
        completions: list[Any] = engine.generate(PROMPTS, params)
    return [[choice.token for choice in completion.tokens] for completion in completions]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_loaded_model_generates_the_same(checkpoint: Path, scheme: Any) -> None:
    workload = replace(WORK, quantize=scheme)
    logits, tokens = generate(plan_on(checkpoint, LARGE, "gpu", workload))
    numbers = []
    for plan in plan_small(checkpoint, workload):
        outputs = generate(plan)
        assert close(outputs[0], logits, TOLERANCES[scheme])
        assert outputs[1] == tokens
        numbers.append((len(plan.placement.devices), len(plan.host_experts)))
    if scheme == "none":
        assert numbers == [(1, 4), (1, 3), (2, 2)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("scheme", ["none", "int4"])
@pytest.mark.parametrize("plans_of", [plan_small, plan_fetching])
def test_the_engine_generates_the_same(checkpoint: Path, scheme: Any, plans_of: Any) -> None:
    workload = replace(PAGED, quantize=scheme)
    tokens = serve(plan_on(checkpoint, LARGE, "gpu", workload))
    for plan in plans_of(checkpoint, workload):
        assert plan.host_experts
        assert serve(plan) == tokens
        if len(plan.placement.devices) > 1:
            assert serve(plan, processes=True) == tokens


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fetched_experts_generate_the_same(checkpoint: Path, scheme: Any) -> None:
    workload = replace(WORK, quantize=scheme)
    logits, tokens = generate(plan_on(checkpoint, LARGE, "gpu", workload))
    COUNTS.clear()
    for plan in plan_fetching(checkpoint, workload):
        assert plan.workload.expert_cache_bytes == 5 * MIB * len(plan.devices) // 4
        outputs = generate(plan)
        assert close(outputs[0], logits, TOLERANCES[scheme])
        assert outputs[1] == tokens
    assert min(COUNTS["hits"], COUNTS["misses"]) > 0


def test_the_host_reads_its_weights_in_place(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bit no expert is copied to be multiplied."""
    model: Any = duoka.load(plan_on(checkpoint, LARGE, "host", WORK))
    stacks = [weight for _, module in on_host(model) for weight in module.parameters()]
    assert {weight.device.type for weight in stacks} == {"cpu"}
    held = {weight.tensors["weight"].untyped_storage().data_ptr() for weight in stacks}
    assert len(held) == 2 * CONFIG["num_hidden_layers"]
    linear, read = F.linear, set()

    def record(inputs: Tensor, weight: Tensor, *others: Any) -> Tensor:
        if type(weight) is Tensor and weight.device.type == "cpu":
            read.add(weight.untyped_storage().data_ptr())
        return linear(inputs, weight, *others)

    monkeypatch.setattr(F, "linear", record)
    with torch.no_grad():
        model(IDS[:, :4].to("vgpu:0"))  # with more tokens the GPU fetches the experts
    assert read == held
