"""The pairs of `rig.py`, and how each is planned and measured."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from cuda_rig.forecasting import Case, counted, forecast, run
from forecast_models import SIZES

import duoka
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training

MIB = 2**20
NUM_GPUS = 8
FOR_CUDA_BYTES = 768 * MIB
# Model, budgets, prompt tokens, new tokens, and what else there is.
Pair = tuple[str, str, int, int, dict[str, Any]]
PICTURE: dict[str, Any] = {"images": 1, "image_size": (448, 448)}
FOUR: dict[str, Any] = {"images": 4, "image_size": (1120, 1120)}
LORA: dict[str, Any] = {"gradient_checkpointing": True}
SERVE: dict[str, Any] = {"cache": "paged", "batch": 16, "chunk": 2048, "page_tokens": 256}
PAIRS: list[Pair] = [
    # Short prompts, one sequence.
    ("glm-4-9b", "24GiB", 1000, 16, {}),
    ("llama-3-8b", "24GiB,12GiB", 1000, 6, {}),
    ("llama-2-7b", "8GiB,8GiB", 900, 6, {}),
    ("qwen2.5-7b", "10GiB,6GiB,6GiB", 1200, 6, {}),
    ("qwen3-0.6b", "1GiB,2GiB", 1500, 40, {}),
    ("gpt2-xl", "5GiB,5GiB", 800, 6, {}),
    ("bloom-7b1", "12GiB,8GiB", 900, 6, {}),
    ("mistral-7b", "16GiB", 1000, 6, {}),
    ("gemma-3-4b", "6GiB,8GiB", 1000, 6, {}),
    ("mixtral-8x7b", "80GiB,24GiB", 2000, 6, {}),
    ("qwen3-30b-a3b", "40GiB,30GiB", 1000, 6, {}),
    ("deepseek-v2-lite", "16GiB,24GiB", 3000, 6, {}),
    ("mamba2-2.7b", "4GiB,4GiB", 1000, 6, {}),
    ("bamba-9b", "12GiB,12GiB", 1000, 6, {}),
    ("t5-large", "2GiB,2GiB", 500, 6, {}),
    ("bart-large", "2GiB", 500, 6, {}),
    # Long ones.
    ("glm-4-9b", "24GiB", 16000, 6, {}),
    ("llama-3-8b", "12GiB,24GiB", 32000, 6, {}),
    ("llama-3-8b", "24GiB,12GiB", 8000, 6, {}),
    ("mistral-7b", "10GiB,12GiB", 9000, 6, {}),
    ("gemma-3-4b", "6GiB,8GiB", 6000, 6, {}),
    ("qwen2.5-7b", "12GiB,12GiB", 20000, 6, {}),
    ("qwen3-0.6b", "24GiB", 30000, 6, {}),
    ("llama-3-8b", "8x4GiB", 2000, 6, {}),
    ("glm-4-9b", "8x4GiB", 4000, 6, {}),
    # In chunks.
    ("glm-4-9b", "12GiB,8GiB", 7680, 6, {"chunk": 4096}),
    ("glm-4-9b", "16GiB,16GiB", 32000, 6, {"chunk": 4096}),
    ("llama-3-8b", "12GiB,12GiB", 16000, 6, {"chunk": 2048}),
    ("qwen2.5-7b", "10GiB,10GiB", 12000, 6, {"chunk": 1024}),
    ("mistral-7b", "10GiB,12GiB", 9000, 6, {"chunk": 2048}),
    ("gemma-3-4b", "6GiB,8GiB", 6000, 6, {"chunk": 1024}),
    ("qwen3-30b-a3b", "40GiB,30GiB", 6000, 6, {"chunk": 2048}),
    # Batches.
    ("glm-4-9b", "8GiB,6GiB,12GiB", 1000, 6, {"batch": 4}),
    ("llama-3-8b", "12GiB,12GiB", 700, 6, {"batch": 8}),
    ("llama-2-7b", "16GiB,16GiB", 800, 6, {"batch": 4}),
    ("qwen3-0.6b", "4GiB,4GiB", 600, 12, {"batch": 16}),
    ("mistral-7b", "12GiB,12GiB", 1000, 6, {"batch": 3}),
    ("gpt2-xl", "5GiB,5GiB", 500, 6, {"batch": 4}),
    ("gemma-3-4b", "8GiB,8GiB", 1500, 6, {"batch": 2}),
    ("mixtral-8x7b", "80GiB,24GiB", 700, 6, {"batch": 4}),
    # Caches.
    ("glm-4-9b", "12GiB,14GiB", 6000, 6, {"batch": 2, "cache": "int8"}),
    ("llama-3-8b", "12GiB,12GiB", 8000, 6, {"cache": "int8"}),
    # Weights in fewer bits, and on the host.
    ("glm-4-9b", "8GiB,6GiB", 2000, 6, {"quantize": "int8"}),
    ("llama-3-8b", "6GiB,6GiB", 4000, 6, {"quantize": "int8"}),
    ("glm-4-9b", "8GiB", 2000, 6, {"quantize": "nf4"}),
    ("qwen2.5-7b", "5GiB,5GiB", 3000, 6, {"quantize": "nf4"}),
    ("glm-4-9b", "12GiB", 2000, 6, {"offload": True}),
    ("llama-3-8b", "8GiB,4GiB", 3000, 6, {"offload": True}),
    # Training.
    ("llama-3-8b", "24GiB,24GiB", 1024, 0, {"training": LORA}),
    ("llama-3-8b", "40GiB,40GiB", 1500, 0, {"training": {}}),
    ("glm-4-9b", "24GiB,24GiB", 1024, 0, {"training": LORA}),
    ("qwen2.5-7b", "24GiB,16GiB", 800, 0, {"training": LORA, "batch": 2}),
    ("mistral-7b", "24GiB,24GiB", 2000, 0, {"training": {**LORA, "micro_batches": 4}, "batch": 4}),
    ("qwen3-0.6b", "24GiB", 1024, 0, {"training": {"method": "full"}, "batch": 4}),
    ("qwen3-0.6b", "12GiB,12GiB", 512, 0, {"training": {"method": "full", **LORA}}),
    ("gpt2-xl", "24GiB,24GiB", 512, 0, {"training": {"method": "full"}}),
    ("gemma-3-4b", "24GiB,24GiB", 1024, 0, {"training": LORA}),
    # Other generations.
    ("qwen3-0.6b", "2xT4", 1500, 6, {"capability": "7.5"}),
    ("llama-3-8b", "2xT4", 1000, 6, {"capability": "7.5"}),
    ("llama-3-8b", "2xT4", 3000, 6, {"capability": "7.5", "dtype": "float16", "chunk": 512}),
    ("glm-4-9b", "3xRTX2080Ti", 2000, 6, {"capability": "7.5", "dtype": "float16"}),
    ("gpt2-xl", "T4", 800, 6, {"capability": "7.5", "batch": 2}),
    ("qwen2.5-7b", "2xT4", 1500, 6, {"capability": "7.5", "dtype": "float16"}),
    ("llama-3-8b", "2xT4", 256, 0, {"capability": "7.5", "training": LORA}),
    ("glm-4-9b", "RTX5090", 8000, 6, {"capability": "12.0"}),
    ("llama-3-8b", "RTX5090+RTX3090", 3000, 6, {"capability": "12.0", "batch": 2}),
    ("llama-3-8b", "H100-SXM", 1024, 0, {"capability": "9.0", "training": {}}),
    ("mixtral-8x7b", "2xH100-SXM", 3000, 6, {"capability": "9.0"}),
    ("qwen3-30b-a3b", "H100-SXM", 2000, 6, {"capability": "9.0", "batch": 4}),
    # Continuous batching; one process with several GPUs has no graphs.
    ("glm-4-9b", "RTX4090", 7680, 512, SERVE),
    ("glm-4-9b", "RTX4090", 7680, 512, {**SERVE, "graphs": False}),
    ("glm-4-9b", "RTX4090", 30720, 512, {**SERVE, "batch": 1}),
    ("llama-3-8b", "RTX4090", 3584, 512, SERVE),
    ("llama-3-8b", "RTX4090", 3584, 512, {**SERVE, "batch": 64}),
    ("llama-3-8b", "RTX4090", 3584, 512, {**SERVE, "batch": 64, "graphs": False}),
    ("llama-3-8b", "H100-SXM", 7680, 512, {**SERVE, "batch": 256, "capability": "9.0"}),
    ("llama-3-8b", "RTX5090", 7680, 512, {**SERVE, "batch": 40, "capability": "12.0"}),
    ("qwen2.5-7b", "RTX3090", 3584, 512, SERVE),
    ("mistral-7b", "RTX3090", 3584, 512, {**SERVE, "batch": 24}),
    ("qwen3-0.6b", "4GiB", 1536, 512, {**SERVE, "batch": 32}),
    ("qwen3-0.6b", "2GiB", 1536, 512, SERVE),
    ("llama-3-8b", "12GiB,12GiB", 3584, 512, {**SERVE, "graphs": False}),
    ("glm-4-9b", "12GiB,14GiB", 3584, 512, {**SERVE, "graphs": False}),
    ("llama-3-8b", "2xT4", 3584, 512, {**SERVE, "capability": "7.5", "page_tokens": 16}),
    # Images.
    ("glm-4.1v-9b", "16GiB,12GiB", 2500, 6, {"pictures": PICTURE}),
    ("qwen2.5-vl-7b", "12GiB,12GiB", 2500, 6, {"pictures": PICTURE}),
    ("llava-1.5-7b", "12GiB,8GiB", 1500, 6, {"pictures": PICTURE}),
    ("gemma-3-4b-it", "8GiB,8GiB", 1500, 6, {"pictures": PICTURE}),
    ("glm-4v-9b", "16GiB,16GiB", 7600, 6, {"pictures": FOUR}),
    ("glm-4v-9b", "16GiB,16GiB", 7600, 6, {"pictures": {**FOUR, "vision_batch": 1}, "chunk": 1024}),
    ("qwen2.5-vl-7b", "12GiB,12GiB", 8000, 6, {"pictures": FOUR, "chunk": 2048}),
]


def case_of(pair: Pair) -> Case:
    name, gpus, prompt, new, more = pair
    workload = duoka.Workload(
        batch=more.get("batch", 1),
        prompt_tokens=prompt,
        new_tokens=new,
        dtype=more.get("dtype", "bfloat16"),
        prefill_chunk_tokens=more.get("chunk"),
        cache=more.get("cache", "dynamic"),
        quantize=more.get("quantize", "none"),
        page_tokens=more.get("page_tokens", 16),
        cuda_graphs=more.get("graphs", True),
        **more.get("pictures", {}),
        training=Training(**more["training"]) if "training" in more else None,
        gpu_generation=duoka.Fleet.parse(gpus).gpu_generation,
    )
    offload = more.get("offload", False)
    return Case(config=SIZES[name], gpus=gpus, workload=workload, offload=offload)


def measure(case: Case, plan: duoka.Plan, capability: str, writer: Connection) -> None:
    """In a fork: what the allocator counts."""
    gpus = duoka.Fleet.parse(case.gpus).devices
    sizes = [gpu.budget_bytes + FOR_CUDA_BYTES for gpu in gpus]
    sizes += [MIB] * (NUM_GPUS - len(sizes))  # torch has counted them before the fork
    os.environ["RIG_GPUS"] = ",".join(f"{size // MIB}MiB" for size in sizes)
    os.environ["RIG_CAPABILITY"] = capability
    os.environ["DUOKA_ATTENTION"] = "flash"  # there are no numbers to compare
    torch.backends.cuda.enable_cudnn_sdp(False)  # from Hopper on it is chosen; the rig has none
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).rig_restart() == 0
    error = ""
    try:
        run(plan, case.build())
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    writer.send((counted(plan), error))


def rows_of(pair: Pair, profiles: dict[str, Profile]) -> Iterator[dict[str, Any]]:
    case = case_of(pair)
    key = f"{pair[0]} {case.workload.dtype} {case.workload.conditions}"
    if key not in profiles:
        profiles[key] = case.profile()
    plan = case.plan(profiles[key])
    fork: Any = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    capability = pair[-1].get("capability", "8.6")
    child = fork.Process(target=measure, args=(case, plan, capability, writer))
    child.start()
    writer.close()
    try:
        peaks, error = reader.recv()
    except EOFError:
        peaks, error = [(0, 0)] * len(plan.devices), "the process died"
    child.join()
    for device, told, found in zip(plan.devices, forecast(plan), peaks, strict=True):
        yield {
            "pair": pair,
            "device": device,
            "allocated_bytes": [told[0], found[0]],
            "reserved_bytes": [told[1], found[1]],
            "error": error,
        }


def line_of(row: dict[str, Any]) -> str:
    name, gpus, prompt, new, more = row["pair"]
    what = " ".join(f"{key}={value}" for key, value in more.items())
    cells = [f"{name} {gpus} {prompt}+{new} {what}".strip(), row["device"]]
    for kind in ("allocated_bytes", "reserved_bytes"):
        forecast, measured = row[kind]
        off = f"{forecast / measured - 1:+.3%}" if measured else "?"
        cells += [f"{forecast / MIB:.1f}", f"{measured / MIB:.1f}", off]
    return f"| {' | '.join(cells)} | {row['error']}"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    for kind in ("allocated_bytes", "reserved_bytes"):
        off = [row[kind][0] / row[kind][1] - 1 for row in rows if not row["error"]]
        if off:
            yield (
                f"{kind}: {len(off)} devices, median {statistics.median(map(abs, off)):.3%}, worst "
                f"{max(map(abs, off)):.2%}, most under {min(off):+.3%}"
            )
