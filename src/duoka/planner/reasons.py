"""Reasons of plans as data, and the table of their sentences.

A plan and its file store a reason as the key of a sentence in `_SENTENCES` with the values of the
sentence's placeholders, so that a sentence can be reworded without a new file version. Comparisons
with other placements are computed in `explain`, not here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter

from duoka.base.units import format_bytes, format_count
from duoka.errors import FormatError
from duoka.forecast.costs import Costs
from duoka.forecast.latency import HOST_BYTES_PER_SECOND
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import find_device
from .room import LEAST_CHUNK_TOKENS, is_tight, room_bytes

DISK_BYTES_PER_SECOND = 2e9
"""The rate of a disk that is assumed for the time of loading."""
LOADING_BYTES = 2**29
"""Host memory for reading and quantizing, besides weights that stay there."""

_CROSSINGS = "{crossings}; every GPU keeps at least {free} free."
_SENTENCES = {
    "one-gpu": "One GPU is enough: {first} holds the whole model.",
    "gpus": "{used} of {gpus} GPUs are needed: {fewer} the workload{condition}.",
    "little-room": "Low headroom: {devices}{condition}.",
    "balanced": "Every GPU is used; the smallest free share of a budget is maximized.",
    "sequential": "The GPUs are filled in the order given, each completely before the next.",
    "pins": "Pinned: {pins}.",
    "reserve": "{device} is not used; {size} of it were reserved.",
    "tied": "Tied weights are stored once: the tied module runs on the same GPU.",
    "nothing-offloaded": "No weights are offloaded: all fit on the GPUs.",
    "offloaded": (
        "{size} of weights ({modules}) are offloaded to CPU memory, the smallest amount that "
        "fits. They are copied over PCIe for each token: {time}."
    ),
    "host-experts": (
        "The experts of {layers} are in host memory ({size}), and the CPU computes them. A step "
        "reads {read} of them at {rate}, with experts chosen evenly."
    ),
    "fetched-experts": (
        "The experts of {layers} are in host memory ({size}), and their GPUs fetch them, and keep "
        "{cache}. A step fetches {read}, with experts chosen evenly; texts that "
        "choose the same experts again fetch less."
    ),
    "trained-beside": (
        "All experts are in host memory ({size}), frozen; the GPUs fetch them in each pass."
    ),
    "faster-host": "With host memory twice as fast, a request would get about {rate} tokens/s.",
    "another-gpu": "With another {gpu}, a request would get about {rate} tokens/s.",
    "loading": (
        "Loading reads {size}, in about {time} from a disk of 2 GB/s, and needs {peak} of host "
        "memory."
    ),
    "host-unknown": "The CPU memory is not checked, because the GPUs were declared.",
    "cpu-unused": (
        "No module runs on the CPU, which is slow; a device map can place modules there."
    ),
    "chunks": "Prefill runs in chunks of {tokens} tokens; a single pass would need more memory.",
    "small-chunks": (
        "Prefill runs in chunks of {tokens} tokens; larger chunks would be faster and need more "
        "memory."
    ),
    "vision-batch": "Images are encoded {images} at a time; all at once would need more memory.",
    "quantized": "Weights are quantized to {form}: {tried} they don't fit.",
    "offloaded-unquantized": "Some weights are offloaded: {tried} they don't fit.",
    "largest-batch": "The largest batch of {tokens} tokens each is {batch}: {limit}.",
    "longest-context": (
        "The longest context that fits is {tokens} tokens (in steps of {step}): {limit}."
    ),
    "model-limit": "The longest context is {tokens} tokens, the limit of the model.",
    "device-map": f"Placed by the device map: {_CROSSINGS}",
    "own-plan": f"duoka's own plan for these GPUs uses {{devices}}: {_CROSSINGS}",
    "note": "{text}",  # a note of the profile, or about the device map
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason of a plan: the key of a sentence in `_SENTENCES`, and its placeholders' values."""

    kind: str
    values: Mapping[str, int | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        template = _SENTENCES.get(self.kind)
        if template is None:
            raise FormatError(f"there is no reason {self.kind[:40]!r}")
        names = {name for _, name, _, _ in Formatter().parse(template) if name}
        if names != set(self.values):
            raise FormatError(f"the reason {self.kind} has other values than its sentence")

    @property
    def text(self) -> str:
        """The sentence, with its values filled in."""
        return _SENTENCES[self.kind].format_map(self.values)


def gpus_reason(
    used: int, gpus: int, first_device: str, *, is_limited: bool, lack_room: bool
) -> Iterator[Reason]:
    """Yield the reason for using `used` of `gpus` devices, the fewest that are enough.

    `first_device` is the first device in use. `is_limited` is True if modules are pinned.
    `lack_room` is True if fewer devices might hold the workload, but without the recommended free
    memory. Nothing is yielded if all devices are in use and fewer can't hold the workload.
    """
    if used == 1 and gpus > 1:
        yield Reason("one-gpu", {"first": first_device})
    elif used < gpus or lack_room:
        fewer = "no single GPU fits" if used == 2 else f"no {used - 1} of them fit"
        condition = " under the given constraints" if is_limited else ""
        condition += " with the recommended headroom" if lack_room else ""
        words = {"fewer": fewer, "condition": condition}
        yield Reason("gpus", {"used": used, "gpus": gpus, **words})


def demand_reasons(
    constraints: Constraints, fleet: Fleet, reserved: Mapping[str, int], used: Collection[str]
) -> Iterator[Reason]:
    """Yield a reason for the strategy, for the pins, and for each unused device with a reserve.

    `reserved` maps devices to reserved bytes. A reserve on a device in use needs no reason, because
    the table of the plan shows it.
    """
    if constraints.strategy != "auto":
        yield Reason(constraints.strategy)
    if constraints.pins:
        pins = [f"{name} on {find_device(at, fleet)}" for name, at in constraints.pins]
        yield Reason("pins", {"pins": ", ".join(pins)})
    for name, size in reserved.items():
        if name not in used:
            yield Reason("reserve", {"size": format_bytes(size), "device": name})


def offload_reason(num_modules: int, num_bytes: int, seconds: float | None) -> Reason:
    """Return the reason for the amount of offloaded weights.

    `seconds` is the time to copy the weights for one token; None or 0 if unknown.
    """
    if not num_modules:
        return Reason("nothing-offloaded")
    values = {
        "modules": format_count(num_modules, "module"),
        "size": format_bytes(num_bytes),
        "time": f"about {seconds:.2g} s" if seconds else "the time is unknown",
    }
    return Reason("offloaded", values)


def host_reason(costs: Costs) -> Reason:
    """Return the reason for the experts in host memory."""
    values = {
        "layers": format_count(len(costs.workload.host_experts), "layer"),
        "size": format_bytes(costs.profile.expert_bytes),
        "read": format_bytes(round(costs.latency.host_bytes)),
    }
    cache_bytes = costs.workload.expert_cache_bytes
    if cache_bytes and not costs.latency.host_seconds:
        layer_bytes = costs.profile.expert_bytes // len(costs.workload.host_experts)
        cache = f"{format_bytes(min(cache_bytes, layer_bytes))} of each layer"
        cache = "the experts of one token" if cache_bytes == 1 else cache
        return Reason("fetched-experts", values | {"cache": cache})
    known = costs.host and costs.host.memory_bytes_per_second
    rate = f"{(known or HOST_BYTES_PER_SECOND) / 1e9:.0f} GB/s"
    source = rate if known else f"an assumed {rate} (duoka bench --calibrate measures it)"
    return Reason("host-experts", values | {"rate": source})


def load_reason(stored_bytes: int | None, expert_bytes: int) -> Iterator[Reason]:
    """Yield the time and the host memory of loading experts to the host, if the size is known."""
    if expert_bytes and stored_bytes:
        yield Reason(
            "loading",
            {
                "size": format_bytes(stored_bytes),
                "time": f"{stored_bytes / DISK_BYTES_PER_SECOND:.0f} s",
                "peak": format_bytes(expert_bytes + LOADING_BYTES),
            },
        )


def faster_reasons(costs: Costs, fleet: Fleet, token_seconds: float | None) -> Iterator[Reason]:
    """Yield what faster host memory and a further GPU bring, if a token's time is known.

    The further GPU is like the last one, and holds experts of as many layers as fit.
    """
    device, host_seconds = fleet.devices[-1], costs.latency.host_seconds
    bandwidth = device.memory_bytes_per_second
    if not token_seconds or not host_seconds or not bandwidth:
        return
    rate = 1 / (token_seconds - host_seconds / 2)
    yield Reason("faster-host", {"rate": f"{rate:.2g}"})
    num_layers = len(costs.workload.host_experts)
    layer_bytes = costs.profile.expert_bytes / num_layers
    share = min(costs.usable_bytes(device.budget_bytes) // layer_bytes / num_layers, 1.0)
    rate = 1 / (token_seconds - share * (host_seconds - costs.latency.host_bytes / bandwidth))
    name = device.product or f"GPU like {device.name}"
    yield Reason("another-gpu", {"gpu": name, "rate": f"{rate:.2g}"})


def chunk_reason(requested: Workload, resolved: Workload) -> Iterator[Reason]:
    """Yield a reason for an image batch or a prefill chunk reduced where the request has "auto"."""
    if requested.images and requested.vision_batch == "auto" and resolved.vision_batch is not None:
        yield Reason("vision-batch", {"images": resolved.vision_batch})
    chunk = resolved.prefill_chunk_tokens
    if resolved.is_paged:
        return  # with a paged cache the chunk is the token budget of a step of the scheduler
    if requested.prefill_chunk_tokens == "auto" and isinstance(chunk, int):
        kind = "small-chunks" if chunk < LEAST_CHUNK_TOKENS else "chunks"
        yield Reason(kind, {"tokens": chunk})


def room_reasons(stages: Sequence[StageBytes], *, chosen: bool) -> Iterator[Reason]:
    """Yield a reason if a device has less free memory than recommended.

    `chosen` is True if the planner chose the placement, False if a device map did. For True the
    sentence adds that no placement leaves the recommended memory free on every GPU: the planner
    takes a placement that leaves less only if there is none.
    """
    tight = [
        f"{stage.device} has {format_bytes(stage.free_bytes)} free (recommended: "
        f"{format_bytes(room_bytes(stage.budget_bytes))})"
        for stage in stages
        if is_tight(stage)
    ]
    if tight:
        condition = "; no placement has the recommended headroom on every GPU" if chosen else ""
        yield Reason("little-room", {"devices": ", ".join(tight), "condition": condition})


def quantization_reason(
    resolved: Workload, tried: Sequence[str], *, is_offloaded: bool
) -> Iterator[Reason]:
    """Yield the reason for a quantization (or offloading) that the planner chose by itself.

    `tried` are the schemes that didn't fit; if empty, there is no reason to give.
    """
    forms = ["unquantized" if form == "none" else f"in {form}" for form in tried]
    if forms and is_offloaded:
        yield Reason("offloaded-unquantized", {"tried": " or ".join(forms)})
    elif forms:
        yield Reason("quantized", {"form": resolved.quantize, "tried": " or ".join(forms)})


def crossing_values(crossings: int, free_bytes: int) -> dict[str, int | str]:
    """Return the values of the sentences "device-map" and "own-plan".

    `crossings` counts the transfers between devices per token; `free_bytes` is the least free
    memory of a device.
    """
    times = {0: "no activations cross devices", 1: "activations cross devices once per token"}
    return {
        "crossings": times.get(crossings, f"activations cross devices {crossings} times per token"),
        "free": format_bytes(free_bytes),
    }
