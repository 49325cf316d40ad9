"""Attention over pages and CUDA graphs against slower ways, and the memory bandwidth of a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from duoka import models
from duoka.forecast.serving import Capacity
from duoka.hardware.device import Device
from duoka.runtime.call import step_graphs, try_attention
from duoka.runtime.call.paged_model import PagedModel
from duoka.tools.bench.calibrate import load_random_weights, read_rate
from duoka.tools.doctor import Finding

_HEAD_DIMS = (64, 128)
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
_CAPACITY = Capacity(
    sequences=16, context_tokens=512, pages=32, page_tokens=256, step_tokens=64, has_graphs=True
)


def check_attention(device: Device) -> Iterator[Finding]:
    """Compare FlashAttention over pages on a GPU with the CPU's attention."""
    if device.has_bfloat16 is False:
        yield Finding("skipped", f"{device.name}: FlashAttention needs an Ampere GPU or newer")
        return
    for head_dim in _HEAD_DIMS:
        difference = try_attention.attention_difference(torch.device(device.name), head_dim)
        what = f"{device.name}: FlashAttention (pages, head_dim {head_dim}) differs from the CPU's"
        yield _judge_difference(what, difference, try_attention.TOLERANCE)


def check_graphs(device: Device) -> Iterator[Finding]:
    """Compare decode steps as CUDA graphs with the same kernels without graphs."""
    if device.has_bfloat16 is False:
        yield Finding("skipped", f"{device.name}: CUDA graphs need FlashAttention")
        return
    model = models.build(_CONFIG, dtype=torch.bfloat16)
    load_random_weights(model, device.name)
    paged = PagedModel(model, _CAPACITY, torch.device(device.name))
    paged.start()
    sizes = paged.cache.capacity.graph_steps()
    if not sizes:
        yield Finding("skipped", f"{device.name}: CUDA graphs need FlashAttention over pages")
        return
    differences = [step_graphs.relative_difference(*paged.record_graph(size)) for size in sizes]
    paged.close()
    difference = float(torch.tensor(differences).max())
    what = f"{device.name}: {len(sizes)} CUDA graphs of decode steps differ from eager steps"
    yield _judge_difference(what, difference, step_graphs.TOLERANCE)


def _judge_difference(what: str, difference: float, tolerance: float) -> Finding:
    """Return the finding of a relative difference; NaN is an error."""
    is_right = difference <= tolerance
    figures = {"difference": difference if math.isfinite(difference) else None}
    text = f"{what} by {difference:.2%} (limit {tolerance:.0%})"
    meaning = "" if is_right else "answers of models on it would be wrong"
    return Finding("ok" if is_right else "error", text, meaning, figures=figures)


def measure_bandwidth(device: Device) -> Iterator[Finding]:
    """Measure the memory bandwidth of a GPU, beside the catalogue's or the calibrated one."""
    dtype = torch.float16 if device.has_bfloat16 is False else torch.bfloat16
    rate, expected = read_rate(device.name, dtype), device.memory_bytes_per_second
    share = "" if expected is None else f", {rate / expected:.0%} of {expected / 1e9:.0f} expected"
    figures = {"bytes_per_second": rate, "expected_bytes_per_second": expected}
    yield Finding("ok", f"{device.name}: reads {rate / 1e9:.0f} GB/s{share}", figures=figures)
