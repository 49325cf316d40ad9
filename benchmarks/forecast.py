"""Forecast against measurement on virtual GPUs: allocated and reserved peaks, device by device.

    python benchmarks/forecast.py [--json FILE]

Every row plans a model for a fleet and a workload, then runs all of that workload's steps on
virtual GPUs without data and compares what they measured with what was forecast.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import duoka
from duoka import models, virtual
from duoka.dispatching import dispatch
from duoka.placement import Placement
from duoka.tracing import Stepper, Subject, trace

SIZES = {
    "glm": {
        "model_type": "glm",
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "intermediate_size": 13696,
        "vocab_size": 151552,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "pad_token_id": 0,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
}
# model, fleet, prompt tokens, new tokens, batch, chunk
ROWS = [
    ("glm", "virtual:24GiB", 2000, 32, 1, None),
    ("glm", "virtual:12GiB,12GiB", 2000, 8, 1, None),
    ("glm", "virtual:2x16GiB", 30000, 8, 1, 4096),
    ("glm", "virtual:3x10GiB", 1000, 8, 4, None),
    ("llama", "virtual:24GiB", 8000, 16, 1, None),
    ("llama", "virtual:10GiB,12GiB", 3000, 8, 1, None),
    ("llama", "virtual:2x12GiB", 700, 8, 8, None),
    ("qwen3", "virtual:1GiB,2GiB", 1500, 40, 1, None),
    ("qwen3", "virtual:3GiB", 5000, 8, 2, None),
    ("gpt2", "virtual:2x5GiB", 800, 20, 1, None),
    ("gpt2", "virtual:8GiB", 500, 8, 6, 128),
]


def measure(plan: duoka.Plan, config: dict) -> list[tuple[str, int, int, int, int]]:
    names = plan.devices
    index = {name: f"vgpu:{number}" for number, name in enumerate(names)}
    budgets = {device.name: device.budget_bytes for device in plan.fleet.devices}
    entries = tuple((module, index[name]) for module, name in plan.placement.entries)
    model = models.build(config, dtype=torch.bfloat16)
    with virtual.gpus([budgets[name] for name in names], data="meta") as world, torch.no_grad():
        dispatch(model, Placement(entries=entries), empty=True)
        stepper = Stepper.of(model, plan.workload, torch.device("vgpu:0"))
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
        return [
            (
                item.device,
                item.allocated_bytes,
                world.max_memory_allocated(number),
                item.reserved_bytes,
                world.max_memory_reserved(number),
            )
            for number, item in enumerate(plan.forecast.devices)
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from duoka.planner import Question, solve

    profiles = {}
    rows = []
    print("model  fleet                 prompt  new batch chunk  device    allocated    reserved")
    for name, fleet, prompt, new, batch, chunk in ROWS:
        start = time.perf_counter()
        if name not in profiles:
            model = models.build(SIZES[name], dtype=torch.bfloat16)
            profiles[name] = trace(model, Subject(fingerprint=name, max_context_tokens=None))
        traced = time.perf_counter()
        workload = duoka.Workload(
            batch=batch,
            prompt_tokens=prompt,
            new_tokens=new,
            dtype="bfloat16",
            prefill_chunk_tokens=chunk,
        )
        plan = solve(profiles[name], Question(fleet=duoka.Fleet.parse(fleet), workload=workload))
        planned = time.perf_counter()
        for device, *peaks in measure(plan, SIZES[name]):
            allocated, got_allocated, reserved, got_reserved = peaks
            print(
                f"{name:6} {fleet:20} {prompt:7} {new:4} {batch:5} {chunk!s:>5}  {device}"
                f"  {got_allocated / 2**20:9.1f} {allocated / got_allocated - 1:+.2%}"
                f"  {got_reserved / 2**20:9.1f} {reserved / got_reserved - 1:+.2%}"
                f"  trace {traced - start:.1f} plan {planned - traced:.1f}"
                f" run {time.perf_counter() - planned:.1f}"
            )
            rows.append([name, fleet, prompt, new, batch, chunk, device, *peaks])
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
