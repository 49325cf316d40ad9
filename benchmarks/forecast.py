"""Forecast against measurement on virtual GPUs: allocated and reserved peaks, device by device.

    python benchmarks/forecast.py [--quick] [--part I/N] [--only NAME,NAME] [--json FILE]

Every pair plans a model for a fleet and a workload, then runs all of that workload's steps on
virtual GPUs without data and compares what they measured with what was forecast. Errors are
forecast over measured; what is too low is an understatement. With `--quick` pairs with more than 20
new tokens or an 8-bit cache are left out, and of the pairs with images all but the first of each
model. Parts take the models by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forecast_models import SIZES

import duoka
from duoka import models, virtual
from duoka.forecast.profile import Profile
from duoka.planner.placement import Placement
from duoka.planner.planner import with_chunks
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.image_inputs import prompts_for
from duoka.tracing import Irregular, TraceSpec, trace, trace_workload

QUICK_NEW_TOKENS = 20
_LINE = "{:16} {:24} {:>15} {:>3} {:>5} {:>7} {:>13} {:7} {:>9} {:>7} {:>9} {:>7}"


@dataclass(frozen=True)
class Pair:
    """A model and a workload, on devices."""

    model: str
    gpus: str
    prompt: int
    new: int
    batch: int = 1
    chunk: int | None = None
    cache: Any = "dynamic"
    image: tuple[int, int] | None = None
    images: int = 1
    vision_batch: int | None = None

    @property
    def workload(self) -> duoka.Workload:
        images: dict[str, Any] = {
            "images": self.images,
            "image_size": self.image,
            "vision_batch": self.vision_batch,
        }
        return duoka.Workload(
            batch=self.batch,
            prompt_tokens=self.prompt,
            new_tokens=self.new,
            dtype="bfloat16",
            prefill_chunk_tokens=self.chunk,
            cache=self.cache,
            **(images if self.image else {}),
        )

    @property
    def fleet(self) -> duoka.Fleet:
        return duoka.Fleet.parse(f"virtual:{self.gpus}")


PAIRS = (
    Pair("glm-4-9b", "24GiB", 2000, 32),
    Pair("glm-4-9b", "12GiB,12GiB", 2000, 8),
    Pair("glm-4-9b", "16GiB,16GiB", 30000, 8, chunk=4096),
    Pair("glm-4-9b", "8GiB,6GiB,12GiB", 1000, 8, batch=4),
    Pair("glm-4-9b", "24GiB", 16000, 64, chunk=2048),
    Pair("glm-4-9b", "12GiB,14GiB", 6000, 16, batch=2, cache="int8"),
    Pair("llama-3-8b", "24GiB", 8000, 16),
    Pair("llama-3-8b", "10GiB,12GiB", 3000, 8),
    Pair("llama-3-8b", "12GiB,12GiB", 700, 8, batch=8),
    Pair("llama-3-8b", "12GiB,16GiB", 500, 150, batch=16),
    Pair("llama-3-8b", "6GiB,5GiB,8GiB,10GiB", 4000, 8, batch=2),
    Pair("llama-3-8b", "12GiB,12GiB", 30000, 8, chunk=2048, cache="int8"),
    Pair("llama-2-7b", "10GiB,16GiB", 1200, 100, batch=4),
    Pair("llama-2-7b", "24GiB", 3000, 12, batch=2),
    Pair("llama-2-7b", "12GiB,8GiB", 3500, 70, cache="int8"),
    Pair("qwen2.5-7b", "10GiB,12GiB", 12000, 8),
    Pair("qwen3-0.6b", "1GiB,2GiB", 1500, 40),
    Pair("qwen3-0.6b", "3GiB", 5000, 8, batch=2),
    Pair("qwen3-0.6b", "6GiB,3GiB", 400, 250, batch=16),
    Pair("gpt2-xl", "5GiB,5GiB", 800, 20),
    Pair("gpt2-xl", "8GiB", 500, 8, batch=6, chunk=128),
    Pair("bloom-7b1", "12GiB,10GiB", 1700, 8, batch=2),
    Pair("mistral-7b", "10GiB,12GiB", 9000, 12),
    Pair("mistral-7b", "16GiB", 3900, 300),  # decoding fills the window
    Pair("mistral-7b", "16GiB", 12000, 8, chunk=1024),
    Pair("mistral-7b", "10GiB,10GiB", 9000, 8, cache="int8", chunk=1024),
    Pair("gemma-3-4b", "6GiB,8GiB", 6000, 16),
    Pair("gemma-3-4b", "16GiB", 3000, 8, batch=3, cache="int8"),
    Pair("mixtral-8x7b", "80GiB,24GiB", 2000, 8),
    Pair("mixtral-8x7b", "24GiB,32GiB,24GiB,32GiB", 900, 8, batch=4),
    Pair("qwen3-30b-a3b", "48GiB,24GiB", 3000, 8),
    Pair("deepseek-v2-lite", "16GiB,24GiB", 3000, 8),
    Pair("deepseek-v2-lite", "24GiB,16GiB", 1500, 8, batch=3, cache="int8"),
    Pair("mamba2-2.7b", "8GiB", 2000, 16),
    Pair("mamba2-2.7b", "6GiB,8GiB", 1000, 8, batch=4),
    Pair("bamba-9b", "16GiB,12GiB", 3000, 8),
    Pair("t5-large", "2GiB,3GiB", 1000, 16),
    Pair("t5-large", "4GiB", 500, 40, batch=4),
    Pair("bart-large", "1GiB,1GiB", 900, 12, batch=2),
    Pair("glm-4v-9b", "16GiB,16GiB", 8000, 8, image=(1120, 1120), images=4),
    Pair("glm-4v-9b", "16GiB,16GiB", 8000, 8, image=(1120, 1120), images=4, vision_batch=1),
    Pair("glm-4v-9b", "16GiB,16GiB", 8000, 8, image=(1120, 1120), images=4, chunk=1024),
    Pair(
        "glm-4v-9b",
        "16GiB,16GiB",
        8000,
        8,
        image=(1120, 1120),
        images=4,
        vision_batch=1,
        chunk=1024,
    ),
    Pair("glm-4v-9b", "8GiB,8GiB,8GiB,8GiB", 4000, 8, image=(1120, 1120)),
    Pair("glm-4.1v-9b", "24GiB", 4000, 8, image=(1120, 1120)),
    Pair("glm-4.1v-9b", "12GiB,14GiB", 8000, 8, image=(1120, 1120), images=4),
    Pair("glm-4.1v-9b", "12GiB,14GiB", 8000, 8, image=(1120, 1120), images=4, vision_batch=1),
    Pair("glm-4.1v-9b", "12GiB,14GiB", 8000, 8, image=(1120, 1120), images=4, chunk=1024),
    Pair(
        "glm-4.1v-9b",
        "12GiB,14GiB",
        8000,
        8,
        image=(1120, 1120),
        images=4,
        vision_batch=1,
        chunk=1024,
    ),
    Pair("glm-4.1v-9b", "12GiB,16GiB", 7000, 8, image=(1120, 1120)),
    Pair("qwen2.5-vl-7b", "10GiB,12GiB", 3000, 8, image=(896, 1344)),
    Pair("qwen2-vl-7b", "10GiB,12GiB", 10000, 8, image=(1120, 1120), images=4),
    Pair("qwen2-vl-7b", "10GiB,12GiB", 10000, 8, image=(1120, 1120), images=4, vision_batch=1),
    Pair(
        "qwen2-vl-7b",
        "10GiB,12GiB",
        10000,
        8,
        image=(1120, 1120),
        images=4,
        vision_batch=1,
        chunk=1024,
    ),
    Pair("llava-1.5-7b", "8GiB,10GiB", 1500, 8, batch=2, image=(336, 336)),
    Pair("llava-1.5-7b", "10GiB,12GiB", 6000, 8, image=(336, 336), images=8),
    Pair("llava-1.5-7b", "10GiB,12GiB", 6000, 8, image=(336, 336), images=8, vision_batch=1),
    Pair(
        "llava-1.5-7b",
        "10GiB,12GiB",
        6000,
        8,
        image=(336, 336),
        images=8,
        vision_batch=1,
        chunk=512,
    ),
    Pair("gemma-3-4b-it", "12GiB", 2500, 8, image=(896, 896)),
    Pair("gemma-3-4b-it", "12GiB", 4000, 8, image=(896, 896), images=8),
    Pair("gemma-3-4b-it", "12GiB", 4000, 8, image=(896, 896), images=8, vision_batch=1),
)


def profile_of(pair: Pair, known: dict[Any, Profile]) -> Profile:
    """By rules where they hold, which are kept for other workloads; else for this one alone."""
    workload = pair.workload
    key = pair.model, workload.conditions
    if key in known and known[key].answers(pair.batch):
        return known[key]
    spec = TraceSpec(fingerprint=pair.model, conditions=workload.conditions)

    def build() -> Any:
        return models.build(SIZES[pair.model], dtype=torch.bfloat16)

    try:
        if build().config.is_encoder_decoder:
            raise Irregular("two lengths")
        found = trace(build(), spec)
        if found.answers(pair.batch):
            known[key] = found
            return found
    except Irregular:
        pass
    return trace_workload(build(), spec, list(with_chunks(workload)))


def measure(plan: duoka.Plan, config: dict[str, Any]) -> Iterator[tuple[str, int, int, int, int]]:
    """Each device with its allocated and reserved bytes, forecast and measured."""
    names = plan.devices
    index = {name: f"vgpu:{number}" for number, name in enumerate(names)}
    budgets = {device.name: device.budget_bytes for device in plan.fleet.devices}
    entries = tuple((module, index[name]) for module, name in plan.placement.entries)
    model = models.build(config, dtype=torch.bfloat16)
    prompts = prompts_for(model, plan.workload.conditions)
    with virtual.gpus([budgets[name] for name in names], data="meta") as world, torch.no_grad():
        dispatch(model, Placement(entries=entries), empty=True)
        stepper = Stepper.of(model, plan.workload, torch.device("vgpu:0"), prompts)
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
        for number, item in enumerate(plan.forecast.devices):
            yield (
                item.device,
                item.allocated_bytes,
                world.max_memory_allocated(number),
                item.reserved_bytes,
                world.max_memory_reserved(number),
            )


def run(pair: Pair, known: dict[Any, Profile]) -> Iterator[dict[str, Any]]:
    """Plan and measure one pair, and print a line for each of its devices."""
    start = time.perf_counter()
    problem = PlanProblem(fleet=pair.fleet, workload=pair.workload, use_all=True)
    plan = find_plan(profile_of(pair, known), problem)
    planned = time.perf_counter()
    for device, allocated, got_allocated, reserved, got_reserved in measure(
        plan, SIZES[pair.model]
    ):
        print(
            _LINE.format(
                pair.model,
                pair.gpus,
                f"{pair.prompt}+{pair.new}",
                pair.batch,
                str(pair.chunk or "-"),
                pair.cache,
                _pictures(pair),
                device,
                f"{got_allocated / 2**20:.1f}",
                f"{allocated / got_allocated - 1:+.2%}",
                f"{got_reserved / 2**20:.1f}",
                f"{reserved / got_reserved - 1:+.2%}",
            ),
            f" {planned - start:.0f}+{time.perf_counter() - planned:.0f} s",
            flush=True,
        )
        yield {
            "pair": [pair.model, pair.gpus, pair.prompt, pair.new, pair.batch],
            "device": device,
            "forecast_allocated_bytes": allocated,
            "measured_allocated_bytes": got_allocated,
            "forecast_reserved_bytes": reserved,
            "measured_reserved_bytes": got_reserved,
            "allocated": allocated / got_allocated - 1,
            "reserved": reserved / got_reserved - 1,
        }


def _pictures(pair: Pair) -> str:
    """A pair's images: how many, how large, and how many are encoded at a time."""
    if pair.image is None:
        return "-"
    height, width = pair.image
    at_once = f"/{pair.vision_batch}" if pair.vision_batch else ""
    return f"{pair.images}{at_once}:{width}x{height}"


