"""Whether GPUs fetch experts, and how large their caches are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tuning
from tiny import MIB

import duoka
from duoka import Fleet, Plan, Workload
from duoka.errors import UsageError
from duoka.planner.command_line import options
from duoka.planner.constraints import Constraints

pytestmark = pytest.mark.usefixtures("single_sequences")
LAYERS, EXPERTS, TOP_K = 4, 16, 4
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": LAYERS, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "moe_intermediate_size": 256, "intermediate_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
LAYER_BYTES = EXPERTS * 3 * 512 * 256 * 2
WORK = Workload(prompt_tokens=64, new_tokens=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_of_config(tmp_path_factory.mktemp("experts"), **CONFIG)


def plan(
    path: Path,
    gpus: str = "RTX4090",
    host: str = "1GiB,30GB/s",
    workload: Workload = WORK,
    **constraints: Any,
) -> Plan:
    fleet = Fleet.parse(gpus).with_host(host)
    return duoka.plan(path, fleet, workload, constraints=Constraints(**constraints), suggest=False)


@pytest.mark.parametrize(
    ("host", "is_fetched"), [("1GiB,30GB/s", False), ("1GiB,20GB/s", True), ("1GiB", False)]
)
def test_what_reads_experts_faster_is_chosen(checkpoint: Path, host: str, is_fetched: bool) -> None:
    """An RTX 4090 reads some 24 GB/s of host memory."""
    made = plan(checkpoint, host=host, experts="host")
    assert (made.workload.expert_cache_bytes > 0) is is_fetched
    assert len(made.host_experts) == LAYERS


def test_a_cache_of_a_size_is_divided_among_the_layers(checkpoint: Path) -> None:
    made = plan(checkpoint, experts="host", host_experts="fetch", expert_cache=20 * MIB)
    assert made.workload.expert_cache_bytes == 5 * MIB
    whole = plan(checkpoint, experts="gpu")
    without = plan(checkpoint, experts="host", host_experts="compute")
    ((a,), (b,), (c,)) = (p.forecast.devices for p in (made, whole, without))
    slots = 5 * MIB * EXPERTS // LAYER_BYTES
    assert a.weight_bytes - c.weight_bytes == LAYERS * slots * LAYER_BYTES // EXPERTS
    assert b.weight_bytes - c.weight_bytes == LAYERS * LAYER_BYTES


@pytest.mark.slow
def test_caches_take_what_is_left(checkpoint: Path) -> None:
    """Segments of 20 MiB leave some of it unused."""
    least = plan(checkpoint, experts="host", host_experts="compute").forecast.devices[0]
    shares = []
    for layers in (2, 3, 8):
        budget = least.reserved_bytes + layers * LAYER_BYTES
        made = plan(checkpoint, f"{budget}B", experts="host", host_experts="fetch")
        assert made.forecast.devices[0].reserved_bytes <= budget
        shares.append(made.workload.expert_cache_bytes / LAYER_BYTES)
    assert 0.1 < shares[0] < shares[1] < 0.75 < shares[2]


@pytest.mark.slow
def test_a_larger_cache_fetches_less(checkpoint: Path) -> None:
    """Experts are assumed to be chosen evenly."""
    seconds = []
    for slots in (TOP_K, 8, EXPERTS):
        size = LAYERS * slots * LAYER_BYTES // EXPERTS
        made = plan(checkpoint, experts="host", host_experts="fetch", expert_cache=size)
        assert made.forecast.seconds is not None
        seconds.append(made.forecast.seconds.token_seconds)
    rate = Fleet.parse("RTX4090").devices[0].host_bytes_per_second
    assert rate is not None
    fetched = LAYERS * TOP_K * LAYER_BYTES / EXPERTS / rate
    # Of 16 experts, 12, 8 and 0 are missing in the caches.
    first, second, third = (float(part or 0) for part in seconds)
    assert first - second == pytest.approx(fetched * 4 / EXPERTS, rel=0.01)
    assert second - third == pytest.approx(fetched * 8 / EXPERTS, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "tokens"), [(TOP_K, 1), (8, 2), (EXPERTS, 4)])
def test_graphs_are_of_steps_whose_experts_the_cache_holds(
    checkpoint: Path, slots: int, tokens: int
) -> None:
    """Without a cache, 16 experts of which a token has 4 allow graphs of 4 tokens."""
    size = LAYERS * slots * LAYER_BYTES // EXPERTS
    paged = replace(WORK, cache="paged", batch=4, pages=24)
    made = plan(checkpoint, experts="host", host_experts="fetch", expert_cache=size, workload=paged)
    assert made.workload.cuda_graphs == tokens


def test_a_cache_needs_experts_that_are_fetched() -> None:
    with pytest.raises(UsageError, match="a cache of experts is for experts that the GPUs fetch"):
        Constraints(expert_cache=MIB)


def test_the_command_of_a_plan_names_the_cache(checkpoint: Path) -> None:
    made = plan(checkpoint, experts="host", host_experts="fetch", expert_cache=20 * MIB)
    words = options(made.request)
    assert words["--host-experts"] == ("--host-experts", "fetch")
    assert words["--expert-cache"] == ("--expert-cache", f"{20 * MIB}B")
