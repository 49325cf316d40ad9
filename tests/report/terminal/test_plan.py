from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from staged import GIB, staged

from duoka.forecast.forecast import Forecast
from duoka.forecast.latency import Seconds
from duoka.forecast.stage_bytes import StageBytes
from duoka.hardware.device import Device, Link
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.planner.reasons import gpus_reason
from duoka.report.terminal import name_modules, render_plan
from duoka.report.terminal.plan import render_seconds
from duoka.report.terminal.words import modules_of


def forecast(device: str, weights: float, budget: float) -> StageBytes:
    allocated = round((weights + 0.75) * GIB)
    return StageBytes(
        device=device,
        weight_bytes=round(weights * GIB),
        kv_cache_bytes=GIB // 2,
        activation_bytes=GIB // 4,
        allocated_bytes=allocated,
        requested_bytes=allocated,
        reserved_bytes=allocated + GIB // 4,
        budget_bytes=round(budget * GIB),
    )


PLAN = replace(
    staged([28, 12], gpus="24GiB,12GiB,8GiB"),
    model="ChatGLMForCausalLM",
    forecast=Forecast(devices=(forecast("cuda:0", 12, 24), forecast("cuda:1", 6, 12))),
    why=tuple(gpus_reason(2, 3, "cuda:0", is_limited=False, lack_room=False)),
)


def printed(plan: Plan, width: int, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, errors="replace"), width=width)
    console.print(render_plan(plan))
    console.file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 71, 80, 200])
def test_everything_is_there_at_any_width(width: int) -> None:
    text = printed(PLAN, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for wanted in ("ChatGLMForCausalLM", "bfloat16", "cuda:0", "cuda:1", "12.00", "13.00", "24.00"):
        assert wanted in words
    assert "no single GPU fits the workload" in words
    assert "\x1b" not in text


def test_bars_are_as_long_as_budgets_and_parts() -> None:
    first, second = re.findall(r"^cuda:\d ([█▓▒░·]+)$", printed(PLAN, 80), re.MULTILINE)
    assert len(first) == 2 * len(second) == 60
    assert first.count("█") == 30  # 12 of 24 GiB
    assert first.count("·") == 60 * (24 - 13) // 24 + 1


def test_bars_without_unicode() -> None:
    text = printed(PLAN, 80, encoding="ascii")
    assert re.search(r"^cuda:0 #{30}[=+-]+\.+$", text, re.MULTILINE)


def test_small_sizes_are_in_mib() -> None:
    small = (forecast("cuda:0", 12 / 1024, 24 / 1024), forecast("cuda:1", 6 / 1024, 12 / 1024))
    text = printed(replace(PLAN, forecast=Forecast(devices=small)), 80)
    assert "in MiB" in text
    assert "12.00" in text


def with_fleet(fleet: Fleet) -> Plan:
    return replace(PLAN, fleet=fleet)


def test_budgets_of_cards_are_explained() -> None:
    text = printed(with_fleet(Fleet.parse("2xRTX4090")), 80)
    assert "cuda:0, cuda:1: RTX 4090, 23.61 GiB when empty, less 768.00 MiB reserved for CUDA" in (
        " ".join(text.split())
    )
    mixed = printed(with_fleet(Fleet.parse("MyCard:16GiB+24GiB")), 80)
    assert "cuda:0: MyCard, 16.00 GiB when empty, less 768.00 MiB reserved for CUDA" in mixed
    assert mixed.count("reserved for CUDA") == 1


def test_budgets_of_gpus_that_are_there_are_explained() -> None:
    reserve = 768 * 2**20
    there = Device(
        name="cuda:0",
        budget_bytes=20 * GIB - reserve,
        product="NVIDIA X",
        uuid="GPU-1",
        pci_address="00000000:41:00.0",
        memory_bytes=24 * GIB,
        reserve_bytes=reserve,
    )
    other = replace(there, name="cuda:1", uuid="GPU-2", pci_address="", memory_bytes=None)
    text = printed(with_fleet(Fleet(devices=(there, other))), 100)
    rest = "less 768.00 MiB reserved for CUDA"
    assert f"cuda:0: NVIDIA X at 00000000:41:00.0, 20.00 GiB free of 24.00 GiB, {rest}" in text
    assert f"cuda:1: NVIDIA X, 20.00 GiB free, {rest}" in text


def test_a_card_without_the_plans_dtype_is_told() -> None:
    old = with_fleet(Fleet.parse("2xV100-16GB"))
    told = "cuda:0, cuda:1: no bfloat16 in V100-16GB-PCIe; torch emulates it slowly; --dtype float"
    assert told in " ".join(printed(old, 200).split())
    half = printed(with_fleet(Fleet.parse("RTX3090+T4")), 200)
    assert "cuda:1: no bfloat16 in T4;" in half
    assert max(map(len, printed(old, 40).splitlines())) <= 40
    for fleet in ("2xRTX3090,T4", "24GiB,12GiB"):  # the third isn't used; what isn't known
        assert "bfloat16 in" not in printed(with_fleet(Fleet.parse(fleet)), 200)
    sixteen = replace(old, workload=replace(old.workload, dtype="float16"))
    assert "bfloat16" not in printed(sixteen, 200)


def test_bars_of_a_hostile_plan_are_no_longer_than_others() -> None:
    first, second = PLAN.forecast.devices
    huge = replace(first, weight_bytes=2**62, kv_cache_bytes=1 - 2**62)
    text = printed(replace(PLAN, forecast=Forecast(devices=(huge, second))), 80)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([""], "everything"),
        (["0", "1", "2"], "0-2"),
        (["model.layers.3"], "layers.3"),
        (["model.layers.0", "model.layers.2"], "layers.0,2"),
        (["a.0", "b.1"], "a.0, b.1"),
        (["transformer.h.0", "transformer.h.1", "ln_f"], "h.0-1, ln_f"),
        ([], ""),
    ],
)
def test_names_of_modules_are_shortened(names: list[str], text: str) -> None:
    assert name_modules(names) == text


