"""Forecast beside what a real GPU counted: ten pairs of a model and a workload, stage by stage.

A plan for several budgets is measured on one card: each stage in turn lies on it, under a cap of
its own budget, while the others compute on the CPU. `benchmarks/gpu.py` runs this.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

import duoka
from duoka import models, virtual
from duoka.hardware.fleet import Fleet
from duoka.planner.placement import Placement
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime import devices
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.tracing import TraceSpec, trace

MIB, GIB = 2**20, 2**30
_COMMON = {"max_position_embeddings": 32768, "pad_token_id": 0}
# Shapes of published models, with fewer layers, so that a CPU can take the other stages' part.
CONFIGS: dict[str, dict[str, Any]] = {
    "glm": {
        **_COMMON,
        "model_type": "glm",
        "hidden_size": 4096,
        "num_hidden_layers": 6,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "intermediate_size": 13696,
        "vocab_size": 65024,
        "attention_bias": True,
    },
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 14,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 3584,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "sliding_window": None,
    },
}
# What the rehearsal has instead: the same families, small.
_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "head_dim": 32,
}
# model, prompt tokens, new tokens, batch, chunk, stages
PAIRS = [
    ("glm", 2000, 8, 1, None, 1),
    ("glm", 3000, 6, 1, 1024, 2),
    ("glm", 700, 6, 4, None, 2),
    ("llama", 4000, 8, 1, None, 1),
    ("llama", 2500, 6, 1, None, 2),
    ("llama", 900, 6, 3, 400, 2),
    ("qwen3", 3000, 8, 1, None, 1),
    ("qwen3", 1500, 6, 2, None, 2),
    ("mixtral", 2000, 6, 1, None, 1),
    ("mixtral", 1200, 6, 2, None, 2),
]


def pairs(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Measure all pairs on a device; a row for each stage of each."""
    for number, (name, prompt, new, batch, chunk, stages) in enumerate(PAIRS):
        config = {**CONFIGS[name], **(_SMALL if small else {})}
        shrink = 10 if small else 1
        workload = duoka.Workload(
            batch=batch,
            prompt_tokens=prompt // shrink,
            new_tokens=new,
            dtype="bfloat16",
            prefill_chunk_tokens=None if chunk is None else chunk // shrink,
        )
        plan = planned(config, workload, stages)
        for stage in plan.forecast.devices:
            measured = measure(plan, stage.device, config, device)
            yield {
                "pair": number,
                "model": name,
                "stage": f"{stage.device} of {stages}",
                "allocated_bytes": [stage.allocated_bytes, measured.allocated_bytes],
                "reserved_bytes": [stage.reserved_bytes, measured.reserved_bytes],
            }


def planned(config: dict[str, Any], workload: duoka.Workload, stages: int) -> duoka.Plan:
    """A plan for as many budgets as there are stages, none of which is under pressure."""
    spec = TraceSpec(fingerprint="pair", max_context_tokens=32768)
    profile = trace(models.build(config, dtype=torch.bfloat16), spec)
    fleet = Fleet.parse(f"virtual:{stages}x16GiB")
    return find_plan(profile, PlanProblem(fleet=fleet, workload=workload, use_all=True))


def measure(plan: duoka.Plan, stage: str, config: dict[str, Any], device: str) -> devices.PeakBytes:
    """Run a plan's workload with one of its stages on a device and the others on the CPU."""
    entries = tuple(
        (module, device if at == stage else "cpu") for module, at in plan.placement.entries
    )
    budget = plan.fleet.device(stage).budget_bytes
    model = models.build(config, dtype=torch.bfloat16)
    with capped(device, budget), torch.no_grad():
        dispatch(model, Placement(entries=entries), empty=True)
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        devices.give_back()
        devices.reset_peaks(device)
        first = next(at for module, at in entries)
        stepper = Stepper(model, plan.workload.batch, torch.device(first))
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
        devices.synchronize(device)
        found = devices.peak_bytes(device)
    assert found is not None
    return found


class capped:  # noqa: N801  (a scope, as `contextlib`'s are)
    """Let a device hold no more than a budget, and nothing of what was there before."""

    def __init__(self, device: str, budget_bytes: int) -> None:
        self.device = device
        self.budget_bytes = budget_bytes

    def __enter__(self) -> None:
        if self.device.startswith("vgpu"):
            virtual.set_gpus([self.budget_bytes])
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.empty_cache()
        share = min(1.0, self.budget_bytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def __exit__(self, *_: object) -> None:
        if not self.device.startswith("vgpu"):
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What came out: each row, and how far off they are."""
    for kind in ("allocated", "reserved"):
        errors = []
        yield f"{kind}, forecast and measured MiB"
        for row in rows:
            forecast, measured = row[f"{kind}_bytes"]
            errors.append(100 * (forecast / measured - 1))
            yield (
                f"  {row['pair']:2} {row['model']:8} {row['stage']:12} {forecast / MIB:9.1f} "
                f"{measured / MIB:9.1f}  {errors[-1]:+.2f} %"
            )
        sizes = sorted(map(abs, errors))
        last = sizes[min(len(sizes) - 1, round(0.95 * len(sizes)))]
        yield (
            f"  median {statistics.median(sizes):.2f} %, 95th percentile {last:.2f} %, "
            f"most under {min(errors):+.2f} %"
        )