def summary(rows: list[dict[str, Any]], what: str) -> str:
    """Median and 95th percentile of the absolute errors, and the worst understatement."""
    errors = sorted(abs(row[what]) for row in rows)
    high = errors[min(len(errors) - 1, -(-95 * len(errors) // 100) - 1)]
    worst = min(min(row[what] for row in rows), 0.0)
    return (
        f"{what}: median {statistics.median(errors):.2%}, 95th percentile {high:.2%}, "
        f"largest {errors[-1]:.2%}, worst understatement {worst:.2%}"
    )


def quick(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that are measured within seconds, with one pair with images per model."""
    seen: set[str] = set()
    kept = []
    for pair in pairs:
        is_short = pair.new <= QUICK_NEW_TOKENS and pair.cache != "int8"
        if is_short and not (pair.image and pair.model in seen):
            kept.append(pair)
            seen.add(pair.model)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", default="1/1", help="such as 2/3: each third, from the second on")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[Any, Profile] = {}
    only = options.only.split(",")
    chosen = quick(PAIRS) if options.quick else PAIRS
    pairs = [pair for pair in chosen if any(name in pair.model for name in only)]
    titles = "model gpus tokens b chunk cache image device allocated error reserved error"
    print(_LINE.format(*titles.split()), " trace and plan, run")
    part, parts = map(int, options.part.split("/"))
    names = list(dict.fromkeys(pair.model for pair in pairs))[part - 1 :: parts]
    pairs = [pair for pair in pairs if pair.model in names]
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        rows += run(pair, known)
        if options.json:
            options.json.write_text(json.dumps(rows))
    print(f"\n{len(pairs)} pairs, {len(rows)} devices")
    for what in ("allocated", "reserved"):
        print(summary(rows, what))


if __name__ == "__main__":
    main()
