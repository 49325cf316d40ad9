"""The parts of the self-test that run in processes of their own.

The argument is a JSON object: the part, the UUIDs of its GPUs, and the options of the part. The
process writes a line of JSON for each finding.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import duoka
from duoka import models
from duoka.base.serialization import to_dict
from duoka.base.units import format_bytes
from duoka.forecast.allocator import SMALL_SEGMENT_BYTES
from duoka.forecast.serving import Capacity
from duoka.hardware import nvml
from duoka.hardware.fleet import Fleet
from duoka.runtime.call import step_graphs, try_attention
from duoka.runtime.call.paged_model import PagedModel
from duoka.tools.bench.calibrate import CONFIG, load_random_weights, read_rate
from duoka.tools.bench.measure import ReplicaEngine
from duoka.tools.doctor.diagnose import examine
from duoka.tools.doctor.facts import Finding

_MOST_UNDER = 0.001  # of a forecast
_CAPACITY = Capacity(
    sequences=16, context_tokens=512, pages=32, page_tokens=256, step_tokens=64, graph_tokens=16
)
_SEQUENCES, _PROMPT_TOKENS, _NEW_TOKENS, _SEQ_LENGTH = 16, 128, 32, 256


def main() -> None:
    """Run the part that the first argument describes."""
    request = json.loads(sys.argv[1])
    part = partial(_PARTS[request["part"]], Fleet.detect(request["gpus"]), **request["options"])
    for finding in examine("", "", part).findings:
        sys.stdout.write(json.dumps(to_dict(finding)) + "\n")


def _row(name: str, is_right: bool = True, /, **figures: float) -> Finding:
    """Return a finding with its figures as text; an error has only text, which may contain NaN."""
    texts = []
    for key, value in figures.items():
        number = format_bytes(int(value)) if key.endswith("_bytes") else f"{value:.4g}"
        texts.append(f"{key.removesuffix('_bytes').replace('_', ' ')} {number}")
    text = f"{name}: {', '.join(texts)}"
    ok = Finding("ok", text, figures={"name": name, **figures})
    return ok if is_right else Finding("error", text)


def _compare(device: str, kind: str, forecast: int, measured: int) -> Finding:
    """Compare forecast and measured bytes; a forecast that is too low is an error.

    Less than a segment of allocated memory doesn't matter: `reserved` counts segments.
    """
    slack_bytes = SMALL_SEGMENT_BYTES if kind == "allocated" else 0
    is_right = measured <= forecast * (1 + _MOST_UNDER) + slack_bytes
    return _row(f"{device} {kind}", is_right, forecast_bytes=forecast, measured_bytes=measured)


def check_kernels(fleet: Fleet) -> Iterator[Finding]:
    """Compare attention with the CPU's, and CUDA graphs with eager steps."""
    (device,) = fleet.devices
    where = torch.device(device.name)
    if device.has_bfloat16 is False:
        yield Finding("skipped", "FlashAttention and CUDA graphs need an Ampere GPU or newer")
        return
    for head_dim in (64, 128):
        value = try_attention.attention_difference(where, head_dim)
        text, is_right = f"FlashAttention, head_dim {head_dim}", value < try_attention.TOLERANCE
        yield _row(text, is_right, difference_from_CPU=value)
    model = models.build(CONFIG, dtype=torch.bfloat16)
    load_random_weights(model, device.name)
    paged = PagedModel(model, _CAPACITY, where)
    paged.start()
    sizes = paged.cache.capacity.graph_steps()
    values = [step_graphs.relative_difference(*paged.record_graph(size)) for size in sizes]
    value = float(torch.tensor(values).max())
    yield _row("CUDA graphs", value <= step_graphs.TOLERANCE, difference_from_eager=value)


def check_engine(fleet: Fleet, directory: str, graphs: bool) -> Iterator[Finding]:
    """Load a model, generate with 1 and 16 requests, and compare the memory with its forecast."""
    work = duoka.Workload(
        cache="paged", batch=_SEQUENCES, prompt_tokens=_PROMPT_TOKENS, new_tokens=_NEW_TOKENS,
        prefill_chunk_tokens=_PROMPT_TOKENS, pages_for_batch=True, cuda_graphs=graphs,
    )  # fmt: skip
    plan = duoka.plan(directory, fleet, work, use_all=True)
    stages = {stage.device: stage for stage in plan.forecast.devices}
    used_before, times = _used_bytes(), [time.perf_counter()]
    replica = ReplicaEngine(
        plan, warm_up="every", progress=lambda *_: times.append(time.perf_counter())
    )
    times += [time.perf_counter()] * (len(times) == 1)  # processes of GPUs report no progress
    size = sum(stage.weight_bytes for stage in stages.values())
    yield _row("proof and loading", weight_bytes=size, seconds=times[-1] - times[0])
    loads = [(number, _PROMPT_TOKENS, _NEW_TOKENS) for number in (1, _SEQUENCES)]
    speeds = [replica.rates(*load).many_tokens_per_second or 0.0 for load in loads]
    used_after, peaks = _used_bytes(), replica.close()
    rates = {name: read_rate(name, getattr(torch, plan.workload.dtype)) for name in stages}
    yield _row("memory bandwidth", **{f"{name} GB/s": rate / 1e9 for name, rate in rates.items()})
    least = sum(stage.weight_bytes / rates[name] for name, stage in stages.items())
    for (number, *_), speed in zip(loads, speeds, strict=True):
        share = speed / number * least
        yield _row(f"batch {number}", tokens_per_second=speed, share_of_bandwidth=share)
    for peak in peaks:
        device, stage = fleet.device(peak.device), stages[peak.device]
        outside = used_after[device.uuid] - used_before[device.uuid] - peak.reserved_bytes
        yield _compare(peak.device, "allocated", stage.allocated_bytes, peak.allocated_bytes)
        yield _compare(peak.device, "reserved", stage.reserved_bytes, peak.reserved_bytes)
        yield _compare(peak.device, "outside PyTorch", device.reserve_bytes, max(outside, 0))


def check_tuning(fleet: Fleet, directory: str) -> Iterator[Finding]:
    """Run a step of LoRA fine-tuning, and compare its memory with the forecast."""
    settings = duoka.TuneSettings(steps=1, batch=2 * len(fleet.devices), seq_length=_SEQ_LENGTH)
    save, data = Path(directory, f"run {' '.join(fleet.names)}"), Path(directory, "text.jsonl")
    report = duoka.tune(directory, data, fleet, save=save, settings=settings, replicas=1).report
    assert report is not None, "a step was run"
    yield _row("LoRA step", seconds=report.step_seconds)
    for peaks in report.devices:
        for kind in ("allocated", "reserved"):
            sizes = (getattr(peaks, f"{prefix}{kind}_bytes") for prefix in ("forecast_", ""))
            yield _compare(peaks.device, kind, *sizes)


def _used_bytes() -> dict[str, int]:
    """Return the used bytes of each GPU, of all processes, by UUID."""
    parts = [part for gpu in nvml.read().gpus for part in (gpu, *gpu.instances)]
    return {part.uuid: (part.total_bytes or 0) - (part.free_bytes or 0) for part in parts}


_PARTS: dict[str, Callable[..., Iterator[Finding]]] = {
    "kernels": check_kernels,
    "engine": check_engine,
    "tune": check_tuning,
}

if __name__ == "__main__":
    main()
