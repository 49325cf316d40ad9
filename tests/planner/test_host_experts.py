"""Experts in host memory: the fastest placement, as found by trying all."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from duoka import Device, Fleet, Workload, models
from duoka.forecast.costs import Costs
from duoka.forecast.hosting import hosting
from duoka.forecast.profile import Profile
from duoka.forecast.workload import ALL_EXPERTS
from duoka.hardware.host import host_device
from duoka.models.quantization import keep_on_host, quantize_model
from duoka.planner.host_experts import HostSearch
from duoka.planner.request import PlanProblem
from duoka.tracing import TraceSpec, trace_serving

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 512, "intermediate_size": 512,
    "mlp_only_layers": [1], "max_position_embeddings": 4096,
}  # fmt: skip
WORK = Workload(
    cache="paged", batch=2, prompt_tokens=40, new_tokens=8, dtype="bfloat16", quantize="int8",
    prefill_chunk_tokens=8, pages=6, cuda_graphs=False,
)  # fmt: skip
HOST = host_device(2**34, 1e9)  # slower than the GPUs, whose layers are tiny


def fleet_of(*cards: tuple[int, int]) -> Fleet:
    """Cards of a budget in MiB and a memory bandwidth in GB/s."""
    return Fleet(
        devices=tuple(
            Device(
                name=f"cuda:{index}", budget_bytes=mib * 2**20, workspace_bytes=0,
                memory_bytes_per_second=rate * 1e9, flops_per_second=50e12,
                host_bytes_per_second=1e9,
            )
            for index, (mib, rate) in enumerate(cards)
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=[0, 900_000], ids=["compute", "fetch"])
def profiles(request: pytest.FixtureRequest) -> tuple[Profile, Profile]:
    """The model with all experts on the GPUs, and with all on the host, or two of eight cached."""
    both = []
    for names in ((), ALL_EXPERTS):
        work = replace(WORK, host_experts=names, expert_cache_bytes=request.param)
        model = models.build(CONFIG, dtype=torch.bfloat16)
        quantize_model(model, "int8")
        keep_on_host(model, names, request.param)
        both.append(trace_serving(model, TraceSpec(fingerprint="", conditions=work.conditions)))
    return both[0], both[1]


def work_of(hosted: Profile) -> Workload:
    return replace(WORK, expert_cache_bytes=hosted.conditions.expert_cache_bytes)


def all_placements(costs: Costs, fleet: Fleet) -> list[list[tuple[int, int, int]]]:
    """Every cut into stages on distinct GPUs, as (start, stop, device)."""
    placements = []
    for number in range(1, len(fleet.devices) + 1):
        for cuts in itertools.combinations(range(1, costs.num_blocks), number - 1):
            bounds = [0, *cuts, costs.num_blocks]
            for devices in itertools.permutations(range(len(fleet.devices)), number):
                placements.append([*zip(bounds, bounds[1:], devices, strict=False)])
    return placements


def fastest(profiles: tuple[Profile, Profile], fleet: Fleet) -> float | None:
    """The fewest seconds of all placements, with every number of host layers in each stage."""
    on_gpus, hosted = profiles
    plain = Costs(on_gpus, WORK)
    expert_places = [
        (place, blocks)
        for place, blocks in enumerate(plain.places)
        if any(hosted.kinds[hosted.blocks[block].kind].expert_bytes for block in blocks)
    ]
    best = None
    seen: dict[Any, float | None] = {}

    def seconds_of(start: int, stop: int, device: int) -> float | None:
        """The fewest seconds of a stage that fits; with one layer more on the host it's slower."""
        gpu = fleet.devices[device]
        key = start, stop, gpu.budget_bytes, gpu.speeds
        if key not in seen:
            seen[key] = None
            layers = [blocks for place, blocks in expert_places if start <= place < stop]
            for number in range(len(layers) + 1):
                profile = hosting(on_gpus, {b for at in layers[:number] for b in at}, hosted)
                work = replace(work_of(hosted), host_experts=profile.host_experts)
                costs = Costs(profile, work, host=HOST)
                if costs.stage_bytes(start, stop, gpu.budget_bytes) is not None:
                    times = costs.latency.seconds_on(gpu)
                    assert times is not None
                    seen[key] = float(times[:, start:stop].sum())
                    break
        return seen[key]

    for placement in all_placements(plain, fleet):
        parts = [seconds_of(*stage) for stage in placement]
        if None not in parts:
            total = sum(part for part in parts if part is not None)
            best = total if best is None else min(best, total)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_other_placement_is_faster(profiles: tuple[Profile, Profile], seed: int) -> None:
    rng = random.Random(seed)
    cards = [(rng.randint(10, 34), rng.choice([300, 900])) for _ in range(1 + seed % 3)]
    fleet = fleet_of(*cards)
    problem = PlanProblem(fleet=fleet, workload=work_of(profiles[1]))
    result = HostSearch(*profiles, problem, HOST, has_room=False).find()
    best = fastest(profiles, fleet)
    if best is None:
        assert result is None
    else:
        assert result is not None
        costs, stages, seconds = result
        assert seconds == pytest.approx(best)
        for stage in stages:
            budget = fleet.devices[stage.device].budget_bytes
            assert costs.stage_bytes(stage.start, stage.stop, budget) is not None


def test_a_host_with_too_little_memory_is_refused(profiles: tuple[Profile, Profile]) -> None:
    problem = PlanProblem(fleet=fleet_of((16, 300)), workload=work_of(profiles[1]))
    result = HostSearch(*profiles, problem, HOST, has_room=False).find()
    assert result is not None
    needed = result[0].profile.expert_bytes
    assert needed
    for size, fits in ((needed, True), (needed - 1, False)):
        search = HostSearch(*profiles, problem, host_device(size, 1e9), has_room=False)
        assert (search.find() is not None) == fits
