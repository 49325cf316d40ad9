"""Forecast of training against measurement on virtual GPUs: allocated and reserved peaks.

    python benchmarks/forecast_training.py [--only NUMBER ...]

Every pair plans a model and a workload for all GPUs of a fleet. Then two steps of training with
torch's own optimizer run on virtual GPUs without data that have the fleet's budgets; with the
schedule 1f1b once for each stage, with as many micro-batches in flight as that stage has. Errors
are forecast over measured; what is too low is an understatement.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from forecast_models import SIZES

import duoka
from duoka import models
from duoka.checker.prove import prove
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Conditions, Quantization, Training
from duoka.models.quantization import quantize_model
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.tracing import TraceSpec, profile_training


@dataclass(frozen=True)
class Pair:
    """A model and how it is trained, on GPUs."""

    model: str
    gpus: str
    batch: int
    tokens: int
    training: Training
    quantize: Quantization = "none"

    @property
    def workload(self) -> duoka.Workload:
        return duoka.Workload(
            batch=self.batch,
            prompt_tokens=self.tokens,
            new_tokens=0,
            dtype="bfloat16",
            prefill_chunk_tokens=None,
            quantize=self.quantize,
            training=self.training,
        )

    def __str__(self) -> str:
        training = self.training
        said = [training.method, training.optimizer]
        said += [] if self.quantize == "none" else [f"on {self.quantize}"]
        said += ["checkpointing"] if training.gradient_checkpointing else []
        said += ["master weights"] if training.master_weights else []
        if training.micro_batches > 1:
            said.append(f"{training.micro_batches} x {training.schedule}")
        return f"{self.model} on {self.gpus}, {self.batch} x {self.tokens}: {', '.join(said)}"


def pair(
    model: str, gpus: str, batch: int, tokens: int, quantize: Any = "none", **training: Any
) -> Pair:
    return Pair(model, f"virtual:{gpus}", batch, tokens, Training(**training), quantize)


FULL: dict[str, Any] = {"method": "full"}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
PAIRS = [
    pair("glm-4-9b", "80GiB", 1, 1024),
    pair("glm-4-9b", "2x24GiB", 2, 2048, **CHECKPOINTED),
    pair("glm-4-9b", "4x48GiB", 1, 2000, **FULL, **CHECKPOINTED),
    pair("glm-4-9b", "2x96GiB", 1, 500, **FULL, **CHECKPOINTED, master_weights=True),
    pair("llama-3-8b", "2x40GiB", 1, 1500),
    pair("llama-3-8b", "4x40GiB", 1, 1024, **FULL),
    pair("llama-3-8b", "24GiB,40GiB", 3, 700, lora_rank=64, **CHECKPOINTED, micro_batches=4),
    pair("llama-3-8b", "3x80GiB", 1, 2048, **FULL, master_weights=True, micro_batches=2),
    pair("llama-3-8b", "4x24GiB", 1, 4096, **CHECKPOINTED, micro_batches=8, schedule="1f1b"),
    pair("llama-2-7b", "2x80GiB", 2, 1024, **FULL, optimizer="sgd"),
    pair("qwen3-0.6b", "24GiB", 4, 1024, **FULL),
    pair("qwen3-0.6b", "2x16GiB", 2, 777, **FULL, micro_batches=3),
    pair("qwen3-0.6b", "3x24GiB", 1, 2048, **FULL, micro_batches=4, schedule="gpipe"),
    pair("qwen3-0.6b", "2x16GiB", 1, 1024, master_weights=True, **CHECKPOINTED),
    pair("gpt2-xl", "40GiB", 2, 1024, **FULL, **CHECKPOINTED),
    pair("gpt2-xl", "4x24GiB", 1, 1000, **FULL, micro_batches=4, schedule="1f1b"),
    pair("mixtral-8x7b", "3x80GiB", 1, 512),
    pair("mixtral-8x7b", "4x180GiB", 2, 1024, **FULL, **CHECKPOINTED),
    pair("mistral-7b", "2x40GiB", 1, 6000, **CHECKPOINTED),
    pair("mistral-7b", "3x48GiB", 2, 1000, **FULL, **CHECKPOINTED, micro_batches=2),
    pair("gemma-3-4b", "2x48GiB", 1, 1536, **FULL, **CHECKPOINTED),
    pair("gemma-3-4b", "2x40GiB", 2, 600, micro_batches=2, schedule="gpipe"),
    pair("qwen2.5-7b", "4x80GiB", 1, 1024, **FULL, micro_batches=4, schedule="1f1b"),
    pair("bloom-7b1", "2x80GiB", 1, 512),
    pair("bloom-7b1", "4x80GiB", 1, 700, **FULL, micro_batches=4, schedule="1f1b"),
    pair("glm-4-9b", "4x48GiB", 1, 512, **FULL, **CHECKPOINTED, optimizer="adamw8bit"),
    pair("glm-4-9b", "3x24GiB", 1, 512, **FULL, **CHECKPOINTED, optimizer="adafactor"),
    pair("qwen3-0.6b", "2x16GiB", 2, 777, **FULL, optimizer="adamw8bit", micro_batches=3),
    pair("qwen3-0.6b", "2x16GiB", 2, 777, **FULL, optimizer="adafactor", micro_batches=3),
    pair("glm-4-9b", "12GiB", 1, 2048, "nf4", **CHECKPOINTED, master_weights=True),
    pair("glm-4-9b", "2x24GiB", 1, 1024, "nf4", lora_dropout=0.1),
    pair("glm-4-9b", "2x16GiB", 2, 700, "int8", **CHECKPOINTED),
    pair("llama-3-8b", "2x8GiB", 1, 1024, "nf4", **CHECKPOINTED, optimizer="adamw8bit"),
    pair("mixtral-8x7b", "3x80GiB", 1, 512, "nf4"),
]


def build(one: Pair) -> Any:
    model = models.build(SIZES[one.model], dtype=torch.bfloat16)
    if one.quantize in ("int8", "nf4"):
        quantize_model(model, one.quantize)
    return model


def profile_of(known: dict[tuple[str, Conditions], Profile], one: Pair) -> Profile:
    workload = one.workload
    key = one.model, workload.conditions
    if key not in known:
        spec = TraceSpec(fingerprint=one.model, conditions=workload.conditions)
        known[key] = profile_training(lambda: build(one), spec, workload)[0]
    return known[key]


def compare(known: dict[Any, Profile], one: Pair) -> Iterator[tuple[float, float]]:
    start = time.perf_counter()
    profile = profile_of(known, one)
    traced = time.perf_counter()
    fleet = duoka.Fleet.parse(one.gpus)
    plan = find_plan(profile, PlanProblem(fleet=fleet, workload=one.workload, use_all=True))
    planned = time.perf_counter()
    measured = prove(plan, build(one))
    proved = time.perf_counter()
    times = traced - start, planned - traced, proved - planned
    print(f"{one}  (trace {times[0]:.1f} s, plan {times[1]:.1f} s, run {times[2]:.1f} s)")
    for told, found in zip(plan.forecast.devices, measured, strict=True):
        errors = (
            told.allocated_bytes / found.allocated_bytes - 1,
            told.reserved_bytes / found.reserved_bytes - 1,
        )
        kinds = [told.weight_bytes, told.activation_bytes, told.gradient_bytes]
        parts = " + ".join(f"{size / 2**30:.2f}" for size in (*kinds, told.optimizer_bytes))
        print(
            f"  {told.device}  allocated {found.allocated_bytes / 2**30:7.2f} GiB {errors[0]:+.3%}"
            f"  reserved {found.reserved_bytes / 2**30:7.2f} GiB {errors[1]:+.3%}  = {parts}",
            flush=True,
        )
        yield errors


def summary(name: str, errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    high = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    return (
        f"{name}: {len(errors)} GPUs, median {statistics.median(sizes):.3%}, 95th percentile "
        f"{high:.3%}, worst {max(sizes):.3%}, worst understatement {-min([0.0, *errors]):.3%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=int, nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[Any, Profile] = {}
    chosen = [PAIRS[number] for number in options.only] if options.only else PAIRS
    found = [each for one in chosen for each in compare(known, one)]
    print(f"{len(chosen)} pairs of model and workload")
    print(summary("allocated", [allocated for allocated, _ in found]))
    print(summary("reserved", [reserved for _, reserved in found]))


if __name__ == "__main__":
    main()
