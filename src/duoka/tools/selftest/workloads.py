"""The engine and a step of fine-tuning on a checkpoint of random weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import duoka
from duoka.base.units import format_bytes, format_seconds
from duoka.errors import InfeasibleError
from duoka.forecast.allocator import SMALL_SEGMENT_BYTES
from duoka.hardware import nvml
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.tools.bench.calibrate import read_rate
from duoka.tools.bench.measure import Replica
from duoka.tools.doctor import Finding
from duoka.tuner.settings import TuneSettings

_MOST_UNDER = 0.001  # of a forecast
_PROMPT_TOKENS, _NEW_TOKENS, _SEQUENCES = 512, 64, 16
_QUICK_TOKENS = 24
_SEQ_LENGTH, _QUICK_SEQ_LENGTH = 512, 128


def measure_engine(fleet: Fleet, directory: str, quick: bool, graphs: bool) -> Iterator[Finding]:
    """Load a model, generate with 1 and 16 requests, and compare the memory with its forecast."""
    prompt, new = (_QUICK_TOKENS, _QUICK_TOKENS) if quick else (_PROMPT_TOKENS, _NEW_TOKENS)
    work = duoka.Workload(
        cache="paged", batch=_SEQUENCES, prompt_tokens=prompt, new_tokens=new,
        prefill_chunk_tokens=prompt, pages_for_batch=True, cuda_graphs=graphs,
    )  # fmt: skip
    plan = duoka.plan(directory, fleet, work, use_all=True)
    used_before, times = _used_bytes(fleet), [time.perf_counter()]
    replica = Replica(plan, warm_up="every", progress=lambda *_: times.append(time.perf_counter()))
    yield _describe_load(plan, time.perf_counter() - times[0], times[1:])
    speeds = {}
    for requests in (1, _SEQUENCES):
        speeds[requests] = replica.rates(requests, prompt, new).many_tokens_per_second or 0.0
        cpu = replica.cpu_seconds(requests, prompt, new) if len(plan.devices) == 1 else None
        text = "" if cpu is None else f", {format_seconds(cpu)} of CPU time per step"
        figures = {"tokens_per_second": speeds[requests], "cpu_seconds_per_step": cpu}
        text = f"batch {requests}: {speeds[requests]:.1f} tokens/s{text}"
        yield Finding("ok", text, figures=figures)
    used_after, peaks = _used_bytes(fleet), replica.close()
    yield _describe_share(plan, speeds[1])
    stages = {stage.device: stage for stage in plan.forecast.devices}
    for peak in peaks:
        stage, device = stages[peak.device], fleet.device(peak.device)
        outside = used_after[device.uuid] - used_before[device.uuid] - peak.reserved_bytes
        yield from _compare_memory(
            peak.device,
            {
                "allocated": (stage.allocated_bytes, peak.allocated_bytes),
                "reserved": (stage.reserved_bytes, peak.reserved_bytes),
                "outside PyTorch": (device.reserve_bytes, max(outside, 0)),
            },
        )


def measure_tuning(fleet: Fleet, directory: str, quick: bool) -> Iterator[Finding]:
    """Run a step of LoRA fine-tuning, and compare its memory with the forecast."""
    settings = TuneSettings(
        steps=1,
        batch=2 * len(fleet.devices),
        seq_length=_QUICK_SEQ_LENGTH if quick else _SEQ_LENGTH,
    )
    data, save = Path(directory) / "text.jsonl", Path(directory) / f"run-{'-'.join(fleet.names)}"
    try:
        report = duoka.tune(directory, data, fleet, save=save, settings=settings, replicas=1).report
    except InfeasibleError as error:
        yield Finding("skipped", str(error).partition("\n")[0])
        return
    if report is None:
        yield Finding("error", "the run ended without a report")
        return
    text = f"a LoRA step takes {format_seconds(report.step_seconds)}"
    yield Finding("ok", text, figures={"step_seconds": report.step_seconds})
    for device in report.devices:
        yield from _compare_memory(
            device.device,
            {
                "allocated": (device.forecast_allocated_bytes, device.allocated_bytes),
                "reserved": (device.forecast_reserved_bytes, device.reserved_bytes),
            },
        )


def _describe_load(plan: Plan, seconds: float, times: list[float]) -> Finding:
    """Describe the time from a plan to an engine, and the reading of weights, if it reported it."""
    size = sum(stage.weight_bytes for stage in plan.forecast.devices)
    text = f"{format_bytes(size)} of weights, ready in {format_seconds(seconds)} with the proof"
    reading = times[-1] - times[0] if len(times) > 1 else None
    if reading:
        text += f"; read in {format_seconds(reading)}, {size / reading / 1e9:.2f} GB/s"
    figures = {"weight_bytes": size, "ready_seconds": seconds, "read_seconds": reading}
    return Finding("ok", text, figures=figures)


def _describe_share(plan: Plan, speed: float) -> Finding:
    """Compare the speed of one request with the memory bandwidth: each token reads all weights.

    Embeddings aren't read.
    """
    config = json.loads((Path(plan.source) / "config.json").read_text())
    seconds = 0.0
    for stage in plan.forecast.devices:
        rate = read_rate(stage.device, getattr(torch, plan.workload.dtype))
        is_first = stage.device == plan.devices[0]
        embeddings = 2 * config["vocab_size"] * config["hidden_size"] if is_first else 0
        seconds += (stage.weight_bytes - embeddings) / rate
    text = f"batch 1 uses {speed * seconds:.0%} of the measured memory bandwidth"
    return Finding("ok", text, figures={"share_of_bandwidth": speed * seconds})


def _compare_memory(device: str, sizes: Mapping[str, tuple[int, int]]) -> Iterator[Finding]:
    """Compare forecast and measured bytes of each kind; a forecast that is too low is an error."""
    for kind, (forecast, measured) in sizes.items():
        # Less than a segment of the allocator doesn't matter: `reserved` counts segments.
        slack_bytes = SMALL_SEGMENT_BYTES if kind == "allocated" else 0
        is_right = measured <= forecast * (1 + _MOST_UNDER) + slack_bytes
        error = f" ({measured / forecast - 1:+.2%})" if forecast else ""
        sizes_text = f"{format_bytes(measured)}, forecast {format_bytes(forecast)}"
        text = f"{device}: {kind} {sizes_text}{error}"
        meaning = "" if is_right else "the forecast is too low: models may run out of memory"
        figures: dict[str, Any] = {
            "device": device, "kind": kind, "forecast_bytes": forecast, "measured_bytes": measured
        }  # fmt: skip
        yield Finding("ok" if is_right else "error", text, meaning, figures=figures)


def _used_bytes(fleet: Fleet) -> dict[str, int]:
    """Return the used bytes of each GPU, of all processes, by UUID."""
    parts = [part for gpu in nvml.read().gpus for part in (gpu, *gpu.instances)]
    sizes = {part.uuid: (part.total_bytes or 0) - (part.free_bytes or 0) for part in parts}
    return {device.uuid: sizes.get(device.uuid, 0) for device in fleet.devices}
