"""Sentences that explain a plan."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from duoka.base.units import format_bytes, format_count
from duoka.planner.explain import BoundaryMove, Explanation, Share

from .words import join_words, name_modules

_AIMS = {
    "headroom": "maximize the smallest free memory over all GPUs",
    "latency": "minimize the total time of a {work}",
    "throughput": "minimize the time of a {work} in the slowest stage",
    "balance": "maximize the smallest free fraction of the budget over all GPUs",
    "order": "fill each GPU completely before the next",
}
_VALUE_PHRASES = {
    "headroom": ("The tightest, {},", "has", "leaves more headroom than"),
    "balance": ("The fullest, {},", "has", "leaves more headroom than"),
    "latency": ("A {work}", "takes", "takes less than"),
    "throughput": ("The slowest, on {},", "takes", "has one that takes less than"),
}
_NEGLIGIBLE_BYTES = 4096


def describe_objective(explanation: Explanation) -> Iterator[str]:
    """Describe the objective, the plan's value, and the bound that proves it optimal."""
    objective = explanation.objective
    values = explanation.value, explanation.bound
    reached, bound = (format_value(explanation, value) for value in values)
    binding = explanation.binding_device
    if objective not in _AIMS:
        yield (
            f"No objective: the device map was given. {binding} has the least headroom: "
            f"{reached} free."
        )
        return
    num = len(explanation.shares)
    where = "on one GPU" if num == 1 else f"on {num} GPUs"
    if objective not in _VALUE_PHRASES:
        yield f"The GPUs are used in the order given: {_AIMS[objective]}."
        return
    subject, verb, beyond = _VALUE_PHRASES[objective]
    who = subject.format(binding, work=explanation.work)
    yield f"Objective: {objective} ({_AIMS[objective].format(work=explanation.work)})."
    unit = "" if objective in ("latency", "throughput") else " of headroom"
    room = " with the recommended headroom" if explanation.leaves_room and num > 1 else ""
    proof = f"proved bound: {where} no placement{room} {beyond} {bound}"
    yield f"{who} {verb} {reached}{unit}; {proof}."


def format_value(explanation: Explanation, value: float) -> str:
    """Format a value of the objective with its unit."""
    if explanation.objective in ("latency", "throughput"):
        return format_duration(value)
    if explanation.objective == "balance":
        return f"{value:.1%}"
    if explanation.objective == "order":
        return format_count(round(value), "block")
    return format_bytes(round(value))


def format_duration(seconds: float) -> str:
    """Format seconds in s (two decimals), or in ms or µs (one decimal)."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def describe_memory(share: Share) -> str:
    """Describe the memory of a device."""
    needed, budget = format_bytes(share.requested_bytes), format_bytes(share.budget_bytes)
    return (
        f"Its tensors need {needed} of {budget}: {format_bytes(share.headroom_bytes)} of headroom."
    )


def explain_neighbors(explanation: Explanation, device: str) -> Iterator[str]:
    """Explain why a device holds no fewer and no more modules."""
    now = {share.device: share for share in explanation.shares}
    for change in explanation.changes:
        if change.giver.device == device:
            yield (
                f"No fewer modules: {_describe_loss(change, now)}{_effect_of(change, explanation)}"
            )
    for change in explanation.changes:
        if change.taker.device == device:
            yield f"No more modules: {_describe_gain(change)}{_effect_of(change, explanation)}"


def _describe_loss(change: BoundaryMove, now: dict[str, Share]) -> str:
    """Describe the memory that the neighbor would need to take some of a device's modules."""
    what, taker = name_modules(change.modules), change.taker
    if trouble := _describe_shortage(taker, f"fragmentation on {taker.device}", taker.device):
        return f"with {what} {trouble}"
    added_bytes = taker.requested_bytes - now[taker.device].requested_bytes
    headroom = now[taker.device].headroom_bytes
    return (
        f"{what} would go to {taker.device}, which has {format_bytes(headroom)} of headroom and "
        f"would need {format_bytes(added_bytes)}"
    )


def _describe_gain(change: BoundaryMove) -> str:
    """Describe the memory that a device would need to take some of the neighbor's modules."""
    taker = change.taker
    needs = (
        f"it would need {format_bytes(taker.requested_bytes)} of {format_bytes(taker.budget_bytes)}"
    )
    added = f"{name_modules(change.modules)} of {change.giver.device}"
    return f"with {added} {_describe_shortage(taker, 'fragmentation', 'it') or needs}"


def _describe_shortage(share: Share, memory: str, device: str) -> str:
    """Describe fragmentation or low headroom after a move; "" if neither occurs."""
    if share.is_fragmented:
        return f"{memory} would exceed its budget"
    return f"{device} would have less than the recommended headroom" if share.is_tight else ""


def _effect_of(change: BoundaryMove, explanation: Explanation) -> str:
    """Describe the effect of a move on the objective, as the end of a sentence."""
    if change.outcome == "forbidden":
        return ": excluded by the pins."
    if change.taker.is_fragmented or change.outcome == "tight":
        return "."
    if change.value is None:
        return f": {_shortfall(-min(change.giver.headroom_bytes, change.taker.headroom_bytes))}."
    now = {share.device: share for share in explanation.shares}
    then = {**now, change.giver.device: change.giver, change.taker.device: change.taker}
    headrooms = [
        format_bytes(min(s.headroom_bytes for s in shares.values())) for shares in (then, now)
    ]
    tightest = f"the tightest GPU would have {headrooms[0]} of headroom instead of {headrooms[1]}"
    if change.outcome == "equal":
        but = f", but {tightest}" if headrooms[0] != headrooms[1] else ""
        return f": equal for the objective{but}."
    if explanation.objective in ("latency", "throughput"):
        reached = [format_value(explanation, value) for value in (change.value, explanation.value)]
        return f": that would be {reached[0]} instead of {reached[1]}."
    return f": {tightest}."


def explain_gpu_count(explanation: Explanation) -> str:
    """Explain why fewer GPUs don't suffice; "" if the explanation has no fewer GPUs."""
    fewer_devices = explanation.fewer
    if fewer_devices is None:
        return ""
    names, is_one = join_words(fewer_devices.devices), len(fewer_devices.devices) == 1
    which = f"on the largest one, {names}," if is_one else f"on {names}, the largest,"
    missing = _shortfall(fewer_devices.missing_bytes, "at least ")
    number = f"{len(explanation.shares)} GPUs and not {len(fewer_devices.devices)}"
    room = ", including the recommended headroom" if explanation.leaves_room else ""
    return f"{number}: {which} {missing}{room}."


def _shortfall(num_bytes: int, bound_prefix: str = "") -> str:
    """Format missing bytes; `bound_prefix` precedes a lower bound, such as "at least "."""
    # A lower bound can be close to 0 if the real obstacle is the split or fragmentation.
    if num_bytes < _NEGLIGIBLE_BYTES:
        return "it misses the budget slightly" + (" for every split" if bound_prefix else "")
    return f"{bound_prefix}{format_bytes(num_bytes)} are missing"


def render_explanation(explanation: Explanation) -> RenderableType:
    """Return a rich renderable: the objective, then each GPU."""
    return Group(*_parts(explanation))


def _parts(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the sections: the objective, and each GPU."""
    yield Text("why", style="bold")
    sentences = (*describe_objective(explanation), explain_gpu_count(explanation))
    yield from map(_indent, filter(None, sentences))
    for share in explanation.shares:
        yield Text.assemble((share.device, "bold"), " has ", name_modules(share.modules))
        yield _indent(describe_memory(share))
        yield from map(_indent, explain_neighbors(explanation, share.device))


def _indent(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))
