"""Reasons of plans as data, and the table of their sentences.

A plan keeps its reasons as kinds with numbers and names, in its file too, so that a sentence can
be reworded. The values of other placements belong to an explanation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter

from duoka.base.units import format_bytes, format_count
from duoka.errors import FormatError
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import find_device
from .room import LEAST_CHUNK_TOKENS, is_tight, room_bytes

_CROSSINGS = "{crossings}, and at least {free} stay free on each."
_SENTENCES = {
    "one-gpu": "One GPU suffices: {first} holds all of it, and nothing crosses between GPUs.",
    "gpus": "{used} of {gpus} GPUs are needed; {fewer} the workload{condition}.",
    "little-room": "Little room: {devices}{condition}.",
    "balanced": "Every GPU is used, and the fullest has as large a share of headroom as can be.",
    "sequential": "The GPUs are filled in the order given, each as far as it goes before the next.",
    "pins": "As pinned: {pins}.",
    "reserve": "As asked, {size} of {device} were to stay free; it isn't used.",
    "tied": "Tied weights are kept once: the tied module runs on its partner's GPU.",
    "nothing-offloaded": "Nothing is offloaded: all weights fit the GPUs.",
    "offloaded": (
        "The weights of {modules} stay in the host's memory, {size}; with less there nothing "
        "fits. All of that goes over PCIe for each token: {time}."
    ),
    "host-unknown": "Whether the host has so much memory isn't known: its GPUs were declared.",
    "cpu-unused": (
        "The CPU computes nothing: it would be slow. A device map can put modules there."
    ),
    "chunks": "The prompt runs in chunks of {tokens} tokens: whole, it needs more memory.",
    "small-chunks": (
        "The prompt runs in chunks of {tokens} tokens, which takes longer: in larger ones it needs "
        "more memory."
    ),
    "vision-batch": "Images are encoded {images} at a time: all at once need more memory.",
    "quantized": "The weights become {form}: {tried} they don't fit.",
    "offloaded-unquantized": "Some weights leave the GPUs: {tried} they don't fit.",
    "largest-batch": "The largest batch that fits {tokens} tokens each is {batch}: {limit}.",
    "longest-context": (
        "The longest context that fits is {tokens} tokens, in steps of {step}: {limit}."
    ),
    "model-limit": "The longest context is {tokens} tokens: the model was made for no more.",
    "device-map": f"As the device map says: {_CROSSINGS}",
    "own-plan": f"duoka's own plan for these GPUs uses {{devices}}: {_CROSSINGS}",
    "note": "{text}",  # of whoever made the profile or the device map
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason of a plan: a kind of the table, with the numbers and names of its sentence."""

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
        """The sentence."""
        return _SENTENCES[self.kind].format_map(self.values)


def gpus_reason(
    used: int, gpus: int, first_device: str, *, is_limited: bool, lack_room: bool
) -> Iterator[Reason]:
    """Give the reason for the number of devices, as few as possible.

    `first` is the first one that is, `is_limited` says whether modules had demands on them, and
    `lack_room` whether fewer might hold it all and have too little room left.
    """
    if used == 1 and gpus > 1:
        yield Reason("one-gpu", {"first": first_device})
    elif used < gpus or lack_room:
        fewer = "no single one holds" if used == 2 else f"no {used - 1} of them hold"
        condition = " with what is demanded of its modules" if is_limited else ""
        condition += " with room to spare" if lack_room else ""
        words = {"fewer": fewer, "condition": condition}
        yield Reason("gpus", {"used": used, "gpus": gpus, **words})


def demand_reasons(
    constraints: Constraints, fleet: Fleet, reserved: Mapping[str, int], used: Collection[str]
) -> Iterator[Reason]:
    """Give the demands obeyed; reserves of devices in use are shown in the table."""
    if constraints.strategy != "auto":
        yield Reason(constraints.strategy)
    if constraints.pins:
        pins = [f"{name} on {find_device(at, fleet)}" for name, at in constraints.pins]
        yield Reason("pins", {"pins": ", ".join(pins)})
    for name, size in reserved.items():
        if name not in used:
            yield Reason("reserve", {"size": format_bytes(size), "device": name})


def offload_reason(num_modules: int, num_bytes: int, seconds: float | None) -> Reason:
    """Give the weights in the host's memory, and the cost, under offloading."""
    if not num_modules:
        return Reason("nothing-offloaded")
    values = {
        "modules": format_count(num_modules, "module"),
        "size": format_bytes(num_bytes),
        "time": f"about {seconds:.2g} s" if seconds else "how long that takes isn't known",
    }
    return Reason("offloaded", values)


def chunk_reason(requested: Workload, resolved: Workload) -> Iterator[Reason]:
    """Give the reason for chunks of the prompt, or passes of images, not asked for."""
    if requested.images and requested.vision_batch == "auto" and resolved.vision_batch is not None:
        yield Reason("vision-batch", {"images": resolved.vision_batch})
    chunk = resolved.prefill_chunk_tokens
    if resolved.is_paged:
        return  # it is what a step takes of all requests
    if requested.prefill_chunk_tokens == "auto" and isinstance(chunk, int):
        kind = "small-chunks" if chunk < LEAST_CHUNK_TOKENS else "chunks"
        yield Reason(kind, {"tokens": chunk})


def room_reasons(stages: Sequence[StageBytes], *, chosen: bool) -> Iterator[Reason]:
    """Report too little free memory; `chosen` is True if duoka searched for more."""
    tight = [
        f"{stage.device} has {format_bytes(stage.free_bytes)} free "
        f"instead of {format_bytes(room_bytes(stage.budget_bytes))}"
        for stage in stages
        if is_tight(stage)
    ]
    if tight:
        condition = "; no placement that fits leaves so much on each" if chosen else ""
        yield Reason("little-room", {"devices": ", ".join(tight), "condition": condition})


def quantization_reason(
    resolved: Workload, tried: Sequence[str], *, is_offloaded: bool
) -> Iterator[Reason]:
    """Give the reason for the quantization, if left open."""
    forms = ["unquantized" if form == "none" else f"in {form}" for form in tried]
    if forms and is_offloaded:
        yield Reason("offloaded-unquantized", {"tried": " or ".join(forms)})
    elif forms:
        yield Reason("quantized", {"form": resolved.quantize, "tried": " or ".join(forms)})


def crossing_values(crossings: int, free_bytes: int) -> dict[str, int | str]:
    """Return the values for comparing placements."""
    times = {0: "nothing crosses between devices", 1: "each token crosses between devices once"}
    return {
        "crossings": times.get(crossings, f"each token crosses between devices {crossings} times"),
        "free": format_bytes(free_bytes),
    }
