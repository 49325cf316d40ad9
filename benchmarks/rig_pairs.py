"""The pairs of `rig.py`, and how each is planned and measured."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from forecast_models import SIZES

import duoka
from duoka import models, virtual
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training
from duoka.models.quantization import quantize_model
from duoka.planner.constraints import Constraints
from duoka.planner.planner import solve, with_chunks
from duoka.planner.request import PlanProblem
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.image_inputs import prompts_for
from duoka.runtime.steps import Learner, Stepper
from duoka.tracing import Irregular, TraceSpec, profile_training, trace, trace_workload

MIB = 2**20
NUM_GPUS = 8
FOR_CUDA_BYTES = 768 * MIB
# Model, budgets, prompt tokens, new tokens, and what else there is.
Case = tuple[str, str, int, int, dict[str, Any]]
PICTURE: dict[str, Any] = {"images": 1, "image_size": (448, 448)}
LORA: dict[str, Any] = {"gradient_checkpointing": True}
CASES: list[Case] = [
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
    ("glm-4-9b", "24GiB", 16000, 6, {"cache": "static", "chunk": 2048}),
    ("llama-3-8b", "16GiB,8GiB", 4000, 6, {"cache": "static"}),
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
    # Images.
    ("glm-4.1v-9b", "16GiB,12GiB", 2500, 6, {"pictures": PICTURE}),
    ("qwen2.5-vl-7b", "12GiB,12GiB", 2500, 6, {"pictures": PICTURE}),
    ("llava-1.5-7b", "12GiB,8GiB", 1500, 6, {"pictures": PICTURE}),
    ("gemma-3-4b-it", "8GiB,8GiB", 1500, 6, {"pictures": PICTURE}),
]


class Planned:
    """A case with its plan, its model on meta, and how its steps are run."""

    def __init__(self, case: Case, profiles: dict[str, Profile]) -> None:
        self.name, self.gpus, prompt, new, more = case
        self.fleet = duoka.Fleet.parse(self.gpus)
        self.capability = more.get("capability", "8.6")
        training = Training(**more["training"]) if "training" in more else None
        self.workload = duoka.Workload(
            batch=more.get("batch", 1),
            prompt_tokens=prompt,
            new_tokens=new,
            dtype=more.get("dtype", "bfloat16"),
            prefill_chunk_tokens=more.get("chunk"),
            cache=more.get("cache", "dynamic"),
            quantize=more.get("quantize", "none"),
            **more.get("pictures", {}),
            training=training,
            gpu_generation=self.fleet.gpu_generation,
        )
        self.dtype = getattr(torch, self.workload.dtype)
        key = f"{self.name} {self.workload.dtype} {self.workload.conditions}"
        if key not in profiles:
            spec = TraceSpec(fingerprint="case", conditions=self.workload.conditions)
            profiles[key] = self.traced(spec)
        offload = more.get("offload", False)
        problem = PlanProblem(
            fleet=self.fleet,
            workload=self.workload,
            use_all=not offload,
            constraints=Constraints(offload=offload),
        )
        self.plan = solve(profiles[key], problem)

    def traced(self, spec: TraceSpec) -> Profile:
        if self.workload.training:
            return virtual.apart(profile_training, self.shape, spec, self.workload)[0]
        with suppress(Irregular):
            return trace(self.shape(), spec)
        return trace_workload(self.shape(), spec, list(with_chunks(self.workload)))

    def shape(self) -> Any:
        model = models.build(SIZES[self.name], dtype=self.dtype)
        if self.workload.quantize != "none":
            quantize_model(model, self.workload.quantize)
        return model

    def run(self) -> None:
        """Run the plan's steps where it says."""
        from cuda_rig.values import values

        plan, model = self.plan, self.shape()
        if self.workload.training:
            models.make_trainable(model, self.workload.training, self.dtype)
        prompts = prompts_for(model, plan.workload.conditions)  # of a model that isn't spread yet
        dispatch(model, plan.placement, empty=True, offloaded=plan.offloaded)
        first = torch.device(plan.placement.entries[0][1])
        if self.workload.training:
            with values():  # masks and positions are looked at
                Learner(model, plan.workload, first).run()
            return
        stepper = Stepper.of(model, plan.workload, first, prompts)
        with torch.no_grad(), values():
            stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)


def measure(planned: Planned, writer: Connection) -> None:
    """In a fork: what the allocator counts."""
    sizes = [device.budget_bytes + FOR_CUDA_BYTES for device in planned.fleet.devices]
    sizes += [MIB] * (NUM_GPUS - len(sizes))  # torch has counted them before the fork
    os.environ["RIG_GPUS"] = ",".join(f"{size // MIB}MiB" for size in sizes)
    os.environ["RIG_CAPABILITY"] = planned.capability
    torch.backends.cuda.enable_cudnn_sdp(False)  # from Hopper on it is chosen; the rig has none
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).rig_restart() == 0
    error = ""
    try:
        planned.run()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    peaks = {
        device: [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
        for device in planned.plan.devices
    }
    writer.send((peaks, error))


def rows_of(case: Case, profiles: dict[str, Profile]) -> Iterator[dict[str, Any]]:
    planned = Planned(case, profiles)
    fork: Any = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=measure, args=(planned, writer))
    child.start()
    writer.close()
    try:
        peaks, error = reader.recv()
    except EOFError:
        peaks, error = {}, "the process died"
    child.join()
    for device in planned.plan.forecast.devices:
        yield {
            "case": case,
            "device": device.device,
            "allocated_bytes": [device.allocated_bytes, peaks.get(device.device, [0, 0])[0]],
            "reserved_bytes": [device.reserved_bytes, peaks.get(device.device, [0, 0])[1]],
            "error": error,
        }


def line_of(row: dict[str, Any]) -> str:
    name, gpus, prompt, new, more = row["case"]
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
