"""How much encoding images in passes and reading prompts in chunks lower the peak.

    python benchmarks/vision_parts.py

Eight pictures in one prompt, on one virtual GPU that holds everything: whole, then encoded one at a
time, then read in chunks, then both. What lies above the weights is allocated for images and KV
cache; each run's forecast is held against its measurement.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from forecast import Pair, measure, profile_of
from forecast_models import SIZES

from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan

CHUNK = 1024
LARGE, SMALL = (1120, 1120), (336, 336)
PAIRS = (
    Pair("glm-4v-9b", "48GiB", 14000, 8, image=LARGE, images=8),
    Pair("glm-4.1v-9b", "48GiB", 14000, 8, image=LARGE, images=8),
    Pair("qwen2-vl-7b", "48GiB", 14000, 8, image=LARGE, images=8),
    Pair("llava-1.5-7b", "48GiB", 6000, 8, image=SMALL, images=8),
    Pair("gemma-3-4b-it", "48GiB", 4000, 8, image=(896, 896), images=8),
)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "images one by one": {"vision_batch": 1},
    f"chunks of {CHUNK}": {"chunk": CHUNK},
    "both": {"vision_batch": 1, "chunk": CHUNK},
}
LINE = "| {} | {} | {} | {} | {} | {} |"


def row(pair: Pair, way: str) -> str:
    """One way to run a pair: peaks above the weights, and how they were forecast."""
    pair = replace(pair, **WAYS[way])
    problem = PlanProblem(fleet=pair.fleet, workload=pair.workload)
    plan = find_plan(profile_of(pair, {}), problem)
    (stage,) = plan.forecast.devices
    ((_, allocated, got_allocated, reserved, got_reserved),) = measure(plan, SIZES[pair.model])
    return LINE.format(
        pair.model,
        way,
        f"{(got_allocated - stage.weight_bytes) / 2**20:.0f}",
        f"{allocated / got_allocated - 1:+.2%}",
        f"{(got_reserved - stage.weight_bytes) / 2**20:.0f}",
        f"{reserved / got_reserved - 1:+.2%}",
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(LINE.format("model", "way", "allocated, MiB", "forecast", "reserved, MiB", "forecast"))
    print("|---|---|---:|---:|---:|---:|")
    for pair in PAIRS:
        for way in WAYS:
            try:
                print(row(pair, way), flush=True)
            except Exception as error:
                print(f"{pair.model}, {way}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