TOWERED = [
    ("model.visual.blocks.0", "cuda:0"),
    ("model.visual.blocks.1", "cuda:0"),
    ("model.visual.merger.proj", "cuda:0"),
    ("model.layers.0", "cuda:1"),
    ("model.layers.1", "cuda:1"),
    ("lm_head", "cuda:1"),
]


def test_a_tower_that_is_whole_is_one_name() -> None:
    assert modules_of(TOWERED, "cuda:0") == ["model.visual"]
    assert modules_of(TOWERED, "cuda:1") == ["model.layers.0", "model.layers.1", "lm_head"]
    split = [("model.visual.blocks.0", "cuda:1"), *TOWERED[1:]]
    assert modules_of(split, "cuda:0") == ["model.visual.blocks.1", "model.visual.merger"]


SECONDS = Seconds(
    stages=(),
    total_seconds=12.0,
    slowest_seconds=3.0,
    first_token_seconds=1.94,
    token_seconds=0.0321,
    tokens_per_second=55.4,
)


def lines(seconds: Seconds | None, fleet: Fleet | None = None) -> list[str]:
    forecast = replace(PLAN.forecast, seconds=seconds)
    plan: Plan = replace(PLAN, forecast=forecast, fleet=fleet or PLAN.fleet)
    return [str(line) for line in render_seconds(plan)]


def test_the_pace_is_rounded_and_called_so() -> None:
    told, _ = lines(SECONDS)
    assert told == "time to first token: about 1.9 s, then about 31 tokens/s"
    told, _ = lines(replace(SECONDS, token_seconds=None))
    assert told == "time to first token: about 1.9 s"
    step = replace(SECONDS, first_token_seconds=None, token_seconds=None, total_seconds=11.0)
    assert lines(step)[0] == "step time: about 11 s, about 55 tokens/s"


def test_it_is_told_what_was_measured() -> None:
    _, told = lines(SECONDS)
    assert "published" in told
    measured = ("memory_bytes_per_second", "flops_per_second")
    first, *rest = PLAN.fleet.devices
    mixed = Fleet(devices=(replace(first, measured=measured), *rest))
    _, told = lines(SECONDS, mixed)
    assert told.startswith(
        "cuda:0: speeds as measured on this machine; others: speeds as published"
    )
    every = Fleet(devices=tuple(replace(each, measured=measured) for each in PLAN.fleet.devices))
    told = "speeds as measured on this machine"
    assert lines(SECONDS, every)[1] == f"{told}, links as published"
    link = Link(
        source="cuda:0", target="cuda:1", bytes_per_second=1e9, latency_seconds=0.0, measured=True
    )
    assert lines(SECONDS, replace(every, links=(link,)))[1] == told
